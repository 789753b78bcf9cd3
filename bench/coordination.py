"""
Measure the fold of a coordination group: a heartbeat, a snapshot, and how soon a new reader is up to date.

    .venv/bin/python -m bench.coordination [members] [resources]

No broker: records are bytes in memory. Every member holds its share of the resources and reports all their positions
in each heartbeat.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

from kmq_spark.core.coordination.fold import apply
from kmq_spark.core.coordination.records import HeldPosition, Record, RecordType
from kmq_spark.core.coordination.world import World
from kmq_spark.wire.coordination import encode_record
from kmq_spark.wire.coordination_log import GroupLog
from kmq_spark.wire.coordination_snapshot import snapshot_parts

MEMBERS, RESOURCES = 1_000, 10_000
HEARTBEAT_MS = 2_000
ROUNDS = 20
RECORDS_SINCE_SNAPSHOT = 10_000
KEY = b"bench"


def group(members: int, resources: int) -> World:
    """Return a world in which every member holds its share."""
    world, offset = World(), 0
    for member in range(members):
        record = Record(RecordType.JOIN, f"worker-{member}", "i", heartbeat_ms=HEARTBEAT_MS)
        apply(world, offset, offset // members, record)
        offset += 1
    for resource in range(resources):
        record = Record(RecordType.CLAIM, f"worker-{resource % members}", "i", resource=f"orders/{resource}")
        apply(world, offset, offset // members, record)
        offset += 1
    return world


def heartbeats(world: World, position: int) -> list[Record]:
    """Return a heartbeat of every member with the positions of all that it holds."""
    return [
        Record(
            RecordType.HEARTBEAT,
            member.client_id,
            member.instance,
            positions=tuple(
                HeldPosition(name, world.resources[name].epoch, position)
                for name in sorted(world.held[member.client_id])
            ),
        )
        for member in list(world.members.values())
    ]


def measure(members: int, resources: int) -> dict[str, Any]:
    """Return the figures; heartbeats are medians of `ROUNDS` rounds."""
    world, at_ms = group(members, resources), 1_000
    fold_us, read_us = [], []
    log = GroupLog(KEY.decode())
    log.world = group(members, resources)
    for number in range(ROUNDS):
        records = heartbeats(world, number)
        values = [encode_record(record) for record in records]
        at_ms += HEARTBEAT_MS // 3
        began_s = time.perf_counter()
        for record in records:
            apply(world, world.next_offset, at_ms, record)
        fold_us.append((time.perf_counter() - began_s) / len(records) * 1e6)
        began_s = time.perf_counter()
        for value in values:
            log.read(log.world.next_offset, at_ms, KEY, value)
        read_us.append((time.perf_counter() - began_s) / len(values) * 1e6)
    began_s = time.perf_counter()
    parts = snapshot_parts(world)
    snapshot_ms = (time.perf_counter() - began_s) * 1e3
    return {
        "members": members,
        "resources": resources,
        "heartbeat_fold_us": round(statistics.median(fold_us), 1),
        "heartbeat_read_us": round(statistics.median(read_us), 1),
        "snapshot_bytes": sum(len(part.data) for part in parts),
        "snapshot_records": len(parts),
        "snapshot_ms": round(snapshot_ms),
        "new_reader_s": round(_new_reader_s(world, at_ms), 2),
    }


def _new_reader_s(world: World, at_ms: int) -> float:
    """Return how long a reader needs for a snapshot and the records behind it, in seconds."""
    leader = world.members[world.leader]
    as_of = world.next_offset
    values = [
        encode_record(Record(RecordType.SNAPSHOT, leader.client_id, leader.instance, snapshot=part))
        for part in snapshot_parts(world)
    ]
    round_of = [encode_record(record) for record in heartbeats(world, ROUNDS)]
    while len(values) < RECORDS_SINCE_SNAPSHOT:
        values += round_of
    log = GroupLog(KEY.decode(), first_offset=as_of)
    began_s = time.perf_counter()
    for row, value in enumerate(values):
        log.read(as_of + row, at_ms, KEY, value)
    taken_s = time.perf_counter() - began_s
    if not log.is_complete:
        message = f"the reader did not find the snapshot; {log.last_fault}"
        raise RuntimeError(message)
    return taken_s


def main(members: int = MEMBERS, resources: int = RESOURCES) -> dict[str, Any]:
    """Measure and return everything."""
    return measure(members, resources)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*map(int, sys.argv[1:]))) + "\n")
