"""
Apply the records of a coordination group to its world.

Rule 1: every change depends on the record, its offset and its append time, and on nothing else.
Rule 2: before each record of the partition, of whatever group, claims that were not renewed for 2T lapse and members
without a heartbeat for 2T are dropped, oldest first.
Rule 3: no member is trusted: a record that does not meet its needs (docs/internals/protocol.md) changes nothing, and
is reported with its reason.

From record to record, the group's clock moves by the difference of their append times, but by 0 to T/2 only. So a
broker's clock that is set back cannot stop it, and one that jumps ahead cannot make all members stale at once. Live
members write several records within T.

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


_FREE = Resource()


def apply(world: World, offset: int, append_time_ms: int, record: Record | None) -> Applied:
    """Apply one record of the group's partition."""
    applied = Applied()
    if offset < world.next_offset:
        applied.ignored.append(Ignored.REPEATED)
        return applied
    world.next_offset = offset + 1
    if append_time_ms >= 0:
        _pass_time(world, append_time_ms, applied)
        _expire(world, offset, applied)
    if record is not None:
        fault = _EFFECTS[record.type](world, offset, record, applied)
        if fault is not None:
            applied.ignored.append(fault)
    return applied


def _pass_time(world: World, append_time_ms: int, applied: Applied) -> None:
    """Move the group's clock, and end the pause if its time is over."""
    if world.last_append_ms >= 0:
        world.clock_ms += min(max(0, append_time_ms - world.last_append_ms), world.longest_step_ms)
    world.last_append_ms = append_time_ms
    world.newest_append_ms = max(world.newest_append_ms, append_time_ms)
    if 0 < world.paused_until_ms <= world.newest_append_ms:
        world.paused_until_ms = 0
        applied.note(Change.RESUMED)


def _expire(world: World, offset: int, applied: Applied) -> None:
    """End the claims of stale members and drop these members, oldest first."""
    # Both dictionaries are ordered by time, so usually only the first entry is looked at.
    stale_before_ms = world.clock_ms - world.stale_after_ms
    lapsed, dropped = [], []
    for client_id in world.held:
        holder = world.members[client_id]
        if holder.renewed_ms >= stale_before_ms:
            break
        lapsed.append(holder)
    for member in world.members.values():
        if member.seen_ms >= stale_before_ms:
            break
        dropped.append(member)
    for member in sorted(lapsed, key=lambda member: (member.renewed_ms, member.joined_at)):
        _free_all(world, member.client_id, Change.LAPSED, applied)
    for member in sorted(dropped, key=lambda member: (member.seen_ms, member.joined_at)):
        _remove(world, member.client_id, Change.DROPPED, applied)
        world.generation = offset


def _free_all(world: World, client_id: str, change: Change, applied: Applied) -> None:
    for name in sorted(world.held.get(client_id, ())):
        _free(world, client_id, name, change, applied)


def _free(world: World, client_id: str, name: str, change: Change, applied: Applied) -> None:
    """End a claim. The position is kept; a resource without a position is removed."""
    resource = world.resources[name]
    applied.note(change, client_id, name, resource.epoch)
    if resource.position is None:
        del world.resources[name]
    else:
        world.resources[name] = resource._replace(holder="", claimed_to=None)
    held = world.held[client_id]
    held.discard(name)
    if not held:
        del world.held[client_id]


def _remove(world: World, client_id: str, change: Change, applied: Applied) -> None:
    """Remove a member that holds nothing."""
    del world.members[client_id]
    applied.note(change, client_id)
    for name in sorted(name for name, task in world.tasks.items() if task.client_id == client_id):
        world.tasks[name] = world.tasks[name]._replace(client_id="")
        applied.note(Change.UNASSIGNED, client_id, name)


def _refresh(world: World, member: Member, applied: Applied) -> None:
    """Apply a heartbeat of a member. It renews the member's claims unless the group is paused."""
    client_id, instance, joined_at, metadata, is_draining, _, renewed_ms = member
    if not world.is_paused:
        renewed_ms = world.clock_ms
        applied.refreshed = True
        if client_id in world.held:
            world.held.move_to_end(client_id)
    refreshed = Member(client_id, instance, joined_at, metadata, is_draining, world.clock_ms, renewed_ms)
    world.members[client_id] = refreshed
    world.members.move_to_end(client_id)


def _fault_of_writer(world: World, record: Record) -> Ignored | None:
    """Return why the writer may not write this record; None if it is a member."""
    member = world.members.get(record.client_id)
    if member is None:
        return Ignored.UNKNOWN_MEMBER
    return Ignored.OTHER_INSTANCE if member.instance != record.instance else None


def _fault_of_claim(resource: Resource | None, client_id: str, epoch: int) -> Ignored | None:
    """Return why a member does not hold a resource under this epoch; None if it does."""
    if resource is None or resource.holder != client_id:
        return Ignored.NOT_HOLDER
    if epoch != resource.epoch:
        return Ignored.OLD_EPOCH if epoch < resource.epoch else Ignored.FUTURE_EPOCH
    return None


def _raise_position(world: World, name: str, position: int) -> Ignored | None:
    resource = world.resources[name]
    if resource.position is not None and position < resource.position:
        return Ignored.POSITION_BACK
    world.resources[name] = resource._replace(position=position)
    return None


def _join(world: World, offset: int, record: Record, applied: Applied) -> Ignored | None:
    client_id, instance = record.client_id, record.instance
    before = world.members.get(client_id)
    if before is not None and before.instance != instance and not record.fast_reclaim:
        return Ignored.CLIENT_ID_IN_USE
    if before is None and len(world.members) >= MAX_MEMBERS:
        return Ignored.OVER_LIMIT
    if not world.members:
        world.heartbeat_ms = record.heartbeat_ms
    world.generation = offset
    if before is None:
        member = Member(client_id, instance, offset, record.metadata)
        applied.note(Change.JOINED, client_id)
    elif before.instance != instance:
        member = Member(client_id, instance, offset, record.metadata, renewed_ms=before.renewed_ms)
        applied.note(Change.REPLACED, client_id)
        _take_over(world, offset, client_id, applied)
    else:
        member = before._replace(metadata=record.metadata)
        applied.note(Change.UPDATED, client_id)
    _refresh(world, member, applied)
    return None


def _take_over(world: World, offset: int, client_id: str, applied: Applied) -> None:
    """Move the claims of an instance to its successor, with new epochs; in a pause, release them instead."""
    if world.is_paused:
        _free_all(world, client_id, Change.RELEASED, applied)
        return
    for name in sorted(world.held.get(client_id, ())):
        world.resources[name] = world.resources[name]._replace(epoch=offset, claimed_to=None)
        applied.note(Change.CLAIMED, client_id, name, offset)


def _heartbeat(world: World, _: int, record: Record, applied: Applied) -> Ignored | None:
    if (fault := _fault_of_writer(world, record)) is not None:
        return fault
    client_id, resources = record.client_id, world.resources
    _refresh(world, world.members[client_id], applied)
    for name, epoch, position in record.positions:
        # No function call per position: heartbeats are by far the most frequent records.
        holder, held_epoch, before, claimed_to, topic_id = resources.get(name, _FREE)
        if holder != client_id or epoch != held_epoch:
            applied.ignored.append(_fault_of_claim(resources.get(name), client_id, epoch) or Ignored.NOT_HOLDER)
        elif before is not None and position < before:
            applied.ignored.append(Ignored.POSITION_BACK)
        else:
            resources[name] = Resource(holder, held_epoch, position, claimed_to, topic_id)
    return None


def _leave(world: World, offset: int, record: Record, applied: Applied) -> Ignored | None:
    if (fault := _fault_of_writer(world, record)) is not None:
        return fault
    _free_all(world, record.client_id, Change.RELEASED, applied)
    _remove(world, record.client_id, Change.LEFT, applied)
    world.generation = offset
    return None


def _claim(world: World, offset: int, record: Record, applied: Applied) -> Ignored | None:
    if (fault := _fault_of_writer(world, record)) is not None:
        return fault
    client_id, name = record.client_id, record.resource
    resource, task = world.resources.get(name), world.tasks.get(name)
    if world.is_paused:
        return Ignored.GROUP_PAUSED
    if resource is not None and resource.holder not in {"", client_id}:
        return Ignored.HELD_BY_OTHER
    if task is not None and task.client_id != client_id:
        return Ignored.NOT_ASSIGNED
    if resource is None and len(world.resources) >= MAX_RESOURCES:
        return Ignored.OVER_LIMIT
    position, topic_id = (None, "") if resource is None else (resource.position, resource.topic_id)
    if record.topic_id and topic_id and record.topic_id != topic_id and position is not None:
        position = None
        applied.note(Change.POSITION_FORGOTTEN, client_id, name, offset)
    world.resources[name] = Resource(client_id, offset, position, topic_id=record.topic_id or topic_id)
    world.held.setdefault(client_id, set()).add(name)
    applied.note(Change.CLAIMED, client_id, name, offset)
    _refresh(world, world.members[client_id], applied)
    return None


def _release(world: World, _: int, record: Record, applied: Applied) -> Ignored | None:
    name, client_id = record.resource, record.client_id
    fault = _fault_of_writer(world, record) or _fault_of_claim(world.resources.get(name), client_id, record.epoch)
    if fault is not None:
        return fault
    if record.position is not None:
        fault = _raise_position(world, name, record.position)
    _free(world, client_id, name, Change.RELEASED, applied)
    return fault


def _claim_messages(world: World, _: int, record: Record, applied: Applied) -> Ignored | None:
    if (fault := _fault_of_writer(world, record)) is not None:
        return fault
    if world.is_paused:
        return Ignored.GROUP_PAUSED
    name, end = record.resource, record.position
    fault = _fault_of_claim(world.resources.get(name), record.client_id, record.epoch)
    if fault is not None:
        return fault
    resource = world.resources[name]
    assert end is not None
    if end < (resource.position or 0):
        return Ignored.POSITION_BACK
    world.resources[name] = resource._replace(claimed_to=end)
    applied.note(Change.MESSAGES_CLAIMED, record.client_id, name, resource.epoch)
    return None


def _pause(world: World, _: int, record: Record, applied: Applied) -> Ignored | None:
    world.paused_until_ms = world.newest_append_ms + record.duration_ms
    applied.note(Change.PAUSED)
    return None


def _resume(world: World, _: int, __: Record, applied: Applied) -> Ignored | None:
    if not world.is_paused:
        return Ignored.NOT_PAUSED
    world.paused_until_ms = 0
    applied.note(Change.RESUMED)
    return None


def _set_position(world: World, _: int, record: Record, applied: Applied) -> Ignored | None:
    name, position = record.resource, record.position
    is_known = name in world.resources
    if not world.is_paused:
        return Ignored.NOT_PAUSED
    if world.held:
        return Ignored.STILL_HELD
    if position is None and not is_known:
        return Ignored.UNKNOWN_RESOURCE
    if not is_known and len(world.resources) >= MAX_RESOURCES:
        return Ignored.OVER_LIMIT
    if position is None:
        del world.resources[name]
    else:
        # Its topic is the one that exists now, whatever was claimed before.
        world.resources[name] = world.resources.get(name, _FREE)._replace(position=position, topic_id="")
    applied.note(Change.POSITION_SET, "", name)
    return None


def _add_task(world: World, _: int, record: Record, applied: Applied) -> Ignored | None:
    task = world.tasks.get(record.resource)
    if task is None and len(world.tasks) >= MAX_TASKS:
        return Ignored.OVER_LIMIT
    client_id = "" if task is None else task.client_id
    world.tasks[record.resource] = Task(record.payload, client_id)
    applied.note(Change.TASK_ADDED, client_id, record.resource)
    return None


def _remove_task(world: World, _: int, record: Record, applied: Applied) -> Ignored | None:
    task = world.tasks.pop(record.resource, None)
    if task is None:
        return Ignored.UNKNOWN_TASK
    applied.note(Change.TASK_REMOVED, task.client_id, record.resource)
    return None


def _drain(world: World, offset: int, record: Record, applied: Applied) -> Ignored | None:
    member = world.members.get(record.member)
    if member is None:
        return Ignored.UNKNOWN_MEMBER
    world.members[record.member] = member._replace(is_draining=True)
    # This invalidates assignments that were made before the drain was known.
    world.generation = offset
    applied.note(Change.DRAINING, record.member)
    return None


def _assign(world: World, _: int, record: Record, applied: Applied) -> Ignored | None:
    if (fault := _fault_of_writer(world, record)) is not None:
        return fault
    if record.generation != world.generation:
        return Ignored.OLD_GENERATION if record.generation < world.generation else Ignored.FUTURE_GENERATION
    if world.leader != record.client_id:
        return Ignored.NOT_LEADER
    for name, client_id in record.assignments:
        fault = _assign_one(world, name, client_id, applied)
        if fault is not None:
            applied.ignored.append(fault)
    return None


def _assign_one(world: World, name: str, client_id: str, applied: Applied) -> Ignored | None:
    task, member = world.tasks.get(name), world.members.get(client_id)
    if task is None:
        return Ignored.UNKNOWN_TASK
    if client_id and member is None:
        return Ignored.UNKNOWN_MEMBER
    if task.client_id == client_id:
        return None
    if member is not None and member.is_draining:
        return Ignored.MEMBER_DRAINING
    if task.client_id:
        applied.note(Change.UNASSIGNED, task.client_id, name)
    world.tasks[name] = Task(task.payload, client_id)
    if client_id:
        applied.note(Change.ASSIGNED, client_id, name)
    return None


def _snapshot(world: World, offset: int, record: Record, applied: Applied) -> Ignored | None:
    # Retention must not remove a group without members either: then anyone may write the snapshot.
    if world.members and (fault := _fault_of_writer(world, record)) is not None:
        return fault
    part = record.snapshot
    assert part is not None
    if part.as_of > offset:
        return Ignored.FUTURE_SNAPSHOT
    if world.leader not in {"", record.client_id}:
        return Ignored.NOT_LEADER
    if part.part == part.parts - 1:
        world.snapshot_at = offset
        applied.note(Change.SNAPSHOT, record.client_id)
    return None


_EFFECTS: dict[RecordType, Callable[[World, int, Record, Applied], Ignored | None]] = {
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
