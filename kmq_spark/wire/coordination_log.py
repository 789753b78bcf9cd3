"""
Records of one partition of the coordination topic to the world of one group: what every member does first.

Rule 1: a record that cannot be read is counted; it moves the group's clock like one of another group.
Rule 2: a reader that does not begin at offset 0 does not know the world until it has read a snapshot that was taken
behind its first offset. Until then it keeps what it reads.
Rule 3: a record of a newer version may have changed the world of other members. A member that reads one must stop.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kmq_spark.core.coordination.effects import Applied, Ignored
from kmq_spark.core.coordination.fold import apply
from kmq_spark.core.coordination.world import World
from kmq_spark.errors import UnsupportedVersionError, WireError
from kmq_spark.wire.coordination import decode_record
from kmq_spark.wire.coordination_snapshot import decode_world

if TYPE_CHECKING:
    from kmq_spark.core.coordination.records import Record, SnapshotPart


class GroupLog:
    """
    Reader of a group: feed it the records of the group's partition, in the order of their offsets.

    *first_offset* is the offset of the first record that is going to be read; 0 = the log is whole. The topic and the
    partition are for error texts.

    Attributes:
        world: As of the last record; provisional while `is_complete` is False.
        record: The last record, None where it was of another group or unreadable.
        is_complete: Whether the world is that of every other reader.
        ignored: How many records, or entries of records, changed nothing, by reason.
        last_fault: Text about the newest unreadable record, empty where there was none.
        unsupported: Text about the first record of a newer version, empty where there was none.
    """

    def __init__(self, group: str, *, topic: str = "", partition: int = -1, first_offset: int = 0) -> None:
        self.world = World(next_offset=first_offset)
        self.is_complete = first_offset == 0
        self.record: Record | None = None
        self.ignored: Counter[Ignored] = Counter()
        self.last_fault = ""
        self.unsupported = ""
        self._has_stranger = False
        self._key = group.encode()
        self._topic, self._partition = topic, partition
        self._first_offset = first_offset
        self._kept: list[tuple[int, int, Record | None]] = []
        self._parts: dict[tuple[str, str, int], list[SnapshotPart]] = {}

    def read(self, offset: int, append_time_ms: int, key: bytes | None, value: bytes | None) -> Applied:
        """
        Read a record; return what it led to.

        Where it completed the world, `is_complete` is True and the effects are those of this record alone.
        """
        record, fault = self._record(offset, key, value)
        self.record = record
        is_new = offset >= self.world.next_offset
        applied = apply(self.world, offset, append_time_ms, record)
        if fault is not None and is_new:
            applied.ignored.append(fault)
        self.ignored.update(applied.ignored)
        if is_new and not self.is_complete:
            self._keep(offset, append_time_ms, record, applied)
        return applied

    @property
    def is_alone(self) -> bool:
        """Whether there is no sign of a member: one may know what was deleted."""
        return not self.world.members and not self._has_stranger

    def accept(self) -> None:
        """Treat the world as complete: the partition was read to its end, and nobody is known to know more."""
        self.is_complete = True
        self._kept, self._parts = [], {}

    def _record(self, offset: int, key: bytes | None, value: bytes | None) -> tuple[Record | None, Ignored | None]:
        if key != self._key:
            return None, None
        try:
            record = decode_record(value, topic=self._topic, partition=self._partition, offset=offset)
        except UnsupportedVersionError as error:
            self.unsupported = self.unsupported or str(error)
            return None, Ignored.UNSUPPORTED
        except WireError as error:
            self.last_fault = str(error)
            return None, Ignored.UNREADABLE
        return record, None

    def _keep(self, offset: int, append_time_ms: int, record: Record | None, applied: Applied) -> None:
        """Keep a record until a snapshot is found, and look whether it completes one."""
        self._kept.append((offset, append_time_ms, record))
        if Ignored.UNKNOWN_MEMBER in applied.ignored:
            self._has_stranger = True
        if record is None or record.snapshot is None or record.snapshot.as_of < self._first_offset:
            return
        part = record.snapshot
        parts = self._parts.setdefault((record.client_id, record.instance, part.as_of), [])
        if part.part != len(parts):
            # A part is missing, or the leader began the snapshot again.
            parts.clear()
        if part.part == len(parts):
            parts.append(part)
        if len(parts) == part.parts and part.as_of <= offset:
            self._adopt(b"".join(one.data for one in parts), part.as_of, record)

    def _adopt(self, data: bytes, as_of: int, record: Record) -> None:
        """Take the world of a snapshot, and apply what was read behind it."""
        try:
            world = decode_world(data)
        except UnsupportedVersionError as error:
            # Not as an unreadable one: who goes on without it has lost the group's tasks and positions.
            self.unsupported = self.unsupported or str(error)
            return
        except WireError as error:
            self.ignored[Ignored.UNREADABLE] += 1
            self.last_fault = str(error)
            return
        writer = world.members.get(record.client_id)
        is_by_leader = writer is not None and writer.instance == record.instance and world.leader == record.client_id
        if world.next_offset != as_of or not (is_by_leader or not world.members):
            self.ignored[Ignored.NOT_LEADER] += 1
            return
        for offset, append_time_ms, kept in self._kept:
            if offset >= as_of:
                apply(world, offset, append_time_ms, kept)
        self.world, self.is_complete = world, True
        self._kept, self._parts = [], {}
