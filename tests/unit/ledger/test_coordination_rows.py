"""Rows of the ledger's table `coordination`: the changes of each group, wherever the log begins and is cut."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pandas as pd
from hypothesis import given, settings
from hypothesis import strategies as st

from kmq_spark.core.coordination.effects import Change
from kmq_spark.core.coordination.fold import apply
from kmq_spark.core.coordination.records import RecordType
from kmq_spark.core.coordination.world import World
from kmq_spark.ledger.coordination_rows import (
    SILENCE_MS,
    FoldRecordsSettings,
    PartitionFold,
    Row,
    TopicRecord,
    fold_records,
)
from kmq_spark.wire.coordination import encode_record
from kmq_spark.wire.coordination_snapshot import snapshot_parts
from tests.group_state import FakeGroupState
from tests.unit.coordination_story import Story, T, draw_story

if TYPE_CHECKING:
    from collections.abc import Sequence

GROUP = "g"
LEFT_OUT = {Change.UPDATED, Change.MESSAGES_CLAIMED, Change.SNAPSHOT}


def records_of(story: Story, group: str = GROUP, first: int = 0) -> list[TopicRecord]:
    """Return a story as records of the topic; what is of another group is unreadable too."""
    return [
        TopicRecord(
            offset,
            at_ms,
            b"other" if record is None else group.encode(),
            b"" if record is None else encode_record(record),
        )
        for offset, at_ms, record in story.log[first:]
    ]


def rows_of(records: Sequence[TopicRecord], cuts: Sequence[int] = ()) -> list[Row]:
    """Fold records in batches, with the state as bytes between them; return the rows."""
    state: bytes | None = None
    rows: list[Row] = []
    for begin, end in pairwise([0, *sorted(cuts), len(records)]):
        if begin == end:
            continue
        fold = PartitionFold(0, records[0].offset) if state is None else PartitionFold.from_bytes(0, state)
        for record in records[begin:end]:
            rows += fold.read(record)
        state = fold.to_bytes()
    return rows


def changes(rows: Sequence[Row], group: str = GROUP) -> list[tuple[int, str, str, str, int | None]]:
    """Return what a group's rows say, without the time."""
    return [
        (row.record_offset, row.change, row.client_id, row.resource, row.epoch)
        for row in rows
        if row.coordination_group == group
    ]


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_rows_are_the_changes_of_the_group_wherever_the_log_is_cut(data: st.DataObject) -> None:
    """Each change once, in order, also if the state was written and read between two records."""
    story, world = draw_story(data, longest=25), World()
    expected = [
        (offset, one.change.value, one.client_id, one.resource, None if one.epoch < 0 else one.epoch)
        for offset, at_ms, record in story.log
        for one in apply(world, offset, at_ms, record).effects
        if one.change not in LEFT_OUT
    ]
    records = records_of(story)
    cuts = data.draw(st.lists(st.integers(0, len(records)), max_size=5))
    assert changes(rows_of(records, cuts)) == expected


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_rows_of_a_log_without_its_beginning_do_not_depend_on_the_cuts(data: st.DataObject) -> None:
    """Retention removed the first records."""
    story = draw_story(data, longest=25)
    records = records_of(story, first=data.draw(st.integers(1, max(1, len(story.log) - 1))))
    if not records:
        return
    cuts = data.draw(st.lists(st.integers(0, len(records)), max_size=5))
    assert rows_of(records, cuts) == rows_of(records)


def test_claims_from_before_the_first_record_are_found_in_a_snapshot() -> None:
    """The ledger began after retention had removed the JOIN and the CLAIM; what follows is exact."""
    story = Story()
    story.join("a")
    story.join("b")
    story.claim("r", "a")
    story.beat("a", "b", after_ms=T // 2)
    for part in snapshot_parts(story.world):
        story.say(RecordType.SNAPSHOT, "a", snapshot=part)
    story.say(RecordType.RELEASE, "a", resource="r", epoch=2)
    story.claim("r", "b")
    assert changes(rows_of(records_of(story, first=3), cuts=[1, 2])) == [
        (5, "found", "a", "r", 2),
        (6, "released", "a", "r", 2),
        (7, "claimed", "b", "r", 7),
    ]


def test_group_that_begins_in_a_log_without_its_beginning_is_known_when_no_other_member_can_live() -> None:
    """A live member would have written within `SILENCE_MS`; until then the rows wait, and none is lost."""
    story = Story()
    for _ in range(3):
        story.write(None, 1)
    story.join("a")
    story.claim("r")
    early = records_of(story, first=2)
    assert changes(rows_of(early)) == []
    story.pass_time(SILENCE_MS, "a")
    expected = [(3, "joined", "a", "", None), (4, "claimed", "a", "r", 4)]
    assert changes(rows_of(records_of(story, first=2), cuts=[2, 5, 90])) == expected
    later = len(story.log)
    story.join("b")
    assert changes(rows_of(records_of(story, first=2), cuts=[later])) == [*expected, (later, "joined", "b", "", None)]


def test_rows_of_a_fleet_name_the_queue() -> None:
    """A user asks by queue; members have none."""
    story = Story()
    story.join("a")
    story.claim("orders@billing")
    joined, claimed = rows_of(records_of(story, "kmq.fleet.production"))
    assert (joined.queue, joined.group_name) == (None, None)
    assert (claimed.queue, claimed.group_name, claimed.resource) == ("orders", "billing", "orders@billing")


def test_records_that_cannot_be_read_are_rows() -> None:
    """Of a later version, too: members stop at it, so the rows behind it may be wrong."""
    story = Story()
    story.join("a")
    records = records_of(story)
    records += [TopicRecord(1, 10_001, GROUP.encode(), b"\xff"), TopicRecord(2, 10_002, b"\xff\xff", b"\xff")]
    assert changes(rows_of(records)) == [(0, "joined", "a", "", None), (1, "unreadable", "", "", None)]


def frame(records: Sequence[TopicRecord]) -> pd.DataFrame:
    """Return records as Spark hands them over."""
    return pd.DataFrame(records).rename(columns={"offset": "record_offset"})


def test_query_without_its_checkpoint_writes_no_row_again() -> None:
    """It folds the log again, and leaves out what the table has."""
    story = Story()
    story.join("a")
    story.claim("r")
    story.say(RecordType.RELEASE, resource="r", epoch=1)
    records = records_of(story)
    state = FakeGroupState()
    (first,) = fold_records((0,), [frame(records[1::-1])], state, FoldRecordsSettings())
    assert first["change"].tolist() == ["joined", "claimed"]
    assert first["epoch"].tolist() == [pd.NA, 1]
    (again,) = fold_records((0,), [frame(records)], FakeGroupState(), FoldRecordsSettings({(0, GROUP): 1}))
    (rest,) = fold_records((0,), [frame(records[2:])], state, FoldRecordsSettings({(0, GROUP): 1}))
    assert again["change"].tolist() == rest["change"].tolist() == ["released"]
    (nothing,) = fold_records((0,), [frame(records)], FakeGroupState(), FoldRecordsSettings({(0, GROUP): 2}))
    assert (len(nothing), list(nothing.columns)) == (0, list(Row._fields))


def test_rows_that_waited_over_a_restart_are_written_behind_newer_rows_of_another_group() -> None:
    """
    Retention removed the beginning. A snapshot shows the world of group `g` before that of group `h` is known; the
    ledger is restarted in between, and its table has a row of `g` that is newer than the first rows of `h`.
    """
    story = Story()
    for _ in range(3):
        story.write(None, 1)
    story.join("a")
    for part in snapshot_parts(story.world):
        story.say(RecordType.SNAPSHOT, "a", snapshot=part)
    story.claim("r")
    later = Story(story.at_ms)
    later.join("b")
    waiting = [
        TopicRecord(offset, at_ms, b"h", encode_record(record))
        for offset, (_, at_ms, record) in enumerate(later.log, start=3)
        if record is not None
    ]
    behind = [TopicRecord(record.offset + 1, *record[1:]) for record in records_of(story, first=3)]
    newest_at_ms = story.at_ms + SILENCE_MS
    end = TopicRecord(behind[-1].offset + 1, newest_at_ms, b"other", b"")
    state = FakeGroupState()
    (first,) = fold_records((0,), [frame([*waiting, *behind])], state, FoldRecordsSettings())
    assert first["change"].tolist() == ["claimed"]
    written = {(0, "g"): behind[-1].offset}
    (rest,) = fold_records((0,), [frame([end])], state, FoldRecordsSettings(written))
    joined = rest[rest["coordination_group"] == "h"]
    assert list(zip(joined["record_offset"], joined["change"], strict=True)) == [(3, "joined")]
