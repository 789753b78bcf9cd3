"""
Track which offsets of one partition are wanted, and which were found or are gone.

Rule 1: There is no client in this module. Every wanted offset is reported exactly once.
Rule 2: Records are handled in bulk: if the log contains exactly the wanted offsets, a thousand records cost one
comparison of two lists.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple, cast

from confluent_kafka import Message, TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class PayloadSlice(NamedTuple):
    """
    Consecutive results: a slice of the wanted offsets of one partition.

    Attributes:
        partition: Partition of these offsets.
        first: Index of the first one among the wanted offsets of the partition.
        messages: One entry for each offset, in order; None if the message is gone.
        is_past_end: Whether the offsets are at or past the end of the topic, so that there never was such a message.
    """

    partition: int
    first: int
    messages: list[Message | None]
    is_past_end: bool = False


class WantedOffsets:
    """
    The wanted offsets of one partition and how far they were read.

    Args:
        topic: Topic.
        partition: Partition of the topic.
        offsets: Wanted offsets, ascending, without repeats, not empty.

    Attributes:
        offsets: Wanted offsets, without those reported as past the end of the log.
        cursor: Index of the first offset that was not reported yet.
        read_to: First offset that was not read.
    """

    def __init__(self, topic: str, partition: int, offsets: Sequence[int]) -> None:
        """Start with nothing read."""
        self.topic = topic
        self.partition = partition
        self.offsets = list(offsets)
        self.cursor = 0
        self.read_to = self.offsets[0]

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
        Add the next records of the log and yield what is now known.

        Compaction, deletion and aborted transactions leave gaps in the log. A wanted offset in a gap is gone.

        Args:
            records: Records of this partition, ascending, not empty. Records that were already read before a seek are
                ignored.

        Yields:
            At most one slice.
        """
        if self.is_done:
            return
        offsets = cast("list[int]", list(map(Message.offset, records)))
        self.read_to = max(self.read_to, offsets[-1] + 1)
        wanted, first, found = self.offsets, self.cursor, cast("list[Message | None]", [])
        if wanted[first : first + len(offsets)] == offsets:
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
