"""
Spread tasks over members: what a leader assigns unless the user gives a function of their own.

Rule 1: functions of their arguments: two leaders with the same world assign the same.
Rule 2: members that drain get nothing; a member never gets more than its capacity, and where all are full, tasks stay
unassigned.

Source: `even_split` is that of Kafka's two-level scheduling demonstration (`len // n`, the first `len % n` get one
more); stickiness as in KIP-54.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kmq_spark.core.coordination.records import MAX_CAPACITY, Assignment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kmq_spark.core.coordination.world import World

    Assign = Callable[[Sequence[str], Sequence["Candidate"], Mapping[str, str]], Mapping[str, str]]
    """Tasks, members, and the assignments that stand, to the assignments that are to be."""


class Candidate(NamedTuple):
    """
    A member that may get tasks.

    Attributes:
        client_id: Client id of the member.
        capacity: Most tasks that it takes; 0 = no limit.
        metadata: What its JOIN said.
    """

    client_id: str
    capacity: int = 0
    metadata: bytes = b""


def sticky_balanced(tasks: Sequence[str], members: Sequence[Candidate], current: Mapping[str, str]) -> dict[str, str]:
    """
    Return a balanced assignment that moves as few tasks as possible.

    Args:
        tasks: All tasks of the group.
        members: Members that may get tasks.
        current: Task to client id, as it stands.

    Returns:
        Task to client id. Numbers of tasks differ by at most one between members whose capacity is not reached.
    """
    quotas = _quotas(len(tasks), members, current)
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
    assigned.update(zip(left, places, strict=False))
    return assigned


def even_split(tasks: Sequence[str], members: Sequence[Candidate], current: Mapping[str, str]) -> dict[str, str]:
    """
    Return an assignment of neighbours: the sorted tasks are cut into one chunk for each member.

    Args:
        tasks: All tasks of the group.
        members: Members that may get tasks.
        current: Not used: tasks move whenever the number of members or of tasks changes.

    Returns:
        Task to client id. Of n tasks and m members, the first n % m members get n // m + 1, the others n // m; fewer
        where a capacity is reached.
    """
    del current
    assigned: dict[str, str] = {}
    if not members:
        return assigned
    each, more = divmod(len(tasks), len(members))
    rest = iter(sorted(tasks))
    for row, member in enumerate(sorted(members)):
        count = each + (row < more)
        chunk = [task for _, task in zip(range(count), rest, strict=False)]
        assigned.update(dict.fromkeys(chunk[: member.capacity or MAX_CAPACITY], member.client_id))
    return assigned


def changes(world: World, assign: Assign = sticky_balanced) -> list[Assignment]:
    """
    Return what an ASSIGN of the leader has to say: the assignments that differ from those that stand.

    Args:
        world: World of the group.
        assign: Spreads the tasks; names that are no members, and tasks that do not exist, are left out.

    Returns:
        By task; an empty client id takes the task from its member.
    """
    candidates = [
        Candidate(member.client_id, member.capacity, member.metadata)
        for _, member in sorted(world.members.items())
        if not member.is_draining
    ]
    current = {name: task.client_id for name, task in world.tasks.items() if task.client_id}
    wanted = assign(sorted(world.tasks), candidates, current)
    allowed = {candidate.client_id for candidate in candidates}
    return [
        Assignment(name, client_id)
        for name in sorted(world.tasks)
        if (client_id := wanted.get(name, "") if wanted.get(name, "") in allowed else "") != current.get(name, "")
    ]


def _quotas(task_count: int, members: Iterable[Candidate], current: Mapping[str, str]) -> dict[str, int]:
    """Return how many tasks each member gets: equal shares, cut at the capacities, the rest to those who have most."""
    has: dict[str, int] = {}
    for client_id in current.values():
        has[client_id] = has.get(client_id, 0) + 1
    # Smallest capacity first: what it leaves is shared by the members behind it.
    order = sorted(members, key=lambda one: (one.capacity or MAX_CAPACITY, one.client_id))
    quotas: dict[str, int] = {}
    open_members, left = len(order), task_count
    for row, member in enumerate(order):
        capacity = member.capacity or MAX_CAPACITY
        if capacity > left // open_members:
            # None from here on is cut, but those whose capacity equals the share take no more than that.
            level, more = divmod(left, open_members)
            rest = sorted(order[row:], key=lambda one: (-has.get(one.client_id, 0), one.client_id))
            quotas.update((one.client_id, level + (place < more)) for place, one in enumerate(rest))
            break
        quotas[member.client_id] = capacity
        open_members, left = open_members - 1, left - capacity
    return quotas
