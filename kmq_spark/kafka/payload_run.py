"""
What is wanted of one partition, and what has come of it: records in, stretches of payloads out.

Rule 1: no client here; every wanted offset is told exactly once.
Rule 2: many at a time: where the log holds just what is wanted, a thousand records cost one comparison of two lists.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple, cast

from confluent_kafka import Message, TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Stretch(NamedTuple):
    """
    Neighbours among the offsets that were asked for.

    Attributes:
        partition: Theirs.
        first: Index of the first one in what was asked of this partition.
        messages: One for each, in order; None where it is gone.
    """

    partition: int
    first: int
    messages: list[Message | None]


class Run:
    """
    The wanted offsets of one partition and how far they were read.

    Args:
        topic: Topic.
        partition: Partition of it.
        offsets: Ascending, without repeats, not empty.

    Attributes:
        offsets: What is wanted, less what was told as past the end of the log.
        cursor: Index of the first one that was not told yet.
        read_to: First offset that was not read.
        committed_end: Where the log ended before the reading began, for its leader; a replica may lag behind it.
    """

    def __init__(self, topic: str, partition: int, offsets: Sequence[int]) -> None:
        """Begin with nothing read."""
        self.topic = topic
        self.partition = partition
        self.offsets = [int(offset) for offset in offsets]
        self.cursor = 0
        self.read_to = self.offsets[0]
        self.committed_end = 0

    @property
    def is_done(self) -> bool:
        """Whether each of them was told."""
        return self.cursor >= len(self.offsets)

    @property
    def left(self) -> int:
        """How many were not."""
        return len(self.offsets) - self.cursor

    def position(self) -> TopicPartition:
        """Return where to read on."""
        return TopicPartition(self.topic, self.partition, self.offsets[self.cursor])

    def take(self, records: list[Message]) -> Iterator[Stretch]:
        """
        Take in what comes next in the log.

        Compaction, deletion and aborted transactions leave holes in it: what was passed over is gone.

        Args:
            records: Of this partition, ascending, not empty. Such as were read before a seek are known and passed over.
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
                while cursor < end and wanted[cursor] < offset:  # passed over: gone
                    found.append(None)
                    cursor += 1
                if cursor < end and wanted[cursor] == offset:
                    found.append(record)
                    cursor += 1
        if found:
            self.cursor += len(found)
            yield Stretch(self.partition, first, found)

    def drop_below(self, offset: int) -> Iterator[Stretch]:
        """Tell as gone what lies below an offset."""
        first = self.cursor
        self.cursor = bisect_left(self.offsets, offset, lo=first)
        if self.cursor > first:
            yield Stretch(self.partition, first, [None] * (self.cursor - first))

    def drop_from(self, end: int) -> Iterator[Stretch]:
        """Tell the offsets that the topic has not reached: a marker may name any number."""
        known = bisect_left(self.offsets, end, lo=self.cursor)
        beyond = len(self.offsets) - known
        del self.offsets[known:]
        if beyond:
            yield Stretch(self.partition, known, [None] * beyond)
