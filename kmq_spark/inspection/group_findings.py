"""
The findings of `kmq group describe`: what is wrong with a coordination group and its topic, and the repairs.

The rules are those of `findings`.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from kmq_spark.coordination.topic import COORDINATION_TOPIC
from kmq_spark.core.coordination.effects import Ignored
from kmq_spark.core.coordination.leader import snapshot_every_ms
from kmq_spark.inspection.findings import MAX_LISTED, Finding, Level, topic_findings
from kmq_spark.inspection.spans import counted, instant, span

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kmq_spark.core.coordination.world import Member
    from kmq_spark.inspection.facts import TopicFacts
    from kmq_spark.inspection.groups import GroupState

SHORTEST_SILENCE_MS = 3_000
"""Silence below which no member is called silent, whatever T is: clocks of broker and operator may differ by it."""

SNAPSHOTS_MISSED = 3
"""Snapshots that the leader may be late by: one is on its way, and one may have failed."""


def check_topic(topic: TopicFacts, broker_count: int) -> list[Finding]:
    """Return what is found about the coordination topic; where one is unhealthy, no process can join a group."""
    if not topic.partition_count:
        what = f"coordination topic {topic.name} does not exist"
        return [Finding("topic", Level.UNHEALTHY, what, f"kmq group init{_option(topic)}")]
    found = list(topic_findings("topic", "coordination", topic, broker_count, "the groups"))
    text = f"{topic.name}: {counted(topic.partition_count, 'partition')}, LogAppendTime, cleanup.policy=delete"
    return found or [Finding("topic", Level.OK, text)]


def check_group(state: GroupState, topic: TopicFacts, now_ms: int) -> list[Finding]:
    """Return what is found about a group that was read after *now_ms*: the reading makes no member silent."""
    bound_ms = max(state.world.stale_after_ms, SHORTEST_SILENCE_MS)
    members = state.world.members.values()
    silent = {member.client_id for member in members if state.silent_ms(member, now_ms) > bound_ms}
    live = {member.client_id: member for member in members if member.client_id not in silent}
    checks = [_records(state), _pause(state, topic, now_ms)]
    if live:
        checks += [
            _members(state, live, silent, now_ms),
            _leader(state, live, now_ms),
            _tasks(state, live, is_paused=state.world.paused_until_ms > now_ms),
            _snapshots(state, topic, now_ms),
        ]
    else:
        checks += [_no_members(state, silent, now_ms), _expiry(state, topic)]
    return list(chain(*checks))


def _records(state: GroupState) -> Iterator[Finding]:
    unsupported, unreadable = (state.ignored.get(each.value, 0) for each in (Ignored.UNSUPPORTED, Ignored.UNREADABLE))
    if unsupported:
        what = f"{counted(unsupported, 'record')} of a newer version, at which older members stop: {state.fault}"
        yield Finding("records", Level.UNHEALTHY, what, "upgrade every member of the group, and this program")
    elif unreadable:
        what = f"{counted(unreadable, 'unreadable record')}, which changed nothing; the newest: {state.fault}"
        repair = "another program writes to the topic: revoke its right to Write"
        yield Finding("records", Level.WARNING, what, repair)


def _pause(state: GroupState, topic: TopicFacts, now_ms: int) -> Iterator[Finding]:
    until_ms = state.world.paused_until_ms
    if until_ms > now_ms:
        what = f"the group is paused until {instant(until_ms)}: no claim is granted and none renewed"
        repair = f"when the reason is over: kmq group pause {state.group} --end{_option(topic)}"
        yield Finding("pause", Level.UNHEALTHY, what, repair)


def _members(state: GroupState, live: dict[str, Member], silent: Iterable[str], now_ms: int) -> Iterator[Finding]:
    if silent:
        what = f"silent for more than 2T ({span(state.world.stale_after_ms)}): {_silences(state, silent, now_ms)}"
        repair = "look at these processes: what they held is free for others, and they join again if they still run"
        yield Finding("members", Level.WARNING, what, repair)
    else:
        yield Finding("members", Level.OK, f"{counted(len(live), 'member')}, T is {span(state.world.heartbeat_ms)}")


def _no_members(state: GroupState, silent: Iterable[str], now_ms: int) -> Iterator[Finding]:
    world = state.world
    tasks = f"; {counted(len(world.tasks), 'task')} not run" if world.tasks else ""
    why = f"silent are {_silences(state, silent, now_ms)}" if silent else "all have left"
    # A group without tasks whose members have left may have done all that it was for.
    level = Level.UNHEALTHY if silent or world.tasks else Level.WARNING
    start = "start the group's processes"
    yield Finding("members", level, f"no live member: {why}{tasks}", start)
    yield Finding("leader", level, "none: no tasks are assigned and no snapshots are written", start)


def _leader(state: GroupState, live: dict[str, Member], now_ms: int) -> Iterator[Finding]:
    leader = state.world.leader
    if leader in live:
        yield Finding("leader", Level.OK, f"{leader}, generation {state.world.generation}")
    else:
        silence = _silences(state, [leader], now_ms)
        what = f"no tasks are assigned and no snapshots are written, the leader is silent: {silence}"
        repair = "look again: the next record drops it, and the oldest member leads; if it stays, check the broker"
        yield Finding("leader", Level.UNHEALTHY, what, repair)


def _tasks(state: GroupState, live: dict[str, Member], *, is_paused: bool) -> Iterator[Finding]:
    tasks, resources = state.world.tasks, state.world.resources
    unassigned = [name for name, task in sorted(tasks.items()) if task.client_id not in live]
    unclaimed = [
        name
        for name, task in sorted(tasks.items())
        if task.client_id in live and (name not in resources or not resources[name].holder)
    ]
    if unassigned:
        what = f"{counted(len(unassigned), 'task')} assigned to no live member: {_names(unassigned)}"
        has_taker = any(not member.is_draining for member in live.values())
        repair = f"look at the log of the leader, {state.world.leader}, for 'cannot assign the tasks'"
        yield Finding(
            "tasks", Level.UNHEALTHY, what, repair if has_taker else "every member is draining: start another one"
        )
    if unclaimed and not is_paused:
        what = f"{counted(len(unclaimed), 'task')} assigned and not claimed: {_names(unclaimed)}"
        by = _names(sorted({tasks[name].client_id for name in unclaimed}))
        yield Finding("tasks", Level.WARNING, what, f"look at the logs of the members that should run them: {by}")
    if not unassigned and (is_paused or not unclaimed):
        yield Finding("tasks", Level.OK, f"all {len(tasks)} assigned" if tasks else "none")


def _snapshots(state: GroupState, topic: TopicFacts, now_ms: int) -> Iterator[Finding]:
    """Without a snapshot that the topic still has, a process that starts does not know the group."""
    if not state.is_complete:
        what = f"records of the group were removed from {topic.name} before a snapshot replaced them"
        repair = "wait a minute; if it stays, raise retention.ms of the topic to at least an hour"
        yield Finding("snapshots", Level.WARNING, what, repair)
        return
    retention_ms = _retention_ms(topic)
    has_one = state.snapshot_at_ms >= 0
    age_ms = now_ms - (state.snapshot_at_ms if has_one else state.first_at_ms)
    known = f"the newest is {span(age_ms)} old" if has_one else f"none, and the oldest record is {span(age_ms)} old"
    is_losing = 0 < retention_ms < 2 * age_ms
    if is_losing or age_ms > SNAPSHOTS_MISSED * snapshot_every_ms(retention_ms) + SHORTEST_SILENCE_MS:
        kept = f", and records are kept for {span(retention_ms)}: then the group's state is lost" if is_losing else ""
        repair = f"look at the log of the leader, {state.world.leader}, for 'cannot write a snapshot'"
        yield Finding("snapshots", Level.UNHEALTHY if is_losing else Level.WARNING, f"{known}{kept}", repair)
    else:
        yield Finding("snapshots", Level.OK, known)


def _expiry(state: GroupState, topic: TopicFacts) -> Iterator[Finding]:
    """No member writes snapshots: say when retention may remove what the group has."""
    positions = sum(resource.position is not None for resource in state.world.resources.values())
    retention_ms = _retention_ms(topic)
    if retention_ms <= 0 or not (positions or state.world.tasks):
        return
    # What was written behind the newest snapshot is removed later than it, but tells nothing without it.
    from_ms = state.snapshot_at_ms if state.snapshot_at_ms >= 0 else state.first_at_ms
    kept = f"{counted(positions, 'position')} and {counted(len(state.world.tasks), 'task')}"
    what = f"retention may remove {kept} from {instant(from_ms + retention_ms)} on: no member writes snapshots"
    yield Finding("snapshots", Level.WARNING, what, "start a process of the group before that, or raise retention.ms")


def _option(topic: TopicFacts) -> str:
    return "" if topic.name == COORDINATION_TOPIC else f" --topic {topic.name}"


def _retention_ms(topic: TopicFacts) -> int:
    """Return how long records are kept, milliseconds; -1 if without limit, 0 if unknown."""
    return int(topic.settings.get("retention.ms", "0"))


def _silences(state: GroupState, names: Iterable[str], now_ms: int) -> str:
    members = state.world.members
    return _names([f"{name} for {span(state.silent_ms(members[name], now_ms))}" for name in sorted(names)])


def _names(names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
