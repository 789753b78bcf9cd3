"""The rules of a coordination group: what is true of any log; members, the clock, limits and snapshots by stories."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kmq_spark.core.coordination import fold
from kmq_spark.core.coordination.effects import Change, Ignored
from kmq_spark.core.coordination.fold import apply
from kmq_spark.core.coordination.records import (
    HeldPosition,
    RecordType,
    SnapshotPart,
)
from kmq_spark.core.coordination.world import World
from tests.examples import examples
from tests.unit.coordination_story import Story, T, draw_story, effects, facts


@settings(max_examples=examples(0.4), deadline=None)
@given(st.data())
def test_every_reader_has_the_same_world_however_often_it_reads(data: st.DataObject) -> None:
    """A record that is read twice, at any place, changes nothing."""
    story = draw_story(data)
    world = World()
    for row, (offset, at_ms, record) in enumerate(story.log):
        apply(world, offset, at_ms, record)
        back = data.draw(st.integers(0, 3))
        for repeated in story.log[max(0, row + 1 - back) : row + 1]:
            assert apply(world, *repeated).ignored == [Ignored.REPEATED]
    assert facts(world) == facts(story.world)


@settings(max_examples=examples(1.5), deadline=None)
@given(st.data())
def test_epochs_and_generations_only_rise(data: st.DataObject) -> None:
    """A fencing token that was ever given is above every earlier one of its resource."""
    story = draw_story(data)
    newest: dict[str, int] = {}
    world, generation = World(), -1
    for offset, at_ms, record in story.log:
        for effect in apply(world, offset, at_ms, record).effects:
            if effect.change is Change.CLAIMED:
                assert effect.epoch == offset > newest.get(effect.resource, -1)
                newest[effect.resource] = effect.epoch
        assert world.generation >= generation
        generation = world.generation


def test_time_without_append_times_stands_still() -> None:
    """A record that has no append time drops no member."""
    story = Story()
    story.join()
    apply(story.world, 1, -1, None)
    assert (story.world.next_offset, story.world.clock_ms) == (2, 0)


# Members.


def test_member_is_dropped_after_more_than_two_intervals_without_a_heartbeat() -> None:
    """At 2T it is a member, at 2T + 1 ms it is none; any record of the partition shows it."""
    story = Story()
    story.join("a")
    story.join("b")
    story.claim("r", "a")
    story.pass_time(2 * T, "b")
    assert story.holder("r") == "a"
    assert effects(story.write(None, 1)) == [(Change.LAPSED, "a", "r"), (Change.DROPPED, "a", "")]
    assert (story.holder("r"), list(story.world.members)) == ("", ["b"])
    assert story.world.generation == story.offset


def test_stale_members_are_dropped_oldest_first() -> None:
    """By their last heartbeats; ties by who joined first."""
    story = Story()
    for client_id in ("a", "b", "c"):
        story.join(client_id)
    story.beat("b", after_ms=1)
    story.beat("a", after_ms=1)
    story.pass_time(2 * T - 2)
    assert effects(story.write(None, 2)) == [(Change.DROPPED, "c", ""), (Change.DROPPED, "b", "")]
    assert effects(story.write(None, 1)) == [(Change.DROPPED, "a", "")]


def test_heartbeat_that_comes_too_late_does_not_revive_its_member() -> None:
    """Its own record drops it first; it has to join again, and has lost its claims."""
    story = Story()
    story.join("a")
    story.claim("r", "a")
    story.pass_time(2 * T)
    applied = story.say(RecordType.HEARTBEAT, "a", after_ms=1, positions=(HeldPosition("r", 1, 5),))
    assert (applied.ignored, applied.refreshed) == ([Ignored.UNKNOWN_MEMBER], False)
    assert story.world.resources == {}


def test_leader_is_the_member_that_joined_first() -> None:
    """It stays so when others come and go; the next one follows when it leaves."""
    story = Story()
    assert story.world.leader == ""
    story.join("b")
    story.join("a")
    assert story.world.leader == "b"
    story.join("b", metadata=b"new")
    assert effects(story.applied) == [(Change.UPDATED, "b", "")]
    assert (story.world.leader, story.world.members["b"].joined_at) == ("b", 0)
    story.say(RecordType.LEAVE, "b")
    assert (story.world.leader, story.world.generation) == ("a", story.offset)


def test_interval_of_a_group_is_that_of_its_first_member() -> None:
    """A later member adopts it: two values would judge one member in two ways."""
    story = Story()
    story.join("a", heartbeat_ms=T)
    story.join("b", heartbeat_ms=5 * T)
    assert story.world.heartbeat_ms == T
    story.say(RecordType.LEAVE, "a")
    story.say(RecordType.LEAVE, "b")
    story.join("b", heartbeat_ms=5 * T)
    assert story.world.heartbeat_ms == 5 * T


# The clock.


@pytest.mark.parametrize("step_ms", [T // 2 + 1, 3_600_000])
def test_broker_clock_that_jumps_ahead_drops_no_live_member(step_ms: int) -> None:
    """A gap counts T/2 at most: live members write several times within T."""
    story = Story()
    story.join("a")
    story.claim("r", "a")
    story.write(None, step_ms)
    assert (story.world.clock_ms, story.holder("r")) == (T // 2, "a")


def test_broker_clock_that_was_set_back_does_not_keep_dead_members() -> None:
    """An hour back: the clock continues by the difference from record to record."""
    story = Story(at_ms=5_000_000)
    story.join("a")
    story.join("b")
    story.claim("r", "a")
    story.beat("b", after_ms=-3_600_000)
    story.pass_time(2 * T + 1, "b")
    assert (story.holder("r"), list(story.world.members)) == ("", ["b"])


def test_broker_clock_that_returns_after_a_step_back_drops_no_live_member() -> None:
    """The newest append time would stand still for a minute and then jump by it: two holders within their T."""
    story = Story(at_ms=5_000_000)
    story.join("a")
    story.claim("r", "a")
    story.beat("a", after_ms=-60_000)
    story.pass_time(10 * T, "a")
    story.join("b", 60_000)
    assert story.claim("r", "b").ignored == [Ignored.HELD_BY_OTHER]


# Limits.


def test_group_has_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is above them is counted, and changes nothing."""
    for name in ("MAX_MEMBERS", "MAX_RESOURCES", "MAX_TASKS"):
        monkeypatch.setattr(fold, name, 1)
    story = Story()
    story.join("a")
    assert story.join("b").ignored == [Ignored.OVER_LIMIT]
    assert story.join("a").ignored == []
    story.claim("r")
    assert story.claim("s").ignored == [Ignored.OVER_LIMIT]
    story.say(RecordType.ADD_TASK, resource="t")
    assert story.say(RecordType.ADD_TASK, resource="u").ignored == [Ignored.OVER_LIMIT]
    assert story.say(RecordType.ADD_TASK, resource="t").ignored == []
    story.say(RecordType.RELEASE, resource="r", epoch=3, position=1)
    story.say(RecordType.PAUSE_GROUP, duration_ms=T)
    assert story.say(RecordType.SET_POSITION, resource="s", position=1).ignored == [Ignored.OVER_LIMIT]
    assert story.say(RecordType.SET_POSITION, resource="r", position=0).ignored == []


# Snapshots.


def test_snapshot_is_noted_with_its_last_part_and_from_the_leader_alone() -> None:
    """In a group without members anyone may write it."""
    story = Story()

    def snapshot(client_id: str, as_of: int, part: int = 1, number: int = 1) -> list[Ignored]:
        piece = SnapshotPart(as_of, part, 2, b"")
        return story.say(RecordType.SNAPSHOT, client_id, instance=f"{client_id}{number}", snapshot=piece).ignored

    assert snapshot("operator", 0, 0) == []
    assert story.world.snapshot_at == -1
    assert snapshot("operator", 0) == []
    assert story.world.snapshot_at == 1
    story.join("a")
    story.join("b")
    assert snapshot("operator", 0) == [Ignored.UNKNOWN_MEMBER]
    assert snapshot("b", 0) == [Ignored.NOT_LEADER]
    assert snapshot("a", 0, number=2) == [Ignored.OTHER_INSTANCE]
    assert snapshot("a", 99) == [Ignored.FUTURE_SNAPSHOT]
    assert story.world.snapshot_at == 1
    assert snapshot("a", 4) == []
    assert story.world.snapshot_at == story.offset
