"""
What goes over the pipe of a handler process: messages to it, and what became of them back.

Rule 1: a handler gets a `Message` or a `Batch`, as in a thread. What it settles goes into an outbox of the process, and
back to the consumer when the handler ends.
Rule 2: exceptions go back as name, text and traceback. So the parent imports nothing that a handler imports, and an
exception that cannot be pickled loses nothing.
"""

# ruff: noqa: SLF001  # one unit with `Batch` and `Message`

from __future__ import annotations

import math
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from kmq_spark.consumer.batch import Batch, Part
from kmq_spark.consumer.leases import Lease, Outbox, Settled, Verb
from kmq_spark.consumer.message import Message, text_of_failure
from kmq_spark.consumer.policy import Reject, Retry
from kmq_spark.errors import LeaseLostError, UsageError

if TYPE_CHECKING:
    from confluent_kafka import Message as KafkaMessage

MAX_TRACE_CHARS = 20_000
"""Of a traceback: its end, where the error is."""


class Handed(NamedTuple):
    """Messages for a handler process: their records, and partition, delivery count and time of each lease, in order."""

    records: list[KafkaMessage]
    parts: list[tuple[int, int, int, list[int]]]

    @classmethod
    def of(cls, batch: Batch) -> Handed:
        """Return what a process gets of a batch."""
        parts = [
            (each.queue_partition, each.delivery_count, each.started_at_ms, list(batch._offsets[begin:end]))
            for each, begin, end in batch._parts
        ]
        return cls(list(batch._records), parts)

    def to_batch(self) -> Batch:
        """Return the batch for the handler. Its leases do not end here: the parent knows when they do."""
        parts: list[Part] = []
        for partition, delivery_count, started_at_ms, offsets in self.parts:
            outbox = Outbox(partition)
            outbox.extended = _NoExtensions()
            lease = Lease(
                outbox, delivery_count, set(), 0.0, math.inf, math.inf, offsets=offsets, sizes=[0] * len(offsets),
                started_at_ms=started_at_ms, is_whole=True,
            )  # fmt: skip
            begin = parts[-1].end if parts else 0
            parts.append(Part(lease, begin, begin + len(offsets)))
        return Batch(self.records, [offset for *_, offsets in self.parts for offset in offsets], parts)


class _NoExtensions(list[Any]):
    def append(self, _lease: Lease) -> NoReturn:
        message = (
            "a handler process cannot extend a lease: got a call of extend; expected none, the lease is renewed while "
            "the handler works; raise [worker] max_lease"
        )
        raise UsageError(message)


def batch_of(message: Message) -> Batch:
    """Return a batch that contains only this message."""
    batch = Batch([message._record], [message._offset], [Part(message._lease, 0, 1)])
    batch._made = {0: message}
    return batch


class Carried(NamedTuple):
    """An exception or a text: `kind` is text, error, retry or reject."""

    kind: str
    text: str
    delay_s: float = 0.0
    trace: str = ""

    @classmethod
    def of(cls, error: BaseException | str) -> Carried:
        """Return what is carried of an error."""
        if isinstance(error, (Retry, Reject)):
            text = error.reason or ("" if error.__cause__ is None else text_of_failure(error.__cause__))
            return cls("retry", text, error.delay_ms / 1000) if isinstance(error, Retry) else cls("reject", text)
        if isinstance(error, str):
            return cls("text", error)
        trace = "".join(traceback.format_exception(error))[-MAX_TRACE_CHARS:]
        return cls("error", text_of_failure(error), trace=trace)

    def restored(self) -> Exception | str:
        """Return the text, or an exception with the same name and text, whose cause has the traceback."""
        if self.kind == "text":
            return self.text
        if self.kind in {"retry", "reject"}:
            return Retry(self.text, delay=self.delay_s) if self.kind == "retry" else Reject(self.text)
        name, _, text = self.text.partition(": ")
        error: Exception = type(name, (Exception,), {"__module__": "builtins"})(*([text] if text else []))
        error.__cause__ = HandlerTraceback(f"in the handler process\n{self.trace}")
        return error


class HandlerTraceback(Exception):  # noqa: N818  # as `concurrent.futures` shows the traceback of another process
    """The traceback of a handler process, as text."""


class Outcome(NamedTuple):
    """
    What became of messages that a handler process was given.

    `settled`: how its handler has settled some, by index. `error`: what it raised. `failures`: those that a handler of
    batches says have failed, by index. `refused`: why the run must end: what the handler returned has a wrong type.
    """

    settled: dict[int, Settled]
    error: Carried | None = None
    failures: dict[int, Carried] | None = None
    refused: str = ""

    @staticmethod
    def settled_in(batch: Batch) -> dict[int, Settled]:
        """Return how a handler has settled messages of a batch of `Handed`."""
        found: dict[int, Settled] = {}
        for lease, begin, _ in batch._parts:
            index_of = {offset: begin + number for number, offset in enumerate(lease.offsets)}
            acked = [*lease.outbox.acked, *(r.first + i for r in lease.outbox.acked_ranges for i in range(r.count))]
            for settled in (*(Settled(Verb.ACK, offset) for offset in acked), *lease.outbox.others):
                found[index_of[settled.message_offset]] = settled
        return found

    def settle(self, batch: Batch) -> None:
        """Settle what the handler has settled; all of it, then raise LeaseLostError if a message was lost."""
        lost: list[LeaseLostError] = []
        for index, settled in self.settled.items():
            message = batch[index]
            try:
                if settled.verb is Verb.ACK:
                    message.ack()
                else:
                    message._settle(settled)
            except LeaseLostError as error:
                lost.append(error)
        if lost:
            raise lost[0]
