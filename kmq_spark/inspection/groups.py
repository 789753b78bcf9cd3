"""
Read the coordination topic once and return the groups in it, for operators.

A partition is read from its first record that retention has kept. A group whose records begin later than its history
and that has no snapshot there is shown as far as it is known (`is_complete`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from confluent_kafka.admin import AdminClient

from kmq_spark.coordination.topic import COORDINATION_TOPIC, check_coordination_topic, partition_of
from kmq_spark.core.coordination.effects import Change
from kmq_spark.core.coordination.records import FLEET_PREFIX, is_group
from kmq_spark.errors import KafkaClientError, TopicError
from kmq_spark.inspection.facts import FleetFacts
from kmq_spark.kafka.client_errors import DENIED
from kmq_spark.kafka.log_reader import LogReader
from kmq_spark.kafka.settings import admin_config, make_client, reader_config
from kmq_spark.wire.coordination_log import GroupLog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kmq_spark.config import Reach
    from kmq_spark.core.coordination.world import Member, World
    from kmq_spark.inspection.cluster import Cluster
    from kmq_spark.inspection.facts import TopicFacts


@dataclass(frozen=True, slots=True)
class GroupState:
    """
    A group as of the end of its partition.

    Instants are append times, epoch milliseconds on the broker's clock, of what the topic still has; -1 = none.

    Attributes:
        is_complete: Whether the world is that of the members; False where retention removed records and no snapshot
            replaces them.
        claimed_at_ms: Of the record that granted each claim, by resource.
        first_at_ms: Of the group's oldest record.
        snapshot_at_ms: Of the newest complete snapshot.
        ignored: Number of records, or entries of records, that changed nothing, by reason.
        fault: Text about an unreadable record, empty if there was none.
    """

    group: str
    partition: int
    is_complete: bool
    world: World
    claimed_at_ms: Mapping[str, int]
    first_at_ms: int
    snapshot_at_ms: int
    ignored: Mapping[str, int]
    fault: str

    def silent_ms(self, member: Member, now_ms: int) -> int:
        """Return the time since the last heartbeat of a member, milliseconds, at *now_ms* of this host's clock."""
        # No record shows how the time since the last one passed.
        since_ms = max(0, now_ms - self.world.newest_append_ms)
        return self.world.clock_ms - member.seen_ms + since_ms

    def is_stale(self, member: Member, now_ms: int) -> bool:
        """Return whether a member is silent for more than 2T: the next record of the partition drops it."""
        return self.silent_ms(member, now_ms) > self.world.stale_after_ms


class _Reader:
    """Reader of one group, from its first record in the topic on."""

    def __init__(self, log: GroupLog, append_time_ms: int) -> None:
        self.log = log
        self.claimed_at_ms: dict[str, int] = {}
        self.first_at_ms, self.snapshot_at_ms = append_time_ms, -1

    def read(self, offset: int, append_time_ms: int, key: bytes | None, value: bytes | None) -> None:
        """Read the next record of the partition."""
        applied = self.log.read(offset, append_time_ms, key, value)
        if self.log.world.snapshot_at == offset:
            self.snapshot_at_ms = append_time_ms
        for effect in applied.effects:
            if effect.change is Change.CLAIMED:
                self.claimed_at_ms[effect.resource] = append_time_ms

    def state(self, group: str, partition: int) -> GroupState:
        """Return the group as of the last record."""
        log = self.log
        if not log.is_complete and log.is_alone:
            log.accept()
        ignored = {reason.value: count for reason, count in sorted(log.ignored.items())}
        return GroupState(
            group,
            partition,
            log.is_complete,
            log.world,
            self.claimed_at_ms,
            self.first_at_ms,
            self.snapshot_at_ms,
            ignored,
            log.unsupported or log.last_fault,
        )


def read_groups(
    bootstrap_servers: str,
    *,
    topic: str = COORDINATION_TOPIC,
    group: str = "",
    timeout: float = 15.0,
    extra: Mapping[str, str] | None = None,
    on_progress: Callable[[int], None] = lambda _: None,
) -> list[GroupState]:
    """Read the coordination topic to its present end; return one group, or all groups, by name."""
    admin = make_client(AdminClient, admin_config(bootstrap_servers, extra=extra))
    check_coordination_topic(admin, topic, bootstrap_servers, timeout)
    partition_count = len(admin.list_topics(topic, timeout=timeout).topics[topic].partitions)
    wanted = [partition_of(group, partition_count)] if group else range(partition_count)
    first: dict[int, int] = {}
    readers: dict[int, dict[str, _Reader]] = {partition: {} for partition in wanted}
    client = LogReader(reader_config(bootstrap_servers, "kmq.coordination.overview", extra=extra), topic, timeout)
    try:
        for count, record in enumerate(client.read(dict.fromkeys(wanted, 0)), 1):
            partition, offset, append_time_ms = record.partition() or 0, record.offset() or 0, record.timestamp()[1]
            name, of_partition = _name_of(record.key()), readers[partition]
            first_offset = first.setdefault(partition, offset)
            if name not in of_partition and is_group(name) and group in ("", name):
                log = GroupLog(name, topic=topic, partition=partition, first_offset=first_offset)
                of_partition[name] = _Reader(log, append_time_ms)
            # Records of other groups move the clock of each group.
            for reader in of_partition.values():
                reader.read(offset, append_time_ms, record.key(), record.value())
            on_progress(count)
    finally:
        client.close()
    found = [
        reader.state(name, partition)
        for partition, of_partition in readers.items()
        for name, reader in of_partition.items()
    ]
    return sorted(found, key=lambda state: state.group)


def look_at_fleets(cluster: Cluster, queue: str, *, topic: str, now_ms: int, reach: Reach) -> tuple[FleetFacts, ...]:
    """Return the tracker fleets to which a queue belongs; none where this client may not read the topic."""
    (facts,) = cluster.topics([topic]).values()
    if not facts.partition_count:
        return ()
    try:
        found = read_groups(topic=topic, **reach)
    except TopicError:
        return ()
    except KafkaClientError as error:
        if error.code in DENIED:
            return ()
        raise
    return tuple(
        _fleet_of(state, facts, queue, now_ms)
        for state in found
        if state.group.startswith(FLEET_PREFIX) and queue in state.world.tasks
    )


def _fleet_of(state: GroupState, topic: TopicFacts, queue: str, now_ms: int) -> FleetFacts:
    world = state.world
    stale = tuple(sorted(name for name, member in world.members.items() if state.is_stale(member, now_ms)))
    claim = world.resources.get(queue)
    return FleetFacts(
        name=state.group.removeprefix(FLEET_PREFIX),
        topic=topic,
        tracked_by="" if claim is None else claim.holder,
        assigned_to=world.tasks[queue].client_id,
        processes=len(world.members) - len(stale),
        stale=stale,
        is_paused=world.paused_until_ms > now_ms,
        is_complete=state.is_complete,
    )


def _name_of(key: bytes | str | None) -> str:
    """Return the name in a key; empty where it is no text."""
    if isinstance(key, str):
        return key
    return (key or b"").decode("utf-8", "replace")
