"""How tasks are spread over members."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmq_spark.core.coordination.assign import Candidate, changes, even_split, sticky_balanced
from kmq_spark.core.coordination.records import Assignment, RecordType
from tests.unit.coordination_story import Story

TASKS = st.lists(st.sampled_from([f"t{number}" for number in range(12)]), unique=True)
MEMBERS = st.lists(
    st.builds(Candidate, st.sampled_from("abcde"), st.sampled_from([0, 0, 1, 2, 5])),
    unique_by=lambda member: member.client_id,
)
CURRENT = st.dictionaries(st.sampled_from([f"t{number}" for number in range(12)]), st.sampled_from("abcdez"))


@given(TASKS, MEMBERS, CURRENT)
def test_sticky_assignment_is_complete_and_balanced_and_moves_as_little_as_possible(
    tasks: list[str], members: list[Candidate], current: dict[str, str]
) -> None:
    """Within one, but for members whose capacity is reached."""
    current = {task: client_id for task, client_id in current.items() if task in tasks}
    assigned = sticky_balanced(tasks, members, current)
    counts = Counter(assigned.values())
    capacity = {member.client_id: member.capacity or 99 for member in members}
    assert len(assigned) == min(len(tasks), sum(capacity.values()))
    assert set(assigned) <= set(tasks)
    assert all(counts[client_id] <= most for client_id, most in capacity.items())
    free = [counts[client_id] for client_id, most in capacity.items() if counts[client_id] < most]
    assert not free or max(counts.values(), default=0) - min(free) <= 1
    # It moves no more than it must: each member keeps what it had, up to what it gets.
    had = Counter(client_id for client_id in current.values() if client_id in capacity)
    kept = sum(assigned.get(task) == client_id for task, client_id in current.items())
    assert kept == sum(min(had[client_id], counts[client_id]) for client_id in capacity)
    assert assigned == sticky_balanced(tasks[::-1], members[::-1], current)
    assert sticky_balanced(tasks, members, assigned) == assigned


@pytest.mark.parametrize(
    ("members", "current", "expected"),
    [
        # A new task goes to the member that has less.
        ("ab", {"t1": "b", "t2": "b", "t3": "a"}, {"t1": "b", "t2": "b", "t3": "a", "t4": "a"}),
        # A new member takes the tasks above the share of each other one, and no more.
        (
            "abc",
            {"t1": "b", "t2": "a", "t3": "b", "t4": "a", "t5": "b", "t6": "a"},
            {"t1": "b", "t2": "a", "t3": "b", "t4": "a", "t5": "c", "t6": "c"},
        ),
        # What is left over stays with the member that has most.
        ("ab", {"t1": "b", "t2": "b", "t3": "b", "t4": "a"}, {"t1": "b", "t2": "b", "t3": "b", "t4": "a", "t5": "a"}),
        # The tasks of a member that has left are spread.
        ("ab", {"t1": "z", "t2": "b", "t3": "z"}, {"t1": "a", "t2": "b", "t3": "b"}),
    ],
)
def test_sticky_assignment_moves_what_it_must(members: str, current: dict[str, str], expected: dict[str, str]) -> None:
    assert sticky_balanced(sorted(expected), [Candidate(one) for one in members], current) == expected


def test_capacity_that_is_the_share_is_reached_and_leaves_the_others_theirs() -> None:
    members = [Candidate("a", 2), Candidate("b", 1), Candidate("c")]
    assigned = sticky_balanced([f"t{number}" for number in range(1, 8)], members, {"t7": "c", "t1": "a"})
    assert Counter(assigned.values()) == {"a": 2, "b": 1, "c": 4}
    assert (assigned["t7"], assigned["t1"]) == ("c", "a")


@given(TASKS, MEMBERS)
def test_even_split_gives_neighbours(tasks: list[str], members: list[Candidate]) -> None:
    """The first `len % n` members get one more."""
    members = [member._replace(capacity=0) for member in members]
    assigned = even_split(tasks, members, {})
    expected = []
    for row, member in enumerate(sorted(members)):
        each, more = divmod(len(tasks), len(members))
        expected += [member.client_id] * (each + (row < more))
    assert [assigned[task] for task in sorted(tasks)] == expected if members else assigned == {}


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([Candidate("a"), Candidate("b")], {"t1": "a", "t2": "a", "t3": "a", "t4": "b", "t5": "b"}),
        ([Candidate("a", 1), Candidate("b")], {"t1": "a", "t4": "b", "t5": "b"}),
        ([], {}),
    ],
)
def test_even_split_of_five_tasks(members: list[Candidate], expected: dict[str, str]) -> None:
    """A member takes no more than its capacity."""
    assert even_split(["t5", "t4", "t3", "t2", "t1"], members, {}) == expected


def test_changes_are_what_an_assign_has_to_say() -> None:
    """A member that drains gives its tasks away; assignments that exist already are left out."""
    story = Story()
    story.join("a", metadata=b"m", capacity=9)
    story.join("b")
    for name in ("t1", "t2"):
        story.say(RecordType.ADD_TASK, resource=name)
    wanted = changes(story.world)
    assert wanted == [Assignment("t1", "a"), Assignment("t2", "b")]
    story.say(RecordType.ASSIGN, generation=1, assignments=tuple(wanted))
    assert changes(story.world) == []
    story.say(RecordType.DRAIN, member="b")
    assert changes(story.world) == [Assignment("t2", "a")]
    story.say(RecordType.DRAIN, member="a")
    assert changes(story.world) == [Assignment("t1", ""), Assignment("t2", "")]


def test_function_of_the_user_may_name_whom_it_likes() -> None:
    """Unknown members and tasks are left out: an ASSIGN would not count for them."""
    story = Story()
    story.join("a", metadata=b"m", capacity=2)
    story.say(RecordType.ADD_TASK, resource="t")
    seen = []

    def assign(tasks: object, members: object, current: object) -> dict[str, str]:
        seen.append((tasks, members, current))
        return {"t": "z", "u": "a"}

    assert changes(story.world, assign) == []
    assert seen == [(["t"], [Candidate("a", 2, b"m")], {})]
