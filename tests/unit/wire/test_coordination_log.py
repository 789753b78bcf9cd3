"""A group's world read from the bytes of its partition: from the beginning, and from a snapshot."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kmq_spark.core.coordination.effects import Ignored
from kmq_spark.core.coordination.records import Assignment, HeldPosition, Record, RecordType
from kmq_spark.core.coordination.world import World
from kmq_spark.errors import MalformedRecordError, UnsupportedVersionError
from kmq_spark.wire import coordination_pb2, coordination_snapshot
from kmq_spark.wire.coordination import encode_record
from kmq_spark.wire.coordination_log import GroupLog
from kmq_spark.wire.coordination_snapshot import decode_world, encode_world, snapshot_parts
from tests.examples import examples
from tests.unit.coordination_story import Story, T, draw_record, draw_story, facts

GROUP, KEY = "fleet", b"fleet"


def read_all(log: GroupLog, story: Story, first: int = 0) -> None:
    """Read a story from an offset on."""
    for offset, at_ms, record in story.log[first:]:
        if record is None:
            log.read(offset, at_ms, b"another", b"")
        else:
            log.read(offset, at_ms, KEY, encode_record(record))


def write_snapshot(story: Story) -> int:
    """Let the leader write a snapshot, in small parts; return the offset that it is as of."""
    as_of = story.world.next_offset
    leader = story.world.leader
    instance = story.world.members[leader].instance if leader else "x1"
    for part in snapshot_parts(story.world, 40):
        story.say(RecordType.SNAPSHOT, leader or "x", instance=instance, snapshot=part)
    return as_of


@settings(max_examples=examples(0.6), deadline=None)
@given(st.data())
def test_world_survives_the_wire(data: st.DataObject) -> None:
    """Equal worlds have equal bytes, and develop in the same way."""
    story = draw_story(data)
    value = encode_world(story.world)
    restored = decode_world(value)
    assert facts(restored) == facts(story.world)
    assert encode_world(restored) == value
    story.world = restored
    for sequence in range(10):
        story.write(draw_record(data, story.world, sequence), T // 2)


@settings(max_examples=examples(1), deadline=None)
@given(st.data())
def test_snapshot_and_the_rest_give_the_world(data: st.DataObject) -> None:
    """Wherever the reader begins, at or below the offset that the snapshot is as of, it ends with the same world."""
    story = draw_story(data, longest=20)
    as_of = story.world.next_offset
    parts = snapshot_parts(story.world, 60)
    leader = story.world.leader
    instance = story.world.members[leader].instance if leader else "x1"
    for sequence, part in enumerate(parts):
        # What others write meanwhile is not in the snapshot. The leader itself writes no other snapshot in between.
        for _ in range(data.draw(st.integers(0, 1))):
            record = draw_record(data, story.world, sequence)
            if record is None or record.type is not RecordType.SNAPSHOT or record.client_id != leader:
                story.write(record, T // 4)
        story.say(RecordType.SNAPSHOT, leader or "x", instance=instance, snapshot=part)
    for sequence in range(data.draw(st.integers(0, 10))):
        story.write(draw_record(data, story.world, sequence), T // 4)
    first = data.draw(st.integers(0, as_of))
    log = GroupLog(GROUP, first_offset=first)
    read_all(log, story, first)
    assert (log.is_complete, facts(log.world)) == (True, facts(story.world))


def story_of_two() -> Story:
    """Return a group with members, a claim, a task, and positions."""
    story = Story()
    story.join("a", metadata=b"m")
    story.join("b")
    story.claim("r", "b")
    story.say(RecordType.HEARTBEAT, "b", positions=(HeldPosition("r", 2, 7),))
    story.say(RecordType.CLAIM_MESSAGES, "b", resource="r", epoch=2, position=9)
    story.say(RecordType.ADD_TASK, resource="t", payload=b"p")
    story.say(RecordType.ASSIGN, generation=1, assignments=(Assignment("t", "b"),))
    return story


def test_world_has_these_bytes() -> None:
    """Snapshots in topics outlive this build."""
    assert encode_world(World()).hex() == "28ffffffffffffffffff0138ffffffffffffffffff0148ffffffffffffffffff01"
    expected = (
        "100720904e28904e30e807380148ffffffffffffffffff01520a0a01611202613122016d52090a01621202623118015a0c0a017212016218"
        "022007280962090a01741201701a0162"
    )
    assert encode_world(story_of_two().world).hex() == expected


def test_reader_without_a_snapshot_knows_that_it_does_not_know() -> None:
    """The heartbeat of a member whose JOIN it has not read shows it."""
    story = story_of_two()
    log = GroupLog(GROUP, first_offset=3)
    assert (log.is_complete, log.is_alone) == (False, True)
    read_all(log, story, 3)
    assert (log.is_complete, log.is_alone) == (False, False)
    story.beat("a", after_ms=5)
    as_of = write_snapshot(story)
    story.beat("b", after_ms=5)
    read_all(log, story, 7)
    assert (log.is_complete, facts(log.world)) == (True, facts(story.world))
    # A second reader needs no record below it.
    late = GroupLog(GROUP, first_offset=as_of)
    read_all(late, story, as_of)
    assert (late.is_complete, facts(late.world)) == (True, facts(story.world))


def test_reader_whose_log_begins_above_0_does_not_know_that_it_has_all() -> None:
    """The members may have read records that were deleted since; where there is no member, nobody knows more."""
    story = story_of_two()
    log = GroupLog(GROUP, first_offset=100)
    for offset, at_ms, record in story.log:
        assert record is not None
        log.read(offset + 100, at_ms, KEY, encode_record(record))
        assert log.record == record
    assert (log.is_complete, log.is_alone) == (False, False)
    for row, client_id in enumerate("ab"):
        log.read(107 + row, story.at_ms, KEY, encode_record(Record(RecordType.LEAVE, client_id, f"{client_id}1")))
    assert (log.is_complete, log.is_alone) == (False, True)
    log.accept()
    assert (log.is_complete, list(log.world.tasks)) == (True, ["t"])


def test_snapshot_that_is_begun_again_is_read() -> None:
    """A leader that was interrupted writes all parts once more."""
    story = story_of_two()
    parts = snapshot_parts(story.world, 20)
    assert len(parts) > 2
    for part in [parts[1], *parts[:2], *parts]:
        story.say(RecordType.SNAPSHOT, "a", snapshot=part)
    log = GroupLog(GROUP, first_offset=5)
    read_all(log, story, 5)
    assert (log.is_complete, facts(log.world)) == (True, facts(story.world))


@pytest.mark.parametrize("writer", ["b", "z"])
def test_snapshot_of_another_than_its_leader_is_refused(writer: str) -> None:
    """Only the leader of the world that it shows may write it."""
    story = story_of_two()
    (part,) = snapshot_parts(story.world)
    story.say(RecordType.SNAPSHOT, writer, snapshot=part)
    log = GroupLog(GROUP, first_offset=1)
    read_all(log, story, 1)
    assert (log.is_complete, log.ignored[Ignored.NOT_LEADER] >= 1) == (False, True)


def test_snapshot_that_cannot_be_read_is_counted() -> None:
    """The reader waits for the next one."""
    story = story_of_two()
    (part,) = snapshot_parts(story.world)
    story.say(RecordType.SNAPSHOT, "a", snapshot=part._replace(data=b"\xff"))
    log = GroupLog(GROUP, first_offset=1)
    read_all(log, story, 1)
    assert (log.is_complete, log.ignored[Ignored.UNREADABLE]) == (False, 1)
    assert log.last_fault.startswith("got 1 bytes that are no snapshot")
    write_snapshot(story)
    read_all(log, story, 8)
    assert log.is_complete


def test_unreadable_records_are_counted_and_change_nothing_but_the_time() -> None:
    """Hostile bytes end no member."""
    story = story_of_two()
    log = GroupLog(GROUP, topic="kmq.coordination", partition=3)
    read_all(log, story)
    before = facts(log.world)
    hostile: list[bytes | None] = [None, b"", b"\xff" * 20, bytes(2_000_000), b"\x10\x63", b"\x08\x09\x10\x03"]
    for row, value in enumerate(hostile):
        assert not log.read(7 + row, story.at_ms, KEY, value).effects
    log.read(7, story.at_ms, KEY, b"")
    assert facts(log.world) == {**before, "next_offset": 13}
    assert (log.ignored[Ignored.UNREADABLE], log.ignored[Ignored.UNSUPPORTED], log.ignored[Ignored.REPEATED]) == (
        4,
        2,
        1,
    )
    assert log.last_fault.startswith("cannot read coordination record at kmq.coordination[3]@")
    assert "@11: type 99, this build reads up to 14" in log.unsupported


@settings(max_examples=examples(1.5), deadline=None)
@given(st.data())
def test_damaged_snapshot_is_refused_or_a_possible_world(data: st.DataObject) -> None:
    """A world with any byte changed is refused, or develops by the rules."""
    story = story_of_two()
    value = bytearray(encode_world(story.world))
    value[data.draw(st.integers(0, len(value) - 1))] = data.draw(st.integers(0, 255))
    try:
        world = decode_world(bytes(value))
    except (MalformedRecordError, UnsupportedVersionError):
        return
    assert facts(decode_world(encode_world(world))) == facts(world)
    log = GroupLog(GROUP)
    log.world = world
    for row, kind in enumerate([RecordType.HEARTBEAT, RecordType.LEAVE]):
        log.read(world.next_offset, 20_000 + row, KEY, encode_record(Record(kind, "b", "b1")))


def damaged(**fields: Any) -> bytes:
    """Return a snapshot of `story_of_two` with other fields in place."""
    message = coordination_pb2.World.FromString(encode_world(story_of_two().world))
    for name, value in fields.items():
        if isinstance(value, list):
            message.ClearField(name)
            getattr(message, name).extend(value)
        elif isinstance(value, dict):
            part = getattr(message, name)[0]
            for inner, inside in value.items():
                setattr(part, inner, inside)
        else:
            setattr(message, name, value)
    data: bytes = message.SerializeToString()
    return data


IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "member twice": (
        {"members": [coordination_pb2.Member(client_id="a")] * 2},
        "members are named twice: got 2 names, 1 of them different",
    ),
    "join": ({"members": {"joined_at": 2}}, "joined_at is out of bounds: got 2; expected 0 to 1"),
    "holder": ({"resources": {"holder": "z"}}, "a holder that is no member: got 'z'"),
    "epoch": ({"resources": {"epoch": 7}}, "epoch is out of bounds: got 7; expected 0 to 6"),
    "assigned": ({"tasks": {"client_id": "z"}}, "a task of no member: got 'z'"),
}


@pytest.mark.parametrize(("fields", "finding"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_snapshot_that_contradicts_itself_is_refused(fields: dict[str, Any], finding: str) -> None:
    """It comes from the log: a reader that believed it would fail later, elsewhere."""
    with pytest.raises(MalformedRecordError, match="snapshot contradicts itself: ") as caught:
        decode_world(damaged(**fields))
    assert finding in str(caught.value)


def test_snapshot_of_a_later_version_differs_from_a_malformed_one() -> None:
    """The reader is too old for its group."""
    with pytest.raises(UnsupportedVersionError, match="version 9 of snapshots, this build reads up to 0"):
        decode_world(damaged(version=9))


def test_snapshots_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """More members, resources, tasks or parts than a group may have are refused."""
    story = story_of_two()
    monkeypatch.setattr(coordination_snapshot, "MAX_MEMBERS", 1)
    with pytest.raises(MalformedRecordError, match="too many members: got 2; expected 0 to 1"):
        decode_world(encode_world(story.world))
    with pytest.raises(
        MalformedRecordError, match=r"the world is too large for a snapshot: got .* 256 parts of 1 bytes"
    ):
        snapshot_parts(_large_world(), 1)


def _large_world() -> World:
    story = Story()
    story.join("a", metadata=bytes(300))
    return story.world
