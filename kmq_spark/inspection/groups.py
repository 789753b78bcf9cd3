"""
Read the coordination topic once and return the groups in it, for operators.

Rule 1: read-only: the reader is no member, joins no Kafka group and writes nothing.
Rule 2: a partition is read from its first record that retention has kept. A group whose records begin later than its
history and that has no snapshot there is shown as far as it is known (`is_complete`).
"""

from __future__ import annotations

from collections import defaultdict
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
    from collections.abc import Callable, Iterable, Mapping

    from kmq_spark.config import Reach
    from kmq_spark.core.coordination.effects import Effect
    from kmq_spark.core.coordination.world import Member, World
    from kmq_spark.inspection.cluster import Cluster
    from kmq_spark.inspection.facts import TopicFacts


@dataclass(frozen=True, slots=True)
class GroupState:
    """
    A group as of the end of its partition.

    Attributes:
        group: Its name.
        partition: Partition of the coordination topic.
        is_complete: Whether the world is that of the members; False where retention removed records and no snapshot
            replaces them.
        world: Members, claims, tasks and positions.
        claimed_at_ms: Append time of the record that granted each claim, by resource, epoch milliseconds, broker's
            clock; only those that the topic still has.
        first_at_ms: Append time of the group's oldest record that the topic has, epoch milliseconds, broker's clock.
        snapshot_at_ms: Append time of the newest complete snapshot that the topic has; -1 = none.
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
        """
        Return the time since the last heartbeat of a member, milliseconds.

        Args:
            member: Member of the group.
            now_ms: Epoch milliseconds, this host's clock: used for the time since the last record of the partition,
                because no record shows how that time passed.
        """
        since_ms = max(0, now_ms - self.world.newest_append_ms)
        return self.world.clock_ms - member.seen_ms + since_ms

    def is_stale(self, member: Member, now_ms: int) -> bool:
        """Return whether a member is silent for more than 2T: the next record of the partition drops it."""
        return self.silent_ms(member, now_ms) > self.world.stale_after_ms


class _Times:
    """Append times of a group's records; see `GroupState`."""

    def __init__(self) -> None:
        """Begin before the first record."""
        self.claimed_at_ms: dict[str, int] = {}
        self.first_at_ms = self.snapshot_at_ms = -1

    def note(self, append_time_ms: int, effects: Iterable[Effect], *, is_snapshot: bool) -> None:
        """Take a record of the partition, from the group's first one on."""
        if self.first_at_ms < 0:
            self.first_at_ms = append_time_ms
        if is_snapshot:
            self.snapshot_at_ms = append_time_ms
        for effect in effects:
            if effect.change is Change.CLAIMED:
                self.claimed_at_ms[effect.resource] = append_time_ms


def read_groups(
    bootstrap_servers: str,
    *,
    topic: str = COORDINATION_TOPIC,
    group: str = "",
    timeout: float = 15.0,
    extra: Mapping[str, str] | None = None,
    on_progress: Callable[[int], None] = lambda _: None,
) -> list[GroupState]:
    """
    Read the coordination topic to its present end.

    Args:
        bootstrap_servers: Comma-separated `host:port`.
        topic: The coordination topic.
        group: Only this group; empty for all.
        timeout: Bound on each call to the broker, and on the time without a record.
        extra: librdkafka settings.
        on_progress: Progress callback; called with the number of records read so far.

    Returns:
        The groups, by name. A name without records is not among them.

    Raises:
        TopicError: The topic does not exist, or does not fit.
        KafkaClientError: The broker cannot be reached, or this client may not read the topic.
    """
    admin = make_client(AdminClient, admin_config(bootstrap_servers, extra=extra))
    check_coordination_topic(admin, topic, bootstrap_servers, timeout)
    partition_count = len(admin.list_topics(topic, timeout=timeout).topics[topic].partitions)
    wanted = [partition_of(group, partition_count)] if group else range(partition_count)
    first: dict[int, int] = {}
    times: dict[str, _Times] = defaultdict(_Times)
    logs: dict[int, dict[str, GroupLog]] = {partition: {} for partition in wanted}
    reader = LogReader(reader_config(bootstrap_servers, "kmq.coordination.overview", extra=extra), topic, timeout)
    try:
        for count, record in enumerate(reader.read(dict.fromkeys(wanted, 0)), 1):
            partition, offset = record.partition() or 0, record.offset() or 0
            name = _name_of(record.key())
            of_partition = logs[partition]
            first_offset = first.setdefault(partition, offset)
            if name not in of_partition and is_group(name) and group in ("", name):
                of_partition[name] = GroupLog(name, topic=topic, partition=partition, first_offset=first_offset)
            # Records of other groups move the clock of each group.
            append_time_ms = record.timestamp()[1]
            for each, log in of_partition.items():
                applied = log.read(offset, append_time_ms, record.key(), record.value())
                times[each].note(append_time_ms, applied.effects, is_snapshot=log.world.snapshot_at == offset)
            on_progress(count)
    finally:
        reader.close()
    return [
        _state_of(name, partition, log, times[name])
        for name, partition, log in sorted(
            (name, partition, log) for partition, of_partition in logs.items() for name, log in of_partition.items()
        )
    ]


def look_at_fleets(cluster: Cluster, queue: str, *, topic: str, now_ms: int, reach: Reach) -> tuple[FleetFacts, ...]:
    """
    Return the tracker fleets to which a queue belongs, for `kmq doctor`.

    Args:
        cluster: Asks the brokers.
        queue: Name of the queue, or `queue@group`.
        topic: The coordination topic; without it there are no fleets.
        now_ms: Epoch milliseconds.
        reach: The broker.

    Returns:
        The fleets; none where this client may not read the topic, or where it does not fit, so that no process can
        join.

    Raises:
        KafkaClientError: The broker cannot be reached in time.
    """
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


def _state_of(name: str, partition: int, log: GroupLog, times: _Times) -> GroupState:
    if not log.is_complete and log.stranger_at_ms < 0:
        # No record is of a member that was lost: the group is younger than the oldest record.
        log.accept()
    ignored = {reason.value: count for reason, count in sorted(log.ignored.items())}
    return GroupState(
        name,
        partition,
        log.is_complete,
        log.world,
        times.claimed_at_ms,
        times.first_at_ms,
        times.snapshot_at_ms,
        ignored,
        log.unsupported or log.last_fault,
    )
