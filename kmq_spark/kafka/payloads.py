"""
Read single messages from a topic by their offsets: the payloads of messages that are redelivered.

Rule 1: every wanted message is reported exactly once. One that no longer exists (below the beginning of the log, in a
gap, at or past the high watermark) is reported as None, and never its neighbour instead. The reader waits for a message
that is only hidden by an open transaction.
Rule 2: the broker is asked for an end only if a wanted offset is at or past the last known one: ends only grow. Where
this is no longer true (retention, a new topic of the same name), a fetch fails, and then the bounds are read.

Source: kmq redelivers whatever record it finds after a seek; this module differs in that.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, cast

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from kmq_spark.errors import KafkaClientError
from kmq_spark.kafka.client_errors import client_error, retry_until_answered
from kmq_spark.kafka.lookups import bounds_of, ends_now, partitions_now
from kmq_spark.kafka.settings import make_client

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

logger = logging.getLogger(__name__)

_ERROR = Message.error

MAX_SKIPPED = 2_000
"""
Maximum number of unwanted messages that are read and dropped instead of a seek, because a seek empties the fetch queue.
"""

POLL_MESSAGES = 2_000

READ_AHEAD: dict[str, str | int | float | bool] = {
    # Messages after the last wanted offset are fetched but not used. This value keeps the fetcher busy while a
    # thousand messages are processed. With the default of 100,000, most of the fetched data would be discarded.
    "queued.min.messages": 10_000,
}
"""How much the client may fetch ahead. Settings of the operator override these."""

RECHECK_S = 0.25
"""
Pause before an end that is too low is read again, and a partition that is not there is looked for again: a broker that
starts or is behind may say so. One pause for all of them, because the sender holds its lock.
"""


class Payload(NamedTuple):
    """One requested message; `message` is None if it is gone."""

    partition: int
    offset: int
    message: Message | None


class PayloadSlice(NamedTuple):
    """Consecutive results: a slice of the wanted offsets of one partition, from the index *first* on."""

    partition: int
    first: int
    messages: list[Message | None]
    """None for a message that is gone."""
    is_past_end: bool = False
    """Whether the offsets are at or past the end of the topic, so that there never was such a message."""


class WantedOffsets:
    """The wanted offsets of one partition (ascending, without repeats, not empty), and how far they were read."""

    def __init__(self, topic: str, partition: int, offsets: Sequence[int]) -> None:
        self.topic = topic
        self.partition = partition
        self.offsets = list(offsets)
        self.cursor = 0
        """Index of the first offset that was not reported yet."""
        self.read_to = self.offsets[0]
        """First offset that was not read."""

    @property
    def is_done(self) -> bool:
        """Whether every wanted offset was reported."""
        return self.cursor >= len(self.offsets)

    @property
    def left(self) -> int:
        """Number of wanted offsets that were not reported yet."""
        return len(self.offsets) - self.cursor

    def position(self) -> TopicPartition:
        """Return the position at which to continue reading."""
        return TopicPartition(self.topic, self.partition, self.offsets[self.cursor])

    def add(self, records: list[Message]) -> Iterator[PayloadSlice]:
        """
        Add the next records of the log, not empty, and yield what is now known: at most one slice.

        Compaction, deletion and aborted transactions leave gaps in the log. A wanted offset in a gap is gone.
        """
        if self.is_done:
            return
        offsets = cast("list[int]", list(map(Message.offset, records)))
        self.read_to = max(self.read_to, offsets[-1] + 1)
        wanted, first, found = self.offsets, self.cursor, cast("list[Message | None]", [])
        if wanted[first : first + len(offsets)] == offsets:  # a thousand records cost one comparison of two lists
            found += records
        else:
            cursor, end = first, len(wanted)
            for offset, record in zip(offsets, records, strict=True):
                while cursor < end and wanted[cursor] < offset:  # in a gap: gone
                    found.append(None)
                    cursor += 1
                if cursor < end and wanted[cursor] == offset:
                    found.append(record)
                    cursor += 1
        if found:
            self.cursor += len(found)
            yield PayloadSlice(self.partition, first, found)

    def drop_below(self, offset: int) -> Iterator[PayloadSlice]:
        """Report the wanted offsets below an offset as gone."""
        first = self.cursor
        self.cursor = bisect_left(self.offsets, offset, lo=first)
        if self.cursor > first:
            yield PayloadSlice(self.partition, first, [None] * (self.cursor - first))

    def drop_from(self, end: int) -> Iterator[PayloadSlice]:
        """Report the wanted offsets at or past the end of the topic as gone: a marker may contain any offset."""
        known = bisect_left(self.offsets, end, lo=self.cursor)
        beyond = len(self.offsets) - known
        del self.offsets[known:]
        if beyond:
            yield PayloadSlice(self.partition, known, [None] * beyond, is_past_end=True)


class PayloadReader:
    """Reads messages of one topic by (partition, offset). Nothing is sent before the first read."""

    def __init__(self, config: Mapping[str, str | int | float | bool], topic: str, timeout: float) -> None:
        self._config = dict(config)
        self._consumer = self._new_client()
        self._uncommitted: Consumer | None = None
        self._topic = topic
        self._timeout = timeout
        self._known_ends: dict[int, int] = {}  # last stable offsets, by partition

    def close(self) -> None:
        """Close the clients."""
        self._consumer.close()
        if self._uncommitted is not None:
            self._uncommitted.close()

    def read(self, wanted: Mapping[int, Sequence[int]]) -> Iterator[Payload]:
        """
        Yield every wanted message once; offsets by partition, ascending, without repeats.

        Partitions are mixed; within a partition payloads are ascending, but offsets past its end come first.
        """
        for found in self.read_slices(wanted):
            for index, message in enumerate(found.messages, found.first):
                yield Payload(found.partition, wanted[found.partition][index], message)

    def read_slices(self, wanted: Mapping[int, Sequence[int]]) -> Iterator[PayloadSlice]:
        """
        Yield every wanted message once, in bulk: a million messages must not cost one Python step each.

        If nothing arrives in time twice, for example because all remaining messages are hidden by an open transaction,
        that is an error.
        """
        pending = {
            partition: WantedOffsets(self._topic, partition, offsets)
            for partition, offsets in wanted.items()
            if offsets
        }
        try:
            yield from self._read_slices(pending)
        except KafkaClientError as error:
            if not error.retriable:
                raise
            logger.warning("%s; reading them once more with a new client", error, extra={"action": "read_again"})
            self._replace_client()
            yield from self._read_slices(pending)

    def _read_slices(self, pending: dict[int, WantedOffsets]) -> Iterator[PayloadSlice]:
        try:
            yield from self._drop_invented(pending)
            yield from self._skip_removed(self._past_known_ends(pending))
            self._assign(pending)
            yield from self._read_pending(pending)
        except KafkaException as error:
            raise client_error(error, f"cannot read messages back from {self._topic}") from error
        finally:
            self._consumer.unassign()

    def _replace_client(self) -> None:
        """Replace the clients: one that has lost its broker may never connect again. Forget what they knew."""
        self.close()
        self._consumer, self._uncommitted, self._known_ends = self._new_client(), None, {}

    def _new_client(self) -> Consumer:
        config = {**READ_AHEAD, **self._config, "enable.partition.eof": True, "auto.offset.reset": "error"}
        return make_client(Consumer, config)

    def _assign(self, pending: Mapping[int, WantedOffsets]) -> None:
        self._consumer.assign([each.position() for each in pending.values() if not each.is_done])

    def _read_pending(self, pending: dict[int, WantedOffsets]) -> Iterator[PayloadSlice]:
        quiet_since = time.monotonic()
        while not all(each.is_done for each in pending.values()):
            # `consume` waits until it has as many records as requested: request one, then those that are already
            # fetched.
            records = self._consumer.consume(1, 0.1)
            if records:
                records += self._consumer.consume(POLL_MESSAGES, 0)
            if records:
                quiet_since = time.monotonic()
            elif time.monotonic() - quiet_since > self._timeout:
                left = sum(each.left for each in pending.values())
                raise KafkaClientError(
                    f"cannot read messages back from {self._topic}: got none of {left} within {self._timeout:g} s; "
                    "check the broker and whether a transaction hangs (kafka-transactions.sh find-hanging), or raise "
                    "[kafka] timeout",
                    code="_TIMED_OUT",
                    retriable=True,
                )
            yield from self._add(pending, records)
            self._seek_far(pending)

    def _add(self, pending: dict[int, WantedOffsets], records: list[Message]) -> Iterator[PayloadSlice]:
        for partition, group in groupby(records, Message.partition):
            own = pending.get(-1 if partition is None else partition)
            neighbours = list(group)
            if not any(map(_ERROR, neighbours)):
                if own is not None:
                    yield from own.add(neighbours)
                continue
            # Client events (end of partition, errors) are between the records, in log order.
            for is_event, alike in groupby(neighbours, _is_event):
                if is_event:
                    for event in alike:
                        yield from self._handle_event(pending, own, event)
                elif own is not None:
                    yield from own.add(list(alike))

    def _handle_event(
        self, pending: dict[int, WantedOffsets], own: WantedOffsets | None, event: Message
    ) -> Iterator[PayloadSlice]:
        error = event.error()
        assert error is not None
        if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001  # librdkafka's public name for it
            if own is not None:
                # Only offsets below the event's own are gone: a lagging replica reports an end that is below the end of
                # the log.
                yield from own.drop_below(event.offset() or 0)
        elif error.code() == KafkaError._AUTO_OFFSET_RESET:  # noqa: SLF001  # librdkafka's public name for it
            # Retention removed the position while we read: report what is gone and continue at the beginning of the
            # log.
            yield from self._skip_removed(pending.values())
            # The client does not seek in a partition whose position is lost (`_STATE`).
            self._assign(pending)
        elif not error.retriable() and error.code() != KafkaError._TRANSPORT:  # noqa: SLF001  # as above
            raise KafkaException(error)

    def _drop_invented(self, pending: dict[int, WantedOffsets]) -> Iterator[PayloadSlice]:
        """Report what is wanted of partitions that do not exist as gone: a marker may contain any partition number."""
        if new := pending.keys() - self._known_ends.keys():
            new -= self._partitions()
        if new:
            time.sleep(RECHECK_S)
            new -= self._partitions()
        for partition in sorted(new):
            yield from pending.pop(partition).drop_from(0)

    def _partitions(self) -> set[int]:
        return retry_until_answered(
            lambda: partitions_now(self._consumer, self._topic, self._timeout),
            f"cannot read the partitions of {self._topic}",
            self._timeout,
        )

    def _past_known_ends(self, pending: Mapping[int, WantedOffsets]) -> list[WantedOffsets]:
        """Return the partitions of which an offset is wanted that is possibly not in the log."""

        def past(partitions: Iterable[int]) -> list[int]:
            return [each for each in partitions if pending[each].offsets[-1] >= self._known_ends.get(each, 0)]

        if unknown := past(pending):
            self._known_ends |= retry_until_answered(
                lambda: ends_now(self._consumer, self._topic, unknown, self._timeout),
                f"cannot read the offsets of {self._topic}",
                self._timeout,
            )
        return [pending[partition] for partition in past(unknown)]

    def _skip_removed(self, pending: Iterable[WantedOffsets]) -> Iterator[PayloadSlice]:
        beyond = {}
        for each in pending:
            if each.is_done:
                continue
            first, end = bounds_of(self._consumer, TopicPartition(self._topic, each.partition), self._timeout)
            self._known_ends[each.partition] = end
            yield from each.drop_below(first)
            if not each.is_done and each.offsets[-1] >= end:
                beyond[each.partition] = each
        for partition, end in self._log_ends(beyond).items():
            yield from beyond[partition].drop_from(end)

    def _log_ends(self, wanted: Mapping[int, WantedOffsets]) -> dict[int, int]:
        """Return the high watermarks of partitions. Read those twice that are not above what is wanted."""
        if wanted and self._uncommitted is None:
            self._uncommitted = make_client(Consumer, {**self._config, "isolation.level": "read_uncommitted"})

        def read(partitions: Iterable[int]) -> dict[int, int]:
            assert self._uncommitted is not None
            places = [TopicPartition(self._topic, partition) for partition in partitions]
            return {each.partition: bounds_of(self._uncommitted, each, self._timeout).end for each in places}

        ends = read(wanted) if wanted else {}
        if low := [partition for partition, end in ends.items() if end <= wanted[partition].offsets[-1]]:
            time.sleep(RECHECK_S)
            ends |= read(low)
        return ends

    def _seek_far(self, pending: dict[int, WantedOffsets]) -> None:
        for each in pending.values():
            if not each.is_done and each.offsets[each.cursor] - each.read_to > MAX_SKIPPED:
                self._consumer.seek(each.position())
                each.read_to = each.offsets[each.cursor]


def _is_event(record: Message) -> bool:
    return record.error() is not None
