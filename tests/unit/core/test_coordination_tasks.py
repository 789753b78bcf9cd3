"""The rules of a coordination group by stories: tasks and their assignments."""

from __future__ import annotations

import pytest

from kmq_spark.core.coordination.effects import Change, Ignored
from kmq_spark.core.coordination.records import Assignment, RecordType
from tests.unit.coordination_story import Story, T, effects


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
    assert story.world.tasks["t"].client_id == "a"
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
    assert [task.client_id for task in story.world.tasks.values()] == ["b", ""]


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
    assert (story.world.tasks, story.holder("t")) == ({}, "a")
    assert story.say(RecordType.REMOVE_TASK, resource="t").ignored == [Ignored.UNKNOWN_TASK]
    story.say(RecordType.ADD_TASK, resource="u")
    story.say(RecordType.REMOVE_TASK, resource="u")
    assert effects(story.applied) == [(Change.TASK_REMOVED, "", "u")]
