"""The rules of a coordination group: the fold beside the model, and each rule by a story."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kmq_spark.core.coordination import fold
from kmq_spark.core.coordination.effects import Change, Ignored
from kmq_spark.core.coordination.fold import apply
from kmq_spark.core.coordination.records import (
    WITH_RESOURCE,
    Assignment,
    HeldPosition,
    Record,
    RecordType,
    SnapshotPart,
)
from kmq_spark.core.coordination.world import World
from kmq_spark.testing import coordination as model
from tests.unit.coordination_story import Story, T, draw_story, effects


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_fold_is_the_model(data: st.DataObject) -> None:
    """World, effects, reasons, after each record of any log; `Story.write` compares them."""
    draw_story(data)


@settings(max_examples=40, deadline=None)
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
    assert world.view() == story.world.view()


@settings(max_examples=40, deadline=None)
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
    story.model.apply(1, -1, None)
    assert story.model.view() == story.world.view()
    assert (story.world.next_offset, story.world.clock_ms) == (2, 0)


def test_model_ignores_repeated_records_too() -> None:
    """As the fold does."""
    story = Story()
    story.join()
    story.model.apply(0, 99_999, None)
    assert (story.model.ignored, story.model.view()) == ([Ignored.REPEATED], story.world.view())


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


def test_another_rule_elects_another_leader() -> None:
    """The rule is a function of the members."""
    world = World(leader_rule=lambda members: max(members, default=""))
    for offset, client_id in enumerate("acb"):
        apply(world, offset, 0, Record(RecordType.JOIN, client_id, "i", heartbeat_ms=T))
    assert world.leader == "c"


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


# Claims.


def test_claim_is_granted_where_the_resource_is_free_and_its_offset_is_the_epoch() -> None:
    """The second claim finds it held."""
    story = Story()
    story.join("a")
    story.join("b")
    applied = story.claim("r", "a")
    assert (applied.refreshed, story.holder("r"), story.epoch("r")) == (True, "a", 2)
    applied = story.claim("r", "b")
    assert (applied.ignored, applied.refreshed, story.holder("r")) == ([Ignored.HELD_BY_OTHER], False, "a")


def test_claim_of_the_holder_itself_gets_a_new_epoch() -> None:
    """What it wrote under the old one is refused from then on."""
    story = Story()
    story.join()
    story.claim()
    story.claim()
    assert story.epoch() == 2
    assert story.say(RecordType.RELEASE, resource="r", epoch=1).ignored == [Ignored.OLD_EPOCH]


def test_claim_of_a_stale_holder_is_taken_over_with_its_position() -> None:
    """The position that it reported last is kept."""
    story = Story()
    story.join("a")
    story.claim("r", "a")
    story.say(RecordType.HEARTBEAT, "a", positions=(HeldPosition("r", 1, 42),))
    story.join("b")
    story.pass_time(2 * T + 1, "b")
    story.claim("r", "b")
    taken = story.world.resources["r"]
    assert (taken.holder, taken.epoch, taken.position) == ("b", story.offset, 42)


def test_release_frees_and_keeps_the_position() -> None:
    """A resource without position is forgotten, so that names of locks do not pile up."""
    story = Story()
    story.join()
    story.claim("r")
    story.claim("s")
    story.say(RecordType.RELEASE, resource="r", epoch=1, position=7)
    story.say(RecordType.RELEASE, resource="s", epoch=2)
    assert list(story.world.resources) == ["r"]
    assert (story.holder("r"), story.world.resources["r"].position) == ("", 7)


def test_positions_never_go_back() -> None:
    """Not by a heartbeat, not by a release, which releases all the same."""
    story = Story()
    story.join()
    story.claim()
    story.say(RecordType.HEARTBEAT, positions=(HeldPosition("r", 1, 9),))
    applied = story.say(RecordType.HEARTBEAT, positions=(HeldPosition("r", 1, 8), HeldPosition("r", 1, 10)))
    assert (applied.ignored, applied.refreshed) == ([Ignored.POSITION_BACK], True)
    assert story.say(RecordType.RELEASE, resource="r", epoch=1, position=3).ignored == [Ignored.POSITION_BACK]
    assert (story.holder(), story.world.resources["r"].position) == ("", 10)


@pytest.mark.parametrize(("epoch", "reason"), [(0, Ignored.OLD_EPOCH), (99, Ignored.FUTURE_EPOCH)])
def test_record_under_another_epoch_changes_nothing(epoch: int, reason: Ignored) -> None:
    """Positions, messages, releases: only under the epoch of the claim."""
    story = Story()
    story.join()
    story.claim()
    for kind in (RecordType.RELEASE, RecordType.CLAIM_MESSAGES):
        assert story.say(kind, resource="r", epoch=epoch, position=5).ignored == [reason]
    assert story.say(RecordType.HEARTBEAT, positions=(HeldPosition("r", epoch, 5),)).ignored == [reason]
    assert (story.holder(), story.world.resources["r"].position) == ("a", None)


def test_record_about_a_resource_of_another_member_changes_nothing() -> None:
    """Nor does one about a resource without holder."""
    story = Story()
    story.join("a")
    story.join("b")
    story.claim("r", "a")
    for name in ("r", "s"):
        for kind in (RecordType.RELEASE, RecordType.CLAIM_MESSAGES):
            applied = story.say(kind, "b", resource=name, epoch=2, position=5)
            assert applied.ignored == [Ignored.NOT_HOLDER]
    assert story.holder("r") == "a"


@pytest.mark.parametrize("kind", sorted(model.BY_MEMBERS), ids=lambda kind: kind.name)
def test_record_of_an_unknown_member_or_another_instance_changes_nothing(kind: RecordType) -> None:
    """A member that was dropped joins again; an instance that was replaced stops."""
    story = Story()
    fields: dict[str, Any] = {"resource": "r"} if kind in WITH_RESOURCE else {}
    if kind is RecordType.CLAIM_MESSAGES:
        fields["position"] = 1
    assert story.say(kind, "a", **fields).ignored == [Ignored.UNKNOWN_MEMBER]
    story.join("a")
    before = story.world.view()
    assert story.say(kind, "a", instance="a2", **fields).ignored == [Ignored.OTHER_INSTANCE]
    assert {**before, "next_offset": 3} == story.world.view()


def test_messages_are_claimed_up_to_their_end() -> None:
    """Never below the position; a new claim begins without."""
    story = Story()
    story.join()
    story.claim()
    story.say(RecordType.HEARTBEAT, positions=(HeldPosition("r", 1, 5),))
    assert story.say(RecordType.CLAIM_MESSAGES, resource="r", epoch=1, position=4).ignored == [Ignored.POSITION_BACK]
    story.say(RecordType.CLAIM_MESSAGES, resource="r", epoch=1, position=9)
    assert effects(story.applied) == [(Change.MESSAGES_CLAIMED, "a", "r")]
    assert story.world.resources["r"].claimed_to == 9
    story.claim()
    claimed = story.world.view()["resources"]["r"]
    assert (claimed["claimed_to"], claimed["position"]) == (None, 5)


# One client id, two instances.


def test_second_instance_is_refused_while_the_first_is_a_member() -> None:
    """It may join when the first is stale, or has left."""
    story = Story()
    story.join("a", instance="a1")
    story.claim("r")
    assert story.join("a", instance="a2").ignored == [Ignored.CLIENT_ID_IN_USE]
    assert story.world.members["a"].instance == "a1"
    story.pass_time(2 * T)
    assert effects(story.join("a", 1, instance="a2")) == [
        (Change.LAPSED, "a", "r"),
        (Change.DROPPED, "a", ""),
        (Change.JOINED, "a", ""),
    ]


def test_fast_reclaim_takes_the_claims_over_under_new_epochs() -> None:
    """The first instance is fenced; its tasks stay those of the client id."""
    story = Story()
    story.join("a", instance="a1")
    story.claim("r")
    story.claim("s")
    story.say(RecordType.ADD_TASK, resource="t")
    story.say(RecordType.ASSIGN, generation=0, assignments=(Assignment("t", "a"),))
    story.say(RecordType.DRAIN, member="a")
    applied = story.join("a", instance="a2", fast_reclaim=True)
    assert effects(applied) == [
        (Change.REPLACED, "a", ""),
        (Change.CLAIMED, "a", "r"),
        (Change.CLAIMED, "a", "s"),
    ]
    assert (applied.refreshed, story.epoch("r"), story.epoch("s")) == (True, story.offset, story.offset)
    assert (story.world.members["a"].is_draining, story.world.tasks["t"].client_id) == (False, "a")
    assert story.say(RecordType.HEARTBEAT, "a", instance="a1").ignored == [Ignored.OTHER_INSTANCE]


def test_fast_reclaim_in_a_paused_group_releases_the_claims() -> None:
    """No claim is granted while the group is paused."""
    story = Story()
    story.join("a", instance="a1")
    story.claim("r")
    story.say(RecordType.PAUSE_GROUP, duration_ms=T)
    applied = story.join("a", instance="a2", fast_reclaim=True)
    assert effects(applied) == [(Change.REPLACED, "a", ""), (Change.RELEASED, "a", "r")]
    assert not applied.refreshed


# Pauses and positions.


def test_paused_group_grants_and_renews_nothing_and_keeps_its_members() -> None:
    """Claims lapse 2T after the last renewal, though their holder is alive; it claims again afterwards."""
    story = Story()
    story.join("a")
    story.claim("r")
    story.say(RecordType.PAUSE_GROUP, duration_ms=60_000)
    assert story.claim("s").ignored == [Ignored.GROUP_PAUSED]
    assert story.say(RecordType.CLAIM_MESSAGES, resource="r", epoch=1, position=1).ignored == [Ignored.GROUP_PAUSED]
    story.pass_time(2 * T, "a")
    assert story.holder() == "a"
    applied = story.say(RecordType.HEARTBEAT, "a", after_ms=1)
    assert (effects(applied), applied.refreshed) == ([(Change.LAPSED, "a", "r")], False)
    story.say(RecordType.RESUME_GROUP)
    story.beat("a")
    assert (story.holder(), list(story.world.members)) == ("", ["a"])
    assert story.claim("r").refreshed
    story.pass_time(2 * T, "a")
    assert story.holder() == "a"


def test_pause_ends_by_the_broker_clock() -> None:
    """At its last millisecond it holds, then it is over."""
    story = Story()
    story.join("a")
    story.say(RecordType.PAUSE_GROUP, duration_ms=5 * T)
    story.pass_time(5 * T - 1, "a")
    assert story.world.is_paused
    assert effects(story.write(None, 1)) == [(Change.RESUMED, "", "")]
    assert story.say(RecordType.RESUME_GROUP).ignored == [Ignored.NOT_PAUSED]


def test_positions_are_set_only_while_paused_and_when_nothing_is_held() -> None:
    """They may go back then; None forgets the resource."""
    story = Story()
    story.join("a")
    story.claim("r")
    story.say(RecordType.HEARTBEAT, positions=(HeldPosition("r", 1, 9),))

    def set_position(position: int | None, resource: str = "r") -> list[Ignored]:
        return story.say(RecordType.SET_POSITION, "operator", resource=resource, position=position).ignored

    assert set_position(3) == [Ignored.NOT_PAUSED]
    story.say(RecordType.PAUSE_GROUP, "operator", duration_ms=60_000)
    assert set_position(3) == [Ignored.STILL_HELD]
    story.say(RecordType.RELEASE, resource="r", epoch=1, position=9)
    assert set_position(3) == []
    assert story.world.resources["r"].position == 3
    assert set_position(None) == []
    assert set_position(None) == [Ignored.UNKNOWN_RESOURCE]
    assert set_position(4, "new") == []
    assert list(story.world.resources) == ["new"]


# Tasks.


def test_only_the_assigned_member_may_claim_a_task() -> None:
    """And only when the one before has released it."""
    story = Story()
    story.join("a")
    story.join("b")
    story.say(RecordType.ADD_TASK, "operator", resource="t", payload=b"queue")
    assert story.claim("t", "a").ignored == [Ignored.NOT_ASSIGNED]
    story.say(RecordType.ASSIGN, "a", generation=1, assignments=(Assignment("t", "a"),))
    assert effects(story.applied) == [(Change.ASSIGNED, "a", "t")]
    story.claim("t", "a")
    epoch = story.epoch("t")
    story.say(RecordType.ASSIGN, "a", generation=1, assignments=(Assignment("t", "b"),))
    assert effects(story.applied) == [(Change.UNASSIGNED, "a", "t"), (Change.ASSIGNED, "b", "t")]
    assert story.claim("t", "b").ignored == [Ignored.HELD_BY_OTHER]
    assert story.claim("t", "a").ignored == [Ignored.NOT_ASSIGNED]
    story.say(RecordType.RELEASE, "a", resource="t", epoch=epoch)
    story.claim("t", "b")
    assert story.holder("t") == "b"


def test_tasks_of_a_member_that_is_gone_are_assigned_to_none() -> None:
    """Whether it left or was dropped."""
    story = Story()
    for client_id in ("a", "b", "c"):
        story.join(client_id)
    for name in ("t", "u"):
        story.say(RecordType.ADD_TASK, resource=name)
    story.say(RecordType.ASSIGN, "a", generation=2, assignments=(Assignment("t", "b"), Assignment("u", "c")))
    story.say(RecordType.LEAVE, "b")
    assert effects(story.applied) == [(Change.LEFT, "b", ""), (Change.UNASSIGNED, "b", "t")]
    story.pass_time(2 * T, "a")
    assert effects(story.write(None, 1)) == [(Change.DROPPED, "c", ""), (Change.UNASSIGNED, "c", "u")]


@pytest.mark.parametrize(
    ("client_id", "generation", "reason"),
    [
        ("b", 1, Ignored.NOT_LEADER),
        ("a", 0, Ignored.OLD_GENERATION),
        ("a", 2, Ignored.FUTURE_GENERATION),
        ("c", 1, Ignored.UNKNOWN_MEMBER),
    ],
)
def test_assignments_count_from_the_leader_of_the_generation_alone(
    client_id: str, generation: int, reason: Ignored
) -> None:
    """A leader that was dropped and does not know it changes nothing."""
    story = Story()
    story.join("a")
    story.join("b")
    story.say(RecordType.ADD_TASK, resource="t")
    applied = story.say(RecordType.ASSIGN, client_id, generation=generation, assignments=(Assignment("t", "a"),))
    assert (applied.ignored, applied.effects, story.world.tasks["t"].client_id) == ([reason], [], "")


def test_assignments_of_unknown_tasks_and_members_are_left_out() -> None:
    """The rest of the record counts; an empty client id takes a task away."""
    story = Story()
    story.join("a")
    story.say(RecordType.ADD_TASK, resource="t")
    wanted = (Assignment("t", "a"), Assignment("x", "a"), Assignment("t", "z"), Assignment("t", "a"))
    applied = story.say(RecordType.ASSIGN, generation=0, assignments=wanted)
    assert applied.ignored == [Ignored.UNKNOWN_TASK, Ignored.UNKNOWN_MEMBER]
    assert story.world.members["a"].tasks == {"t"}
    story.say(RecordType.ASSIGN, generation=0, assignments=(Assignment("t", ""),))
    assert effects(story.applied) == [(Change.UNASSIGNED, "a", "t")]


def test_member_that_drains_gets_no_more_tasks_and_keeps_those_it_has() -> None:
    """Until the leader gives them to others; assignments that were made without knowing it are void."""
    story = Story()
    story.join("a")
    story.join("b")
    for name in ("t", "u"):
        story.say(RecordType.ADD_TASK, resource=name)
    story.say(RecordType.ASSIGN, generation=1, assignments=(Assignment("t", "b"),))
    assert story.say(RecordType.DRAIN, "b", member="z").ignored == [Ignored.UNKNOWN_MEMBER]
    story.say(RecordType.DRAIN, "b", member="b")
    generation = story.offset
    stale = story.say(RecordType.ASSIGN, generation=1, assignments=(Assignment("u", "b"),))
    assert stale.ignored == [Ignored.OLD_GENERATION]
    wanted = (Assignment("t", "b"), Assignment("u", "b"))
    assert story.say(RecordType.ASSIGN, generation=generation, assignments=wanted).ignored == [Ignored.MEMBER_DRAINING]
    assert story.world.members["b"].tasks == {"t"}


def test_holder_of_a_removed_task_holds_it_until_it_releases() -> None:
    """Added again, it has a new payload and keeps its assignment while it exists."""
    story = Story()
    story.join()
    story.say(RecordType.ADD_TASK, resource="t", payload=b"1")
    story.say(RecordType.ASSIGN, generation=0, assignments=(Assignment("t", "a"),))
    story.say(RecordType.ADD_TASK, resource="t", payload=b"2")
    assert (story.world.tasks["t"].payload, story.world.tasks["t"].client_id) == (b"2", "a")
    story.claim("t")
    story.say(RecordType.REMOVE_TASK, resource="t")
    assert effects(story.applied) == [(Change.TASK_REMOVED, "a", "t")]
    assert (story.world.tasks, story.world.members["a"].tasks, story.holder("t")) == ({}, set(), "a")
    assert story.say(RecordType.REMOVE_TASK, resource="t").ignored == [Ignored.UNKNOWN_TASK]
    story.say(RecordType.ADD_TASK, resource="u")
    story.say(RecordType.REMOVE_TASK, resource="u")
    assert effects(story.applied) == [(Change.TASK_REMOVED, "", "u")]


def test_group_has_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is above them is counted, and changes nothing."""
    for name, what in (("MAX_MEMBERS", "members"), ("MAX_RESOURCES", "resources"), ("MAX_TASKS", "tasks")):
        monkeypatch.setattr(fold, name, 1)
        monkeypatch.setitem(model.LIMITS, what, 1)
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


def test_instance_holds_under_its_epoch_alone() -> None:
    """What the holder's side asks of the world."""
    story = Story()
    story.join("a")
    story.claim("r")
    world = copy.copy(story.world)
    assert world.epoch_of("r", "a", "a1") == 1
    assert [world.epoch_of("r", "a", "a2"), world.epoch_of("r", "b", "b1"), world.epoch_of("s", "a", "a1")] == [
        None
    ] * 3
