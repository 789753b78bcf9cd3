"""
Spread tasks over the members of a group: what a leader assigns unless the user gives a function.

Rule 1: the result depends on the arguments alone, so two leaders with the same world assign the same.
Rule 2: members that drain get nothing; without another member, tasks stay unassigned.

Source: KIP-54, sticky assignment.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from kmq_spark.core.coordination.records import Assignment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kmq_spark.core.coordination.world import World

    Assign = Callable[[Sequence[str], Sequence["Candidate"], Mapping[str, str]], Mapping[str, str]]
    """From tasks, members, and the present task-to-member assignment to the wanted one."""


class Candidate(NamedTuple):
    """A member that may get tasks."""

    client_id: str
    metadata: bytes = b""


def sticky_balanced(tasks: Sequence[str], members: Sequence[Candidate], current: Mapping[str, str]) -> dict[str, str]:
    """
    Return a balanced assignment that moves as few tasks as possible.

    Args:
        tasks: All tasks of the group.
        members: Members that may get tasks.
        current: Task to client id, as it stands.

    Returns:
        Task to client id. Numbers of tasks differ by at most one between members.
    """
    if not members:
        return {}
    level, more = divmod(len(tasks), len(members))
    has = Counter(current.values())
    # One task more goes to those that have most.
    order = sorted((member.client_id for member in members), key=lambda client_id: (-has[client_id], client_id))
    quotas = {client_id: level + (row < more) for row, client_id in enumerate(order)}
    assigned: dict[str, str] = {}
    left: list[str] = []
    for task in sorted(tasks):
        client_id = current.get(task, "")
        if quotas.get(client_id, 0) > 0:
            quotas[client_id] -= 1
            assigned[task] = client_id
        else:
            left.append(task)
    places = (client_id for client_id in sorted(quotas) for _ in range(quotas[client_id]))
    assigned.update(zip(left, places, strict=True))
    return assigned


def changes(world: World, assign: Assign = sticky_balanced) -> list[Assignment]:
    """Return the assignments that differ from those that stand; an empty client id takes a task from its member."""
    candidates = [
        Candidate(member.client_id, member.metadata)
        for _, member in sorted(world.members.items())
        if not member.is_draining
    ]
    current = {name: task.client_id for name, task in world.tasks.items() if task.client_id}
    wanted = assign(sorted(world.tasks), candidates, current)
    # A function of the user may name tasks and members that do not exist.
    allowed = {candidate.client_id for candidate in candidates}
    return [
        Assignment(name, client_id)
        for name in sorted(world.tasks)
        if (client_id := wanted.get(name, "") if wanted.get(name, "") in allowed else "") != current.get(name, "")
    ]
