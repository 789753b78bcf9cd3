"""
Fold the records of the coordination topic into rows, one for each change of a group, in Spark's Python workers.

Rule 1: Only `wire.coordination_log` reads records, and only `core.coordination` decides what they change. So the rows
show what every member saw.
Rule 2: The rows do not depend on where the log is cut into batches.
Rule 3: Without its state, after its checkpoint was removed, a query folds the log from its beginning again and leaves
out the rows that the table has. The rows of one group are written in the order of the log; those of two groups are not.

The log may begin after the start of a group, because retention removed records. Then the world of that group is
unknown until the leader's next snapshot, or until no member that is unknown has written for `SILENCE_MS`. Claims that
the snapshot shows become rows with the change `found`.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import pandas as pd

from kmq_spark.core.coordination.effects import Change, Ignored
from kmq_spark.core.coordination.records import FLEET_PREFIX, MAX_HEARTBEAT_MS, is_group
from kmq_spark.wire.coordination_log import GroupLog
from kmq_spark.wire.coordination_snapshot import decode_world, encode_world

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kmq_spark.core.coordination.effects import Applied
    from kmq_spark.tracker.fold_rows import StateHandle

SILENCE_MS = MAX_HEARTBEAT_MS + 5_000
"""A live member writes several heartbeats within this time, whatever its T, milliseconds."""

MOST_KEPT = 100_000
"""Number of records of a partition after which a group whose world is still unknown counts as new."""

FOUND = "found"
"""A claim that was granted by a record that the log no longer has."""

STATE_SCHEMA = "state binary"
"""One binary column, as in the tracker's query."""

FOLDED_SCHEMA = (
    "coordination_partition int, record_offset bigint, change_index int, appended_at_ms bigint, queue string, "
    "group_name string, coordination_group string, change string, client_id string, resource string, epoch bigint"
)
"""Columns of the result of `fold_records`, in SQL."""

_LEFT_OUT = frozenset({Change.UPDATED, Change.MESSAGES_CLAIMED, Change.SNAPSHOT})
"""Changes that say nothing of who owns what; the second one happens with every batch of an at-most-once consumer."""

_REPORTED = frozenset({Ignored.UNREADABLE, Ignored.UNSUPPORTED})


class Row(NamedTuple):
    """A row of the table, with the columns of `FOLDED_SCHEMA`."""

    coordination_partition: int
    record_offset: int
    change_index: int
    appended_at_ms: int
    queue: str | None
    group_name: str | None
    coordination_group: str
    change: str
    client_id: str
    resource: str
    epoch: int | None


class _Change(NamedTuple):
    """The columns of a row that a change sets; epoch -1 = none."""

    change: str
    client_id: str = ""
    resource: str = ""
    epoch: int = -1


class TopicRecord(NamedTuple):
    """A record of the coordination topic; `appended_at_ms` is epoch milliseconds, broker clock."""

    offset: int
    appended_at_ms: int
    key: bytes | None
    value: bytes | None


@dataclass(slots=True)
class PartitionFold:
    """
    The groups of one partition.

    Args:
        partition: Partition of the coordination topic.
        first_offset: Offset of the first record that is read; 0 = the log is whole.

    Attributes:
        next_offset: Offset of the next record, -1 = none was read. After a gap all worlds are unknown.
        first_at_ms: Append time of the first record, -1 = none yet.
        newest_at_ms: Newest append time.
        logs: The groups, by name.
        pending: Rows of groups whose world is unknown.
        kept: The records since the first one, while the world of a group may be unknown.
    """

    partition: int
    first_offset: int
    next_offset: int = -1
    first_at_ms: int = -1
    newest_at_ms: int = -1
    logs: dict[str, GroupLog] = field(default_factory=dict)
    pending: dict[str, list[Row]] = field(default_factory=dict)
    kept: list[TopicRecord] = field(default_factory=list)

    def read(self, record: TopicRecord) -> Iterator[Row]:
        """Read a record, in the order of the offsets; yield what it changed."""
        if 0 <= self.next_offset < record.offset:
            self._begin_again(record.offset)
        self.next_offset = record.offset + 1
        if self.first_at_ms < 0:
            self.first_at_ms = record.appended_at_ms
        self.newest_at_ms = max(self.newest_at_ms, record.appended_at_ms)
        if not self._is_known:
            self.kept.append(record)
        name = (record.key or b"").decode("utf-8", "replace")
        if name not in self.logs and is_group(name):
            self._begin(name)
        for each, log in self.logs.items():
            was_complete = log.is_complete
            # Records of other groups move the clock of each group.
            applied = log.read(record.offset, record.appended_at_ms, record.key, record.value)
            rows = self._rows(each, record, applied)
            if was_complete:
                yield from rows
            elif log.is_complete:
                del self.pending[each]
                yield from self._found(each, record, log)
            else:
                self.pending[each] += rows
                yield from self._accept(each, log)

    @property
    def _is_known(self) -> bool:
        """Whether every live member has written since the first record, and the world of each group is known."""
        return self.first_offset == 0 or (self.newest_at_ms - self.first_at_ms >= SILENCE_MS and not self.pending)

    def _begin_again(self, offset: int) -> None:
        """Forget all worlds, because retention removed records that were not read."""
        self.first_offset, self.first_at_ms, self.newest_at_ms = offset, -1, -1
        self.logs, self.pending, self.kept = {}, {}, []

    def _begin(self, name: str) -> None:
        log = self.logs[name] = GroupLog(name, partition=self.partition, first_offset=self.first_offset)
        if self._is_known:
            log.accept()
        elif not log.is_complete:
            self.pending[name] = []

    def _accept(self, name: str, log: GroupLog) -> Iterator[Row]:
        """Yield the rows of a group, once no live member knows more of it than the log shows."""
        since_ms = max(self.first_at_ms, log.stranger_at_ms)
        if self.newest_at_ms - since_ms >= SILENCE_MS or len(self.kept) >= MOST_KEPT:
            log.accept()
            yield from self.pending.pop(name)

    def _rows(self, group: str, record: TopicRecord, applied: Applied) -> list[Row]:
        changes = [
            _Change(each.change.value, each.client_id, each.resource, each.epoch)
            for each in applied.effects
            if each.change not in _LEFT_OUT
        ] + [_Change(each.value) for each in applied.ignored if each in _REPORTED]
        return [self._row(group, record, index, change) for index, change in enumerate(changes)]

    def _found(self, group: str, record: TopicRecord, log: GroupLog) -> list[Row]:
        held = [(name, resource) for name, resource in sorted(log.world.resources.items()) if resource.holder]
        return [
            self._row(group, record, index, _Change(FOUND, resource.holder, name, resource.epoch))
            for index, (name, resource) in enumerate(held)
        ]

    def _row(self, group: str, record: TopicRecord, index: int, change: _Change) -> Row:
        queue, group_name = None, None
        if group.startswith(FLEET_PREFIX) and change.resource:
            queue, _, group_name = change.resource.partition("@")
        return Row(
            self.partition, record.offset, index, record.appended_at_ms, queue, group_name, group, change.change,
            change.client_id, change.resource, None if change.epoch < 0 else change.epoch,
        )  # fmt: skip

    def to_bytes(self) -> bytes:
        """Return the state between two batches."""
        is_known = self._is_known
        worlds = {
            name: _text(encode_world(log.world))
            for name, log in self.logs.items()
            # A world without anything is that of a group that begins; otherwise any key would stay in the state.
            if log.is_complete and not (is_known and _is_empty(log))
        }
        return json.dumps(
            {
                "first_offset": self.first_offset,
                "next_offset": self.next_offset,
                "first_at_ms": self.first_at_ms,
                "newest_at_ms": self.newest_at_ms,
                "worlds": worlds,
                "kept": [] if is_known else [
                    (each.offset, each.appended_at_ms, _text(each.key), _text(each.value)) for each in self.kept
                ],
            }
        ).encode()  # fmt: skip

    @classmethod
    def from_bytes(cls, partition: int, data: bytes) -> PartitionFold:
        """Return what `to_bytes` wrote."""
        state = json.loads(data)
        fold = cls(partition, state["first_offset"])
        # Reading the kept records again gives the logs of groups whose world is unknown, and their pending rows.
        for offset, at_ms, key, value in state["kept"]:
            for _ in fold.read(TopicRecord(offset, at_ms, _bytes(key), _bytes(value))):
                pass
        fold.next_offset = state["next_offset"]
        fold.first_at_ms, fold.newest_at_ms = state["first_at_ms"], state["newest_at_ms"]
        for name, world in state["worlds"].items():
            log = fold.logs[name] = GroupLog(name, partition=partition, first_offset=fold.first_offset)
            log.world = decode_world(_bytes(world) or b"")
            log.accept()
        return fold


@dataclass(frozen=True, slots=True)
class FoldRecordsSettings:
    """
    The settings of the state function; Spark sends them to the workers with the query.

    Attributes:
        written: Offset of the newest record whose rows the table has, by partition and group.
    """

    written: dict[tuple[int, str], int] = field(default_factory=dict)


def fold_records(
    key: tuple[int, ...],
    frames: Iterable[pd.DataFrame],
    state: StateHandle,
    settings: FoldRecordsSettings,
) -> Iterator[pd.DataFrame]:
    """
    Fold the new records of one partition of the coordination topic, for `applyInPandasWithState`.

    Args:
        key: The grouping key: the number of the partition.
        frames: Rows `record_offset: long`, `appended_at_ms: long`, `key: binary`, `value: binary`, in any order.
        state: One binary column.
        settings: Settings of the query.

    Yields:
        One frame with the columns of `FOLDED_SCHEMA`.
    """
    partition = int(key[0])
    records = sorted(
        (
            TopicRecord(*values)
            for frame in frames
            for values in zip(
                frame["record_offset"].tolist(), frame["appended_at_ms"].tolist(), frame["key"], frame["value"],
                strict=True,
            )
        ),
        key=lambda record: record.offset,
    )  # fmt: skip
    fold = (
        PartitionFold.from_bytes(partition, bytes(state.get[0]))
        if state.exists
        else PartitionFold(partition, records[0].offset)
    )
    rows = [row for record in records for row in fold.read(record)]
    state.update((fold.to_bytes(),))
    written = settings.written
    yield _frame([row for row in rows if row.record_offset > written.get((partition, row.coordination_group), -1)])


def _frame(rows: list[Row]) -> pd.DataFrame:
    columns = list(zip(*rows, strict=True)) or [()] * len(Row._fields)
    kinds = {"coordination_partition": "int32", "change_index": "int32"}
    kinds |= {"record_offset": "int64", "appended_at_ms": "int64", "epoch": "Int64"}
    return pd.DataFrame(
        {
            name: pd.Series(list(column), dtype=kinds.get(name, "object"))
            for name, column in zip(Row._fields, columns, strict=True)
        }
    )


def _is_empty(log: GroupLog) -> bool:
    world = log.world
    return not (world.members or world.resources or world.tasks or world.paused_until_ms)


def _text(data: bytes | None) -> str | None:
    return None if data is None else b64encode(data).decode()


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else b64decode(text)
