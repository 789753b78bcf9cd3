"""
Several messages as one value: their columns, and how to settle all, some or the rest of them.

Rule 1: no `Message` exists until one is asked for. A second request returns the same object.
Rule 2: the leases decide whether a message is settled. So the batch and its messages may be settled by turns, in
several threads.

Source: SQS's batches and their partial failures (`batchItemFailures`).
"""

# ruff: noqa: SLF001  # one unit with `Message`

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from operator import index as to_index
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from confluent_kafka import Message as KafkaMessage

from kmq_spark.consumer.leases import Settled, Verb
from kmq_spark.consumer.message import Message, failure_of
from kmq_spark.core.durations import milliseconds
from kmq_spark.core.markers import MAX_TEXT_CHARS
from kmq_spark.errors import ConfigError, LeaseLostError, UsageError
from kmq_spark.kafka.clock import now_s
from kmq_spark.wire.headers import PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Set as AbstractSet
    from datetime import timedelta

    import pyarrow as pa

    from kmq_spark.consumer.leases import Lease

Failures = Mapping[int, str | BaseException]
"""Exception or text by index of a message that failed."""

_VALUE, _KEY = KafkaMessage.value, KafkaMessage.key


_FAILED = (Verb.RELEASE, Verb.REJECT)
"""How a message is settled whose work failed."""


class Part(NamedTuple):
    """Messages `[begin, end)` of a batch that have the same lease."""

    lease: Lease
    begin: int
    end: int


class Settlement(NamedTuple):
    """
    What settling messages of a batch did.

    `settled`: settled by the call while they were held. `late`: after their lease had run out; their markers are still
    written. `gone`: no longer held, for example because the consumer was closed. `why`: why the first one was lost.
    """

    settled: int = 0
    late: int = 0
    gone: int = 0
    why: str = ""

    def plus(self, other: Settlement) -> Settlement:
        """Return the sum of two."""
        return Settlement(
            self.settled + other.settled, self.late + other.late, self.gone + other.gone, self.why or other.why
        )


class Batch(Sequence[Message]):
    """
    Messages that were received together, each held until it is settled or its lease ends.

    A sequence: `len(batch)`, `batch[3]` and iteration. A `Message` is made when it is asked for. An empty batch is
    false. Created by `QueueConsumer`. Any thread of the process that received it may settle it.
    """

    __slots__ = ("_acked", "_begins", "_lock", "_made", "_offsets", "_parts", "_records", "_rest")

    def __init__(
        self, records: Sequence[KafkaMessage] = (), offsets: Sequence[int] = (), parts: Sequence[Part] = ()
    ) -> None:
        self._records = records
        self._offsets = offsets
        self._parts = parts
        self._begins = [part.begin for part in parts]
        self._made: dict[int, Message] = {}
        # Indices that `ack` was called with and that have no `Message`.
        self._acked: set[int] = set()
        # How the rest of the messages of a lease was settled, by the lease's `id`.
        self._rest: dict[int, Verb] = {}
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        """Return size, place of the first message and state, without the content."""
        if not self._records:
            return "<Batch of 0 messages>"
        first = f"{self._parts[0].lease.queue_partition}:{self._offsets[0]}"
        left = sum([len(set(found).intersection(lease.held_offsets())) for lease, found in self._by_lease()])
        return f"<Batch of {len(self)} messages, the first is {first}, {left} are not settled>"

    def __len__(self) -> int:
        """Return the count of messages, settled ones included."""
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | list[Message]:
        """Return a message, or a list of messages for a slice."""
        if isinstance(index, slice):
            return [self._message(number) for number in range(len(self))[index]]
        return self._message(range(len(self))[index])

    def __iter__(self) -> Iterator[Message]:
        """Make one message after the other."""
        return map(self._message, range(len(self)))

    def values(self) -> list[bytes | None]:
        """Return the payloads, in the order of the batch. Makes no messages."""
        return list(map(_VALUE, self._records))

    def keys(self) -> list[bytes | None]:
        """Return the keys, in the order of the batch. Makes no messages."""
        return list(map(_KEY, self._records))

    def to_arrow(self) -> pa.Table:
        """
        Return the messages as an Arrow table, one row for each, in the order of the batch. Needs pyarrow.

        Returns:
            Columns `value: binary`, `key: binary`, `headers: list<struct<name: string, value: binary>>` (without those
            of kmq-spark), `partition: int32`, `offset: int64`, `appended_at: timestamp[ms, UTC]`,
            `delivery_count: int32`.

        Raises:
            ConfigError: pyarrow is not installed.
        """
        try:
            import pyarrow as pa  # noqa: PLC0415  # optional
        except ImportError as error:
            message = "to_arrow needs pyarrow: got no module pyarrow, 18 or newer; run `pip install pyarrow`"
            raise ConfigError(message) from error
        records = self._records
        columns: list[tuple[str, Any, list[Any]]] = [
            ("key", pa.binary(), self.keys()),
            ("value", pa.binary(), self.values()),
            (
                "headers",
                pa.list_(pa.struct([("name", pa.string()), ("value", pa.binary())])),
                [_own_headers(record) for record in records],
            ),
            ("partition", pa.int32(), [record.partition() for record in records]),
            ("offset", pa.int64(), list(self._offsets)),
            ("appended_at", pa.timestamp("ms", "UTC"), [record.timestamp()[1] for record in records]),
            (
                "delivery_count",
                pa.int32(),
                [part.lease.delivery_count for part in self._parts for _ in range(part.begin, part.end)],
            ),
        ]
        return pa.table(
            [pa.array(values, kind) for _, kind, values in columns],
            schema=pa.schema([(name, kind) for name, kind, _ in columns]),
        )

    def ack(self, indices: Iterable[int] | None = None) -> None:
        """
        Acknowledge messages: they are done and are not delivered again.

        This method returns before the marker is written; `QueueConsumer.flush` waits for it.

        Args:
            indices: Indices of the messages; by default all that are not settled.

        Raises:
            ConfigError: One of *indices* is out of bounds.
            LeaseLostError: Leases ran out earlier. The ENDs are still written and take effect for the messages that are
                not redelivered yet.
            UsageError: One of *indices* was released or rejected earlier. Nothing was settled.
        """
        if indices is None:
            self._raise_lost(self._settle_rest())
            return
        if isinstance(indices, Mapping):
            # Of failures, most likely: they would be lost.
            message = f"indices are not allowed: got {indices!r}; expected a list of indices; see `fail` and `reject`"
            raise ConfigError(message)
        with self._lock:
            self._raise_lost(self._ack_some(self._checked(indices, Verb.ACK)))

    def release(self, indices: Iterable[int] | None = None, delay: float | timedelta = 0) -> None:
        """
        Release messages for redelivery after *delay*. This delivery counts.

        Args:
            indices: Indices of the messages; by default all that are not settled.
            delay: Time until they are due for redelivery, seconds or a timedelta, 0 to 12 hours. The queue's backoff is
                not added.

        Raises:
            ConfigError: *delay* or one of *indices* is out of bounds.
            LeaseLostError: Leases ran out earlier; the messages are redelivered anyway.
            UsageError: One of *indices* was acknowledged or rejected earlier. Nothing was settled.
        """
        delay_ms = milliseconds("delay", delay)
        if indices is None:
            self._raise_lost(self._settle_rest(Settled(Verb.RELEASE, -1, delay_ms)))
            return
        with self._lock:
            numbers = self._checked(indices, Verb.RELEASE)
            self._raise_lost(self._settle_each(dict.fromkeys(numbers, Settled(Verb.RELEASE, -1, delay_ms))))

    def fail(self, failures: Failures, delay: float | timedelta = 0) -> None:
        """
        Release messages that failed, as `run` does if a handler raises: the queue's backoff is added to *delay*.

        Args:
            failures: Exception or text by index of the message. The text is stored with the delivery.
            delay: Time until they are due for redelivery, without the backoff, seconds or a timedelta, 0 to 12 hours.

        Raises:
            ConfigError: *delay* or an index is out of bounds.
            LeaseLostError: Leases ran out earlier; the messages are redelivered anyway.
            UsageError: One of the messages was acknowledged or rejected earlier. Nothing was settled.
        """
        delay_ms = milliseconds("delay", delay)
        kinds = {index: failure_of(error, delay_ms) for index, error in failures.items()}
        self._raise_lost(self._settle_as(kinds)[Verb.RELEASE])

    def reject(self, reasons: Mapping[int, str]) -> None:
        """
        Reject messages: the tracker sends them to the dead-letter topic, and they are not delivered again.

        Args:
            reasons: Text to store with the dead letter, cut to 1,000 characters, by index of the message.

        Raises:
            ConfigError: An index is out of bounds.
            LeaseLostError: Leases ran out earlier; the messages may be redelivered instead.
            UsageError: One of the messages was acknowledged or released earlier. Nothing was settled.
        """
        with self._lock:
            numbers, texts = self._checked(reasons, Verb.REJECT), reasons.values()
            kinds = [Settled(Verb.REJECT, -1, reason=str(text)[:MAX_TEXT_CHARS]) for text in texts]
            self._raise_lost(self._settle_each(dict(zip(numbers, kinds, strict=True))))

    def _to_messages(self) -> list[Message]:
        """Return all messages, for a caller that uses the batch no more. Cheaper than iteration. For the consumer."""
        if self._made:
            return list(self)
        messages: list[Message] = []
        for lease, begin, end in self._parts:
            lease.split()
            messages += map(Message, self._records[begin:end], self._offsets[begin:end], repeat(lease))
        return messages

    def _drop(self, indices: AbstractSet[int]) -> Batch:
        """Return a batch without some messages. For the consumer, before it hands the batch out."""
        return self._of([number for number in range(len(self)) if number not in indices])

    def _leased(self, now: float) -> Batch:
        """Return a batch without the messages whose lease has ended. For the consumer, as `_split`."""
        if min([part.lease.ends_at for part in self._parts], default=now) >= now:
            return self
        return self._of([i for part in self._parts if part.lease.ends_at >= now for i in range(part.begin, part.end)])

    def _split(self, count: int) -> tuple[Batch, Batch]:
        """Return the first *count* messages and the others. For the consumer, before it hands the batch out."""
        if count >= len(self):
            return self, Batch()
        return self._of(range(count)), self._of(range(count, len(self)))

    def _settle_as(self, kinds: Mapping[int, Settled]) -> dict[Verb, Settlement]:
        """Settle messages by index, all or none. Return by verb what was settled and lost. For the consumer."""
        with self._lock:
            of_verb = {verb: {i: kind for i, kind in kinds.items() if kind.verb is verb} for verb in _FAILED}
            checked = {verb: self._checked(each, verb) for verb, each in of_verb.items()}
            return {
                verb: self._settle_each(dict(zip(checked[verb], each.values(), strict=True)))
                for verb, each in of_verb.items()
            }

    def _release_uncounted(self) -> int:
        """Release what is held, delivery not counted; return how many messages. For the consumer."""
        kind = Settled(Verb.RELEASE, -1, never_handed_out=True)
        return self._settle_rest(kind, is_lost_skipped=True).settled

    def _verb_counts(self) -> Counter[Verb | None]:
        """Return how many messages were settled by each verb; None for not settled. For the consumer."""
        if self._made or self._acked:
            return Counter(map(self._verb_of, range(len(self))))
        counts: Counter[Verb | None] = Counter()
        for lease, begin, end in self._parts:
            counts[self._rest.get(id(lease))] += end - begin
        return counts

    def _settle_rest(self, kind: Settled | None = None, *, is_lost_skipped: bool = False) -> Settlement:
        """
        Settle every message that is not settled. For the consumer.

        *kind*: what is written for each message; None for an acknowledgement. *is_lost_skipped*: leave out messages
        whose lease has ended.
        """
        total = Settlement()
        with self._lock:
            for lease, offsets in self._by_lease():
                has_ended = lease.ends_at < now_s()
                if not (has_ended and is_lost_skipped):
                    total = total.plus(self._settle_lease(lease, offsets, kind, has_ended=has_ended))
            for message in self._extended():
                total = total.plus(_settle_one(message, kind))
        return total

    def _settle_lease(
        self, lease: Lease, offsets: Sequence[int], kind: Settled | None, *, has_ended: bool
    ) -> Settlement:
        unsettled = self._unsettled_count(lease) if lease.end_reason else 0
        taken = lease.take(offsets)
        if kind is None:
            lease.outbox.ack_together(taken)
        else:
            lease.outbox.others.extend([kind._replace(message_offset=offset) for offset in taken])
        if taken:
            verb = Verb.ACK if kind is None else kind.verb
            self._rest[id(lease)] = verb
            if self._made:
                self._note_made(lease, set(taken), verb)
        gone = max(0, unsettled - len(taken))
        why = (lease.end_reason or "the lease ran out") if gone or (has_ended and taken) else ""
        return Settlement(0, len(taken), gone, why) if has_ended else Settlement(len(taken), 0, gone, why)

    def _note_made(self, lease: Lease, taken: AbstractSet[int], verb: Verb) -> None:
        for message in list(self._made.values()):
            if message._lease is lease and message._verb is None and message._offset in taken:
                message._verb = verb

    def _extended(self) -> list[Message]:
        """Return the messages with a lease of their own that are not settled."""
        made = list(self._made.items())
        return [each for index, each in made if each._lease is not self._lease(index) and each._verb is None]

    def _ack_some(self, indices: Iterable[int]) -> Settlement:
        total, now = Settlement(), now_s()
        for index in indices:
            message = self._made.get(index)
            if message is not None:
                total = total.plus(_settle_one(message, None))
                continue
            lease, offset = self._lease(index), self._offsets[index]
            lease.split()
            try:
                lease.held.remove(offset)
            except KeyError:
                if lease.end_reason and self._verb_of(index) is None:
                    total = total.plus(Settlement(gone=1, why=lease.end_reason))
                continue
            self._acked.add(index)
            lease.outbox.acked.append(offset)
            if lease.ends_at < now:
                total = total.plus(Settlement(late=1, why=lease.end_reason or "the lease ran out"))
        return total

    def _settle_each(self, kinds: Mapping[int, Settled]) -> Settlement:
        total = Settlement()
        for index, kind in kinds.items():
            total = total.plus(_settle_one(self._message(index), kind))
        return total

    def _checked(self, indices: Iterable[int], verb: Verb) -> list[int]:
        """Return the indices, each once, if all of them may be settled with *verb*."""
        numbers = list(dict.fromkeys(map(to_index, indices)))
        for number in numbers:
            if not 0 <= number < len(self):
                message = f"index is out of bounds: got {number}, the batch has {len(self)} messages; count from 0"
                raise ConfigError(message)
            before = self._verb_of(number)
            if before not in (None, verb):
                message = (
                    f"message {number} of the batch is already settled: got {verb.value} after {before.value}; "
                    "settle a message once"
                )
                raise UsageError(message)
        return numbers

    def _raise_lost(self, settlement: Settlement) -> None:
        count = settlement.late + settlement.gone
        if count:
            message = (
                f"leases of {count} of {len(self)} messages of the batch are lost: {settlement.why}; these messages "
                "may be delivered again, raise max_lease if handlers take longer"
            )
            raise LeaseLostError(message)

    def _message(self, index: int) -> Message:
        message = self._made.get(index)
        if message is None:
            lease = self._lease(index)
            lease.split()
            message = Message(self._records[index], self._offsets[index], lease)
            message._verb = self._verb_of(index)
            message = self._made.setdefault(index, message)
        return message

    def _verb_of(self, index: int) -> Verb | None:
        message = self._made.get(index)
        if message is not None:
            return message._verb
        if index in self._acked:
            return Verb.ACK
        return self._rest.get(id(self._lease(index))) if self._rest else None

    def _unsettled_count(self, lease: Lease) -> int:
        return sum(
            [
                self._verb_of(index) is None
                for part in self._parts
                if part.lease is lease
                for index in range(part.begin, part.end)
            ]
        )

    def _lease(self, index: int) -> Lease:
        parts = self._parts
        return parts[0].lease if len(parts) == 1 else parts[bisect_right(self._begins, index) - 1].lease

    def _by_lease(self) -> list[tuple[Lease, Sequence[int]]]:
        """Return the offsets of each lease. Most batches have one lease with one part."""
        if len(self._parts) == 1:
            return [(self._parts[0].lease, self._offsets)]
        found: dict[int, tuple[Lease, list[int]]] = {}
        for lease, begin, end in self._parts:
            found.setdefault(id(lease), (lease, []))[1].extend(self._offsets[begin:end])
        return list(found.values())

    def _of(self, indices: Sequence[int]) -> Batch:
        parts: list[Part] = []
        for position, index in enumerate(indices):
            lease = self._lease(index)
            if parts and parts[-1].lease is lease:
                parts[-1] = parts[-1]._replace(end=position + 1)
            else:
                parts.append(Part(lease, position, position + 1))
        batch = Batch([self._records[index] for index in indices], [self._offsets[index] for index in indices], parts)
        batch._made = {position: self._made[index] for position, index in enumerate(indices) if index in self._made}
        return batch


def _own_headers(record: KafkaMessage) -> list[dict[str, Any]]:
    headers: Any = record.headers()
    return [{"name": name, "value": value} for name, value in headers or () if not name.startswith(PREFIX)]


def _settle_one(message: Message, kind: Settled | None) -> Settlement:
    was_settled = message.is_settled
    lease = message._lease
    try:
        if kind is None:
            message.ack()
        else:
            message._settle(kind._replace(message_offset=message._offset))
    except LeaseLostError:
        why = lease.end_reason or "the lease ran out"
        return Settlement(gone=1, why=why) if was_settled else Settlement(late=1, why=why)
    return Settlement(0 if was_settled else 1)
