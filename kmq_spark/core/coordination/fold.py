"""
Apply the records of a coordination group to its world.

Rule 1: every change depends on the record, its offset and its append time, and on nothing else.
Rule 2: before each record of the partition, whatever its group, claims that were not renewed for 2T lapse and members
without a heartbeat for 2T are dropped, oldest first. The group's clock decides that, without a record of its own.
Rule 3: no member is trusted: a record of an unknown member, of another instance, under another epoch, for another
generation, or from a member that is not the leader changes nothing. Each is reported with its reason.
Rule 4: the epoch of a claim is the offset of the record that granted it, so epochs only rise.
Rule 5: positions never go back, except by SET_POSITION.

The group's clock moves from record to record by the difference of their append times, at least by 0 and at most by
T/2. A broker's clock that is set back, or a new leader whose clock is behind, cannot stop it; one that jumps ahead
cannot make every member stale at once. Live members write several records within T, so that a longer gap is silence.

Source: Marshal `rationalizer.go`; there, staleness is judged by the clock of each host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kmq_spark.core.coordination.effects import Applied, Change, Ignored
from kmq_spark.core.coordination.records import RecordType
from kmq_spark.core.coordination.world import MAX_MEMBERS, MAX_RESOURCES, MAX_TASKS, Member, Resource, Task

if TYPE_CHECKING:
    from collections.abc import Callable

    from kmq_spark.core.coordination.records import Record
    from kmq_spark.core.coordination.world import World


def apply(world: World, offset: int, append_time_ms: int, record: Record | None) -> Applied:
    """
    Apply one record of the group's partition.

    Args:
        world: Changed in place; it takes microseconds that way, however large it is.
        offset: Offset of the record. One below `world.next_offset` was applied before, and is ignored.
        append_time_ms: Epoch milliseconds, broker clock; a negative one says nothing of the time.
        record: None for one of another group, or one that is unreadable: time passes all the same.

    Returns:
        What changed, and what was ignored.

    Source: docs/coordination.md, effects.
    """
    applied = Applied()
    if offset < world.next_offset:
        applied.ignored.append(Ignored.REPEATED)
        return applied
    world.next_offset = offset + 1
    if append_time_ms >= 0:
        _pass_time(world, append_time_ms, applied)
        _expire(world, offset, applied)
    if record is not None:
        _EFFECTS[record.type](world, offset, record, applied)
    return applied


def _pass_time(world: World, append_time_ms: int, applied: Applied) -> None:
    """Move the group's clock, and end a pause that is over."""
    if world.last_append_ms >= 0:
        world.clock_ms += min(max(0, append_time_ms - world.last_append_ms), world.longest_step_ms)
    world.last_append_ms = append_time_ms
    world.newest_append_ms = max(world.newest_append_ms, append_time_ms)
    if 0 < world.paused_until_ms <= world.newest_append_ms:
        world.paused_until_ms = 0
        applied.note(Change.RESUMED)


def _expire(world: World, offset: int, applied: Applied) -> None:
    """Let claims lapse and drop members, oldest first."""
    # Both dictionaries are in the order of their times: the first entry decides whether anything is to be done.
    stale_before_ms = world.clock_ms - world.stale_after_ms
    lapsed, dropped = [], []
    for member in world.holders.values():
        if member.renewed_ms >= stale_before_ms:
            break
        lapsed.append(member)
    for member in world.members.values():
        if member.seen_ms >= stale_before_ms:
            break
        dropped.append(member)
    for member in sorted(lapsed, key=lambda member: (member.renewed_ms, member.joined_at)):
        _free_all(world, member, Change.LAPSED, applied)
    for member in sorted(dropped, key=lambda member: (member.seen_ms, member.joined_at)):
        _remove(world, member, Change.DROPPED, applied)
        world.generation = offset


def _free_all(world: World, member: Member, change: Change, applied: Applied) -> None:
    for name in sorted(member.held):
        _free(world, member, name, change, applied)


def _free(world: World, member: Member, name: str, change: Change, applied: Applied) -> None:
    """End a claim; the position stands, and a resource without one is forgotten."""
    resource = world.resources[name]
    applied.note(change, member.client_id, name, resource.epoch)
    resource.holder, resource.claimed_to = "", None
    if resource.position is None:
        del world.resources[name]
    member.held.discard(name)
    if not member.held:
        del world.holders[member.client_id]


def _remove(world: World, member: Member, change: Change, applied: Applied) -> None:
    """Take a member that holds nothing out of the world."""
    del world.members[member.client_id]
    applied.note(change, member.client_id)
    for name in sorted(member.tasks):
        world.tasks[name].client_id = ""
        applied.note(Change.UNASSIGNED, member.client_id, name)


def _refresh(world: World, member: Member, applied: Applied) -> None:
    """Count a heartbeat of a member; while the group is paused, it renews no claim."""
    member.seen_ms = world.clock_ms
    world.members.move_to_end(member.client_id)
    if world.is_paused:
        return
    member.renewed_ms = world.clock_ms
    applied.refreshed = True
    if member.held:
        world.holders.move_to_end(member.client_id)


def _writer(world: World, record: Record, applied: Applied) -> Member | None:
    """Return the member that wrote a record."""
    member = world.members.get(record.client_id)
    if member is None:
        applied.ignored.append(Ignored.UNKNOWN_MEMBER)
        return None
    if member.instance != record.instance:
        applied.ignored.append(Ignored.OTHER_INSTANCE)
        return None
    return member


def _fault_of_claim(resource: Resource | None, client_id: str, epoch: int) -> Ignored | None:
    """Return why something does not happen under a claim."""
    if resource is None or resource.holder != client_id:
        return Ignored.NOT_HOLDER
    if epoch != resource.epoch:
        return Ignored.OLD_EPOCH if epoch < resource.epoch else Ignored.FUTURE_EPOCH
    return None


def _raise_position(resource: Resource, position: int, applied: Applied) -> None:
    if resource.position is not None and position < resource.position:
        applied.ignored.append(Ignored.POSITION_BACK)
    else:
        resource.position = position


def _join(world: World, offset: int, record: Record, applied: Applied) -> None:
    member = world.members.get(record.client_id)
    if member is not None and member.instance != record.instance and not record.fast_reclaim:
        applied.ignored.append(Ignored.CLIENT_ID_IN_USE)
        return
    if member is None and len(world.members) >= MAX_MEMBERS:
        applied.ignored.append(Ignored.OVER_LIMIT)
        return
    if not world.members:
        world.heartbeat_ms = record.heartbeat_ms
    world.generation = offset
    if member is None:
        member = world.members[record.client_id] = Member(record.client_id, record.instance, offset)
        applied.note(Change.JOINED, record.client_id)
    elif member.instance != record.instance:
        member.instance, member.joined_at, member.is_draining = record.instance, offset, False
        applied.note(Change.REPLACED, record.client_id)
        _take_over(world, offset, member, applied)
    else:
        applied.note(Change.UPDATED, record.client_id)
    member.metadata = record.metadata
    _refresh(world, member, applied)


def _take_over(world: World, offset: int, member: Member, applied: Applied) -> None:
    """Give the claims of an instance to its successor, under new epochs; while the group is paused, release them."""
    if world.is_paused:
        _free_all(world, member, Change.RELEASED, applied)
        return
    for name in sorted(member.held):
        resource = world.resources[name]
        resource.epoch, resource.claimed_to = offset, None
        applied.note(Change.CLAIMED, member.client_id, name, offset)


def _heartbeat(world: World, _: int, record: Record, applied: Applied) -> None:
    member = _writer(world, record, applied)
    if member is None:
        return
    _refresh(world, member, applied)
    resources = world.resources
    for name, epoch, position in record.positions:
        resource = resources.get(name)
        fault = _fault_of_claim(resource, record.client_id, epoch)
        if fault is not None:
            applied.ignored.append(fault)
            continue
        assert resource is not None
        _raise_position(resource, position, applied)


def _leave(world: World, offset: int, record: Record, applied: Applied) -> None:
    member = _writer(world, record, applied)
    if member is None:
        return
    _free_all(world, member, Change.RELEASED, applied)
    _remove(world, member, Change.LEFT, applied)
    world.generation = offset


def _claim(world: World, offset: int, record: Record, applied: Applied) -> None:
    member = _writer(world, record, applied)
    if member is None:
        return
    name = record.resource
    resource, task = world.resources.get(name), world.tasks.get(name)
    fault = None
    if world.is_paused:
        fault = Ignored.GROUP_PAUSED
    elif resource is not None and resource.holder not in {"", record.client_id}:
        fault = Ignored.HELD_BY_OTHER
    elif task is not None and task.client_id != record.client_id:
        fault = Ignored.NOT_ASSIGNED
    elif resource is None and len(world.resources) >= MAX_RESOURCES:
        fault = Ignored.OVER_LIMIT
    if fault is not None:
        applied.ignored.append(fault)
        return
    if resource is None:
        resource = world.resources[name] = Resource()
    resource.holder, resource.epoch, resource.claimed_to = record.client_id, offset, None
    member.held.add(name)
    world.holders[record.client_id] = member
    applied.note(Change.CLAIMED, record.client_id, name, offset)
    _refresh(world, member, applied)


def _release(world: World, _: int, record: Record, applied: Applied) -> None:
    member = _writer(world, record, applied)
    if member is None:
        return
    resource = world.resources.get(record.resource)
    fault = _fault_of_claim(resource, record.client_id, record.epoch)
    if fault is not None:
        applied.ignored.append(fault)
        return
    assert resource is not None
    if record.position is not None:
        _raise_position(resource, record.position, applied)
    _free(world, member, record.resource, Change.RELEASED, applied)


def _claim_messages(world: World, _: int, record: Record, applied: Applied) -> None:
    if _writer(world, record, applied) is None:
        return
    resource = world.resources.get(record.resource)
    fault = _fault_of_claim(resource, record.client_id, record.epoch)
    if world.is_paused:
        fault = Ignored.GROUP_PAUSED
    if fault is not None:
        applied.ignored.append(fault)
        return
    assert resource is not None
    assert record.position is not None
    if record.position < (resource.position or 0):
        applied.ignored.append(Ignored.POSITION_BACK)
    else:
        resource.claimed_to = record.position
        applied.note(Change.MESSAGES_CLAIMED, record.client_id, record.resource, resource.epoch)


def _pause(world: World, _: int, record: Record, applied: Applied) -> None:
    world.paused_until_ms = world.newest_append_ms + record.duration_ms
    applied.note(Change.PAUSED)


def _resume(world: World, _: int, __: Record, applied: Applied) -> None:
    if not world.is_paused:
        applied.ignored.append(Ignored.NOT_PAUSED)
        return
    world.paused_until_ms = 0
    applied.note(Change.RESUMED)


def _set_position(world: World, _: int, record: Record, applied: Applied) -> None:
    name = record.resource
    is_known = name in world.resources
    fault = None
    if not world.is_paused:
        fault = Ignored.NOT_PAUSED
    elif world.holders:
        fault = Ignored.STILL_HELD
    elif record.position is None and not is_known:
        fault = Ignored.UNKNOWN_RESOURCE
    elif not is_known and len(world.resources) >= MAX_RESOURCES:
        fault = Ignored.OVER_LIMIT
    if fault is not None:
        applied.ignored.append(fault)
        return
    if record.position is None:
        del world.resources[name]
    else:
        world.resources.setdefault(name, Resource()).position = record.position
    applied.note(Change.POSITION_SET, "", name)


def _add_task(world: World, _: int, record: Record, applied: Applied) -> None:
    task = world.tasks.get(record.resource)
    if task is None and len(world.tasks) >= MAX_TASKS:
        applied.ignored.append(Ignored.OVER_LIMIT)
        return
    if task is None:
        task = world.tasks[record.resource] = Task()
    task.payload = record.payload
    applied.note(Change.TASK_ADDED, task.client_id, record.resource)


def _remove_task(world: World, _: int, record: Record, applied: Applied) -> None:
    task = world.tasks.pop(record.resource, None)
    if task is None:
        applied.ignored.append(Ignored.UNKNOWN_TASK)
        return
    if task.client_id:
        world.members[task.client_id].tasks.discard(record.resource)
    applied.note(Change.TASK_REMOVED, task.client_id, record.resource)


def _drain(world: World, offset: int, record: Record, applied: Applied) -> None:
    member = world.members.get(record.member)
    if member is None:
        applied.ignored.append(Ignored.UNKNOWN_MEMBER)
        return
    member.is_draining = True
    # Assignments that were made without knowing it are void.
    world.generation = offset
    applied.note(Change.DRAINING, record.member)


def _assign(world: World, _: int, record: Record, applied: Applied) -> None:
    if _writer(world, record, applied) is None:
        return
    fault = None
    if record.generation != world.generation:
        is_old = record.generation < world.generation
        fault = Ignored.OLD_GENERATION if is_old else Ignored.FUTURE_GENERATION
    elif world.leader != record.client_id:
        fault = Ignored.NOT_LEADER
    if fault is not None:
        applied.ignored.append(fault)
        return
    for name, client_id in record.assignments:
        _assign_one(world, name, client_id, applied)


def _assign_one(world: World, name: str, client_id: str, applied: Applied) -> None:
    task, member = world.tasks.get(name), world.members.get(client_id)
    fault = None
    if task is None:
        fault = Ignored.UNKNOWN_TASK
    elif client_id and member is None:
        fault = Ignored.UNKNOWN_MEMBER
    elif member is not None and member.is_draining and task.client_id != client_id:
        fault = Ignored.MEMBER_DRAINING
    if fault is not None:
        applied.ignored.append(fault)
    if fault is not None or task is None or task.client_id == client_id:
        return
    if task.client_id:
        world.members[task.client_id].tasks.discard(name)
        applied.note(Change.UNASSIGNED, task.client_id, name)
    task.client_id = client_id
    if member is not None:
        member.tasks.add(name)
        applied.note(Change.ASSIGNED, client_id, name)


def _snapshot(world: World, offset: int, record: Record, applied: Applied) -> None:
    # A group without members outlives retention as well: then anyone may write the snapshot.
    if world.members and _writer(world, record, applied) is None:
        return
    part = record.snapshot
    assert part is not None
    if part.as_of > offset:
        applied.ignored.append(Ignored.FUTURE_SNAPSHOT)
    elif world.leader not in {"", record.client_id}:
        applied.ignored.append(Ignored.NOT_LEADER)
    elif part.part == part.parts - 1:
        world.snapshot_at = offset
        applied.note(Change.SNAPSHOT, record.client_id)


_EFFECTS: dict[RecordType, Callable[[World, int, Record, Applied], None]] = {
    RecordType.JOIN: _join,
    RecordType.HEARTBEAT: _heartbeat,
    RecordType.LEAVE: _leave,
    RecordType.CLAIM: _claim,
    RecordType.RELEASE: _release,
    RecordType.CLAIM_MESSAGES: _claim_messages,
    RecordType.PAUSE_GROUP: _pause,
    RecordType.RESUME_GROUP: _resume,
    RecordType.SET_POSITION: _set_position,
    RecordType.ADD_TASK: _add_task,
    RecordType.REMOVE_TASK: _remove_task,
    RecordType.DRAIN: _drain,
    RecordType.ASSIGN: _assign,
    RecordType.SNAPSHOT: _snapshot,
}
