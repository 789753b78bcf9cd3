"""How tasks are spread over members."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmq_spark.core.coordination.leader import Candidate, changes, sticky_balanced
from kmq_spark.core.coordination.records import Assignment, RecordType
from tests.unit.coordination_story import Story

TASKS = st.lists(st.sampled_from([f"t{number}" for number in range(12)]), unique=True)
MEMBERS = st.lists(st.sampled_from("abcde").map(Candidate), unique=True)
CURRENT = st.dictionaries(st.sampled_from([f"t{number}" for number in range(12)]), st.sampled_from("abcdez"))


@given(TASKS, MEMBERS, CURRENT)
def test_sticky_assignment_is_complete_and_balanced_and_moves_as_little_as_possible(
    tasks: list[str], members: list[Candidate], current: dict[str, str]
) -> None:
    current = {task: client_id for task, client_id in current.items() if task in tasks}
    assigned = sticky_balanced(tasks, members, current)
    counts = Counter({member.client_id: 0 for member in members})
    counts.update(assigned.values())
    assert set(assigned) == (set(tasks) if members else set())
    assert max(counts.values(), default=0) - min(counts.values(), default=0) <= 1
    # It moves no more than it must: each member keeps what it had, up to what it gets.
    had = Counter(client_id for client_id in current.values() if client_id in counts)
    kept = sum(assigned.get(task) == client_id for task, client_id in current.items())
    assert kept == sum(min(had[client_id], count) for client_id, count in counts.items())
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


def test_changes_are_what_an_assign_has_to_say() -> None:
    """A member that drains gives its tasks away; assignments that exist already are left out."""
    story = Story()
    story.join("a", metadata=b"m")
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
    story.join("a", metadata=b"m")
    story.say(RecordType.ADD_TASK, resource="t")
    seen = []

    def assign(tasks: object, members: object, current: object) -> dict[str, str]:
        seen.append((tasks, members, current))
        return {"t": "z", "u": "a"}

    assert changes(story.world, assign) == []
    assert seen == [(["t"], [Candidate("a", b"m")], {})]
