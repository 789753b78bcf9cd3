"""A group's log as a story: each line writes a record, and the world is asked in between."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from kmq_spark.core.coordination.effects import Applied, Change
from kmq_spark.core.coordination.fold import apply
from kmq_spark.core.coordination.records import (
    FIELDS,
    Assignment,
    HeldPosition,
    Record,
    RecordType,
    SnapshotPart,
)
from kmq_spark.core.coordination.world import Member, Resource, World
from kmq_spark.wire.coordination import decode_record, encode_record

T = 1_000
"""Heartbeat interval of the stories, ms."""


class Story:
    """One group, whose world is checked after each record."""

    def __init__(self, at_ms: int = 10_000) -> None:
        self.world = World()
        self.at_ms, self.offset, self.sequence = at_ms, -1, 0
        self.applied = Applied()
        self.log: list[tuple[int, int, Record | None]] = []

    def write(self, record: Record | None, after_ms: int = 0) -> Applied:
        """Append a record, some milliseconds after the last one, and fold it; return what it led to."""
        self.offset, self.at_ms = self.offset + 1, self.at_ms + after_ms
        self.log.append((self.offset, self.at_ms, record))
        if record is not None:
            assert decode_record(encode_record(record)) == record
        self.applied = apply(self.world, self.offset, self.at_ms, record)
        check(self.world)
        return self.applied

    def say(self, kind: RecordType, client_id: str = "a", after_ms: int = 0, **fields: Any) -> Applied:
        """Write a record of a client; its instance is `<client id>1` unless it is given."""
        self.sequence += 1
        instance = fields.pop("instance", f"{client_id}1")
        return self.write(Record(kind, client_id, instance, self.sequence, **fields), after_ms)

    def join(self, client_id: str = "a", after_ms: int = 0, **fields: Any) -> Applied:
        """Write a JOIN with the T of the stories."""
        return self.say(RecordType.JOIN, client_id, after_ms, **{"heartbeat_ms": T, **fields})

    def beat(self, *client_ids: str, after_ms: int = 0) -> None:
        """Write a HEARTBEAT of each client, the first of them after a while."""
        for client_id in client_ids:
            self.say(RecordType.HEARTBEAT, client_id, after_ms)
            after_ms = 0

    def pass_time(self, passed_ms: int, *alive: str) -> None:
        """Let time pass in steps of T/2, with heartbeats of those alive, or with records of another group."""
        while passed_ms > 0:
            step = min(passed_ms, T // 2)
            if alive:
                self.beat(*alive, after_ms=step)
            else:
                self.write(None, step)
            passed_ms -= step

    def claim(self, resource: str = "r", client_id: str = "a", after_ms: int = 0) -> Applied:
        """Write a CLAIM."""
        return self.say(RecordType.CLAIM, client_id, after_ms, resource=resource)

    def holder(self, resource: str = "r") -> str:
        """Return the holder of a resource, empty where there is none."""
        known = self.world.resources.get(resource)
        return known.holder if known else ""

    def epoch(self, resource: str = "r") -> int:
        """Return the epoch of a resource."""
        return self.world.resources[resource].epoch


def facts(world: World) -> dict[str, Any]:
    """Return everything that makes a world."""
    found = {name: getattr(world, name) for name in World.__slots__ if name != "_leader"}
    return {name: dict(value) if isinstance(value, dict) else value for name, value in found.items()}


def check(world: World) -> None:
    """Check what is true of every world: what is kept twice agrees, nothing is stale, and the leader is the oldest."""
    held: dict[str, set[str]] = {}
    for name, resource in world.resources.items():
        assert resource.holder or resource.position is not None
        assert resource.epoch < world.next_offset
        if resource.holder:
            held.setdefault(resource.holder, set()).add(name)
    assert held == dict(world.held)
    members = list(world.members.values())
    assert [member.client_id for member in members] == list(world.members)
    assert members == sorted(members, key=lambda member: member.seen_ms)
    renewed_ms = [world.members[client_id].renewed_ms for client_id in world.held]
    assert renewed_ms == sorted(renewed_ms)
    stale_before_ms = world.clock_ms - world.stale_after_ms
    assert all(at_ms >= stale_before_ms for at_ms in [*renewed_ms, *(member.seen_ms for member in members)])
    assert {task.client_id for task in world.tasks.values()} <= {"", *world.members}
    assert world.leader == min(members, key=lambda member: member.joined_at, default=NOBODY).client_id


NOBODY = Member("", "", -1)


def effects(applied: Applied) -> list[tuple[Change, str, str]]:
    """Return changes without their epochs."""
    return [(one.change, one.client_id, one.resource) for one in applied.effects]


CLIENTS, RESOURCES, TASKS = ["a", "b", "c"], ["r", "s"], ["t", "u"]
STEPS_MS = [0, 0, 0, 0, 1, T // 10, T // 10, T // 4, T // 2, T // 2, 3 * T, 1_000_000, -T, -1_000_000]


WEIGHTS: dict[RecordType | None, int] = {
    None: 1,
    RecordType.JOIN: 3,
    RecordType.HEARTBEAT: 5,
    RecordType.LEAVE: 1,
    RecordType.CLAIM: 5,
    RecordType.RELEASE: 2,
    RecordType.CLAIM_MESSAGES: 2,
    RecordType.PAUSE_GROUP: 1,
    RecordType.RESUME_GROUP: 2,
    RecordType.SET_POSITION: 2,
    RecordType.ADD_TASK: 1,
    RecordType.REMOVE_TASK: 1,
    RecordType.DRAIN: 1,
    RecordType.ASSIGN: 4,
    RecordType.SNAPSHOT: 1,
}
KINDS = st.sampled_from([kind for kind, weight in WEIGHTS.items() for _ in range(weight)])
CLIENT_IDS, INSTANCES = st.sampled_from(CLIENTS), st.sampled_from([0, 0, 0, 1, 2])
NAMES, TASK_NAMES = st.sampled_from([*RESOURCES, *TASKS]), st.sampled_from(TASKS)
POSITIONS, SOME_POSITIONS = st.integers(0, 5), st.none() | st.integers(0, 5)
NEAR = st.sampled_from([0, 0, 0, -1, 1, 10_000])
FREE_FIELDS: dict[RecordType, dict[str, st.SearchStrategy[Any]]] = {
    RecordType.JOIN: {
        "heartbeat_ms": st.sampled_from([T, T, 2 * T]),
        "metadata": st.sampled_from([b"", b"m"]),
        "fast_reclaim": st.booleans(),
    },
    RecordType.CLAIM: {"resource": NAMES, "topic_id": st.sampled_from(["", "", "old", "new"])},
    RecordType.RELEASE: {"resource": NAMES, "position": SOME_POSITIONS},
    RecordType.CLAIM_MESSAGES: {"resource": NAMES, "position": POSITIONS},
    RecordType.PAUSE_GROUP: {"duration_ms": st.sampled_from([1, T, 5 * T, 1_000_000])},
    RecordType.SET_POSITION: {"resource": NAMES, "position": SOME_POSITIONS},
    RecordType.ADD_TASK: {"resource": TASK_NAMES, "payload": st.sampled_from([b"", b"p"])},
    RecordType.REMOVE_TASK: {"resource": NAMES},
    RecordType.DRAIN: {"member": CLIENT_IDS},
}
HELD = st.lists(st.tuples(NAMES, NEAR, POSITIONS), max_size=3)
ASSIGNED = st.lists(st.builds(Assignment, st.sampled_from([*TASKS, "r"]), st.sampled_from([*CLIENTS, ""])), max_size=3)
STEPS = st.sampled_from(STEPS_MS)


FITS = st.sampled_from([True, True, False])


def _who_may(kind: RecordType, client_id: str, fields: dict[str, Any], world: World) -> str:
    """Return the client whose record would succeed, empty where that is any client or none."""
    if kind in {RecordType.ASSIGN, RecordType.SNAPSHOT}:
        return world.leader
    if "epoch" in FIELDS[kind]:
        return world.resources.get(fields["resource"], Resource()).holder
    return "" if kind is RecordType.JOIN or client_id in world.members else min(world.members, default="")


def draw_record(data: st.DataObject, world: World, sequence: int) -> Record | None:
    """Draw a record that mostly fits the world as it is, and sometimes does not in one way."""
    kind = data.draw(KINDS)
    if kind is None:
        return None
    client_id, number = data.draw(CLIENT_IDS), data.draw(INSTANCES)
    fields = {name: data.draw(values) for name, values in FREE_FIELDS.get(kind, {}).items()}
    if data.draw(FITS):
        client_id = _who_may(kind, client_id, fields, world) or client_id
    known = world.members.get(client_id, NOBODY).instance or f"{client_id}1"
    instance = f"{client_id}{number}" if number else known

    def epoch_of(name: str, away: int) -> int:
        return max(0, world.resources.get(name, Resource(epoch=0)).epoch + away)

    if "epoch" in FIELDS[kind]:
        fields["epoch"] = epoch_of(fields["resource"], data.draw(NEAR))
    elif kind is RecordType.HEARTBEAT:
        held = data.draw(HELD)
        fields["positions"] = tuple(HeldPosition(name, epoch_of(name, away), at) for name, away, at in held)
    elif kind is RecordType.ASSIGN:
        fields["generation"] = max(0, world.generation + data.draw(NEAR))
        fields["assignments"] = tuple(data.draw(ASSIGNED))
    elif kind is RecordType.SNAPSHOT:
        as_of = max(0, world.next_offset + data.draw(NEAR))
        fields["snapshot"] = SnapshotPart(as_of, data.draw(st.integers(0, 1)), 2, b"x")
    return Record(kind, client_id, instance, sequence, **fields)


def populate(story: Story) -> None:
    """Let three members join; one holds a resource with a position, one a task, and one task is free."""
    for client_id in CLIENTS:
        story.join(client_id)
    for task in TASKS:
        story.say(RecordType.ADD_TASK, "a", resource=task)
    generation = story.world.generation
    story.say(RecordType.ASSIGN, "a", generation=generation, assignments=(Assignment("t", "b"), Assignment("u", "c")))
    story.claim("r", "a")
    story.say(RecordType.HEARTBEAT, "a", positions=(HeldPosition("r", story.epoch("r"), 3),))
    story.claim("t", "b")


def draw_story(data: st.DataObject, longest: int = 40) -> Story:
    """Draw a log and fold it; the world is checked after each record."""
    story = Story()
    if data.draw(FITS):
        populate(story)
        if not data.draw(FITS):
            story.say(RecordType.PAUSE_GROUP, "operator", duration_ms=3_000_000)
    for sequence in range(data.draw(st.integers(0, longest))):
        step_ms = data.draw(STEPS)
        story.write(draw_record(data, story.world, sequence), max(step_ms, -story.at_ms))
    return story
