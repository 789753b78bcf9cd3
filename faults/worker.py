"""
A consumer process of the campaign: works off messages as its profile says, and writes down what it does.

    python -m faults.worker '<profile as JSON>'

What happens to a message depends on the seed, its id and its delivery count: a run can be repeated.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from faults.events import EventFile
from faults.hands import JOB, PROCESS, TRANSACTION
from faults.topics import results_of
from kmq_spark.consumer.consumer import QueueConsumer
from kmq_spark.errors import BatchFailed, KmqError, LeaseLostError, TransactionError

if TYPE_CHECKING:
    from kmq_spark.consumer.batch import Batch
    from kmq_spark.consumer.message import Message

NICENESS = 10
RAISED_SHARE = 0.5
"""Of the batches with failures: they are raised; the others are returned."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What a worker does."""

    bootstrap_servers: str
    queue: str
    name: str = "worker"
    seed: int = 1
    lease_ms: int = 2_000
    logical_queue: str = ""
    mode: str = "run"
    """
    `run` or `batch` (handlers in threads), `receive` (a loop that settles or forgets), `transaction` (a loop that
    writes a result with each ack), or `job` (handlers in threads that do so, each in a transaction of its own).
    """
    keep_alive: bool = True
    threads: int = 4
    max_in_flight: int = 200
    size: int = 2_000
    """Maximum number of messages of a `receive` and of a batch."""
    work_ms: int = 2
    raised: float = 0.02
    rejected: float = 0.005
    slow: float = 0.002
    """Shares of deliveries whose handler raises, rejects, or takes 1.5 leases."""
    poison: float = 0.001
    """Share of messages whose handler raises at every delivery."""
    kills_every: int = 0
    """Of so many messages of a sender, one kills the process that handles it, at every delivery; 0: none."""
    forgotten: float = 0.0
    """Share of deliveries that `receive` never settles."""
    isolate_after: int = 0
    """Off: a worker that forgets on purpose would make suspects of innocent messages."""
    group_protocol: str = "consumer"
    extra: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the form in which a worker process gets it."""
        return json.dumps(asdict(self))


class HandlerError(Exception):
    """What a handler raises on purpose."""


class Work:
    """What a worker does with messages, each step written down."""

    def __init__(self, profile: Profile, events: EventFile) -> None:
        self._profile, self._events = profile, events
        self._most = min(profile.size, profile.max_in_flight)
        self._random = random.Random(profile.seed)  # noqa: S311  # repeatable
        self.is_stopping = False

    def handle(self, message: Message) -> None:
        """Handle one message; returning acknowledges it."""
        profile, note = self._profile, _note(message)
        self._events.write("delivered", **note)
        choice = random.Random(f"{profile.seed}:{note['id']}:{message.delivery_count}").random()  # noqa: S311  # as above
        fate = random.Random(f"{profile.seed}:{note['id']}").random()  # noqa: S311  # as above
        time.sleep(profile.work_ms / 1000)
        if profile.kills_every and int(note["id"].rpartition("-")[2]) % profile.kills_every == profile.kills_every // 2:
            self._events.write("killed", **note)
            os.kill(os.getpid(), signal.SIGKILL)
        if fate < profile.poison or choice < profile.raised:
            self._events.write("raised", **note)
            raise HandlerError(note["id"])
        if choice < profile.raised + profile.rejected:
            self._events.write("rejected", **note)
            message.reject("as the campaign chose")
        elif choice < profile.raised + profile.rejected + profile.slow:
            time.sleep(profile.lease_ms * 1.5 / 1000)
        self._events.write("handled", **note)

    def handle_batch(self, batch: Batch) -> dict[int, str | BaseException] | None:
        """Handle the messages of a batch; the seed chooses whether failures are returned or raised."""
        failures: dict[int, str | BaseException] = {}
        for index, message in enumerate(batch):
            try:
                self.handle(message)
            except HandlerError as error:
                failures[index] = error
        choice = random.Random(f"{self._profile.seed}:{batch[0].id.message_offset}").random()  # noqa: S311  # as above
        if failures and choice < RAISED_SHARE:
            raise BatchFailed(failures)
        return failures

    def receive(self, consumer: QueueConsumer) -> None:
        """Settle most messages and forget some."""
        while not self.is_stopping:
            for message in consumer.receive(self._most, timeout=0.2):
                self._events.write("delivered", **_note(message))
                if not message.is_settled and self._random.random() >= self._profile.forgotten:
                    self._events.write("handled", **_note(message))
                    # A process that was starved may have lost the lease: its message comes again.
                    with contextlib.suppress(LeaseLostError):
                        message.ack()
            self._events.write("held", count=consumer.in_flight_count)
            time.sleep(self._profile.work_ms / 1000)

    def receive_in_transactions(self, consumer: QueueConsumer) -> None:
        """Take messages, and settle them in transactions."""
        while not self.is_stopping:
            self.transact(consumer, consumer.receive(self._most, timeout=0.2))

    def transact(self, consumer: QueueConsumer, held: list[Message]) -> None:
        """Write a result for each of these messages, and ack them together."""
        results, headers = results_of(self._profile.queue), {PROCESS: str(os.getpid())}
        for message in held:
            self._events.write("delivered", **_note(message))
            self._events.write("handled", **_note(message))
        time.sleep(self._profile.work_ms / 1000)
        try:
            with consumer.transaction() as tx:
                for message in held:
                    tx.send(results, message.value, key=message.id.text, headers=headers)
                    tx.ack(message)
        except KmqError as error:
            # Of an unknown outcome the tracker decides: it redelivers what was not committed.
            is_unknown = isinstance(error, TransactionError) and not error.nothing_written
            if not (error.retriable or is_unknown or isinstance(error, LeaseLostError)):
                raise
            logging.getLogger(__name__).warning("a transaction failed, its messages come again: %s", error)
            for message in held:
                with contextlib.suppress(KmqError):
                    if not message.is_settled:
                        message.release()


def _note(message: Message) -> dict[str, Any]:
    name = (message.value or b"").partition(b"|")[0].decode()
    return {"id": name, "copy": list(message.id), "delivery": message.delivery_count}


class LogEvents(logging.Handler):
    """Notes that the consumer sends markers again: the answer of the broker did not come in time."""

    def __init__(self, events: EventFile) -> None:
        super().__init__()
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        """Note it; called with each log line of the consumer."""
        if getattr(record, "action", "") == "markers_resent":
            self._events.write("resent")


def main(text: str) -> None:
    """Work until SIGTERM."""
    profile = Profile(**json.loads(text))
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    for handles in ("handling", "worker"):  # handlers raise on purpose
        logging.getLogger(f"kmq_spark.consumer.{handles}").setLevel(logging.CRITICAL)
    events = EventFile.of_this_process()
    logging.getLogger().addHandler(LogEvents(events))
    consumer = QueueConsumer(
        profile.queue,
        bootstrap_servers=profile.bootstrap_servers,
        logical_queue=profile.logical_queue,
        lease=profile.lease_ms / 1000,
        max_lease=None if profile.keep_alive else profile.lease_ms / 1000,
        max_in_flight=profile.max_in_flight,
        isolate_after=profile.isolate_after,
        extra={"group.protocol": profile.group_protocol, **profile.extra},
    )
    # They share the machine with the tracker and the broker, which in production they do not.
    os.nice(NICENESS)
    work = Work(profile, events)

    def end(_number: int, _frame: object) -> None:
        work.is_stopping = True
        consumer.stop()

    signal.signal(signal.SIGTERM, end)
    # From here on it may be asked to end: before, the signal would kill it.
    mode, queue = profile.mode, profile.logical_queue
    events.write("began", pid=os.getpid(), queue=queue, mode=mode, isolate_after=profile.isolate_after)
    handlers: dict[str, Any] = {
        "run": work.handle,
        "batch": work.handle_batch,
        JOB: lambda message: work.transact(consumer, [message]),
    }
    if mode in handlers:
        options: dict[str, Any] = {"batch": profile.size} if mode == "batch" else {}
        consumer.run(handlers[mode], concurrency=profile.threads, **options)
    else:
        loops = {"receive": work.receive, TRANSACTION: work.receive_in_transactions}
        with consumer:
            loops[mode](consumer)
    events.write("ended")


if __name__ == "__main__":
    main(sys.argv[1])
