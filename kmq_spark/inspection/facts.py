"""
Facts about a queue that can be observed from outside. The inspector fills them in and the checks read them.

Rule 1: Values only. Instants are epoch milliseconds on the broker's clock.
Rule 2: None, or an empty mapping, means that this client may not read the fact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kmq_spark.inspection.view import MarkersView


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """
    The brokers.

    Attributes:
        address: The bootstrap servers.
        broker_count: Number of known brokers.
        release: Kafka release derived from the protocol versions, as text; empty if unknown.
        can_transact: Whether the brokers support KIP-447, which the tracker needs; None if unknown.
        offsets_retention_ms: How long the offsets of a group without members are kept; None if unknown.
        transaction_max_timeout_ms: Longest time-out of a transaction that the brokers accept; 0 if unknown.
    """

    address: str
    broker_count: int
    release: str = ""
    can_transact: bool | None = None
    offsets_retention_ms: int | None = None
    transaction_max_timeout_ms: int = 0


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """
    One topic.

    Attributes:
        name: Name of the topic.
        partition_count: Number of partitions; 0 if the topic does not exist.
        settings: Settings of the topic; empty if this client may not read them.
        replicas: Number of replicas of the first partition.
        leaderless: Partitions without a leader.
        under_replicated: Partitions with fewer in-sync replicas than replicas.
        first: First offset by partition.
        end: Last stable offset by partition.
    """

    name: str
    partition_count: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)
    replicas: int = 0
    leaderless: tuple[int, ...] = ()
    under_replicated: tuple[int, ...] = ()
    first: Mapping[int, int] = field(default_factory=dict)
    end: Mapping[int, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of offsets between first and end: records, and the control records of transactions."""
        return sum(end - self.first.get(partition, 0) for partition, end in self.end.items())


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """
    The consumer group of the queue's consumers.

    Attributes:
        name: Name of the group.
        state: State as the coordinator names it; empty if unknown.
        members: Number of assigned partitions by client id.
        positions: Committed position by queue partition.
    """

    name: str
    state: str = ""
    members: Mapping[str, int] = field(default_factory=dict)
    positions: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrackerFacts:
    """
    The tracker, as observed from its group and the log.

    Attributes:
        group: Name of the tracker's group.
        positions: First marker not folded, by markers partition.
        needed: First marker needed for a rebuild, by markers partition.
        last_committers: Id of the tracker that committed last, by markers partition.
        unread: Number of markers, and control records, past the positions, over all partitions.
        unread_since_ms: Append time of the oldest marker that the tracker has not read; None if it has read all.
        heartbeat_at_ms: Time of the last commit, clock of the tracker's host; None if there is no heartbeat.
        is_stopped: Whether the tracker was asked to stop.
        snapshot_lag: Number of batches since the last snapshot of its state was uploaded.
    """

    group: str
    positions: Mapping[int, int] = field(default_factory=dict)
    needed: Mapping[int, int] = field(default_factory=dict)
    last_committers: Mapping[int, str] = field(default_factory=dict)
    unread: int = 0
    unread_since_ms: int | None = None
    heartbeat_at_ms: int | None = None
    is_stopped: bool = False
    snapshot_lag: int = 0


@dataclass(frozen=True, slots=True)
class Backlog:
    """
    Records of a topic past a position.

    Attributes:
        count: Number of records.
        is_exact: False if the records were not counted one by one: then the count includes control records of
            transactions.
        oldest_at_ms: Append time of the oldest record; None if there is none or it was not read.
    """

    count: int = 0
    is_exact: bool = True
    oldest_at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """
    The tracker's checkpoint folder.

    Attributes:
        path: Path of the folder.
        problem: Why the folder cannot be used; empty if there is no problem.
        is_local: Whether the folder is accessible from this machine.
        last_batch_at_ms: When the last batch was finished; None if there was none.
    """

    path: str
    problem: str = ""
    is_local: bool = True
    last_batch_at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class ProducersFacts:
    """
    The producers of a queue that have an id.

    Attributes:
        topic: The topic of their positions; without partitions where it does not exist.
        ids: How many there are.
        unreadable: Ids whose position record cannot be read.
        open_for_ms: For how long, at least, a transaction has been open in the topic of the positions; 0 for none.
    """

    topic: TopicFacts
    ids: int = 0
    unreadable: tuple[str, ...] = ()
    open_for_ms: int = 0


@dataclass(frozen=True, slots=True)
class FleetFacts:
    """
    A tracker fleet to which the queue belongs.

    Attributes:
        name: Name of the fleet.
        topic: Its coordination topic.
        tracked_by: Member that holds the queue; empty if none does.
        assigned_to: Member to which the leader has assigned the queue; empty if none.
        processes: Members that are not stale.
        stale: Members without a heartbeat for 2T.
        is_paused: Whether an operator has paused the fleet.
        is_complete: Whether the coordination topic still has what the fleet's state depends on.
    """

    name: str
    topic: TopicFacts
    tracked_by: str = ""
    assigned_to: str = ""
    processes: int = 0
    stale: tuple[str, ...] = ()
    is_paused: bool = False
    is_complete: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFacts:
    """
    All facts that `kmq doctor` checks.

    Attributes:
        queue: Name of the queue, `queue@subscription` for a group.
        now_ms: When the facts were read.
        cluster: Brokers.
        queue_topic: Topic of the messages.
        markers_topic: Topic of the markers.
        dead_letter_topic: Topic of the dead letters.
        consumers: Consumer group of the consumers.
        tracker: Tracker.
        ready: Messages that no consumer has started.
        dead_letters: Dead letters that were neither redriven nor purged.
        new_dead_letters: Dead letters of the last hour, including control records.
        views: Folded markers partitions.
        lease_ms: Lease, from the queue's rules or the settings.
        max_deliveries: Delivery limit, from the queue's rules or the settings.
        rules: The queue's own rules as text; empty if it has none.
        rules_differing: Settings that differ from the queue's own rules.
        checkpoint: None if no folder was given.
        producers: Producers with an id; None if we may not read them.
        fleets: Tracker fleets to which the queue belongs.
        blocked: Partitions that cannot be read to their end because a transaction has been open for too long, by topic.
    """

    queue: str
    now_ms: int
    cluster: ClusterFacts
    queue_topic: TopicFacts
    markers_topic: TopicFacts
    dead_letter_topic: TopicFacts
    consumers: GroupFacts
    tracker: TrackerFacts
    ready: Backlog = Backlog()
    dead_letters: Backlog = Backlog()
    new_dead_letters: int = 0
    views: Mapping[int, MarkersView] = field(default_factory=dict)
    lease_ms: int = 30_000
    max_deliveries: int = 5
    rules: str = ""
    rules_differing: tuple[str, ...] = ()
    checkpoint: CheckpointFacts | None = None
    producers: ProducersFacts | None = None
    fleets: tuple[FleetFacts, ...] = ()
    blocked: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def topics(self) -> tuple[TopicFacts, TopicFacts, TopicFacts]:
        """The three topics that every queue must have."""
        return (self.queue_topic, self.markers_topic, self.dead_letter_topic)
