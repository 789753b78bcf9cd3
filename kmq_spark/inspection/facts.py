"""
What can be known of a queue from outside: values that the inspector fills in and the checks read.

Rule 1: values only; instants are epoch milliseconds on the broker's clock.
Rule 2: None, or an empty mapping, means: we may not read it.
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
        address: What was asked for.
        broker_count: Brokers known.
        release: What they speak, in words; empty where they did not say.
        can_transact: Whether they know KIP-447, which the tracker needs; None where they did not say.
        offsets_retention_ms: After how long without members a group's offsets expire; None where we may not know.
    """

    address: str
    broker_count: int
    release: str = ""
    can_transact: bool | None = None
    offsets_retention_ms: int | None = None


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """
    One topic.

    Attributes:
        name: Its name.
        partition_count: 0 where it does not exist.
        settings: Its settings, empty where we may not read them.
        replicas: Copies of its first partition.
        leaderless: Partitions without a leader.
        under_replicated: Partitions with fewer copies in sync than there should be.
        first: First offset by partition.
        end: End by partition, what is committed alone.
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
        """Offsets between first and end: records, and the control records of transactions."""
        return sum(end - self.first.get(partition, 0) for partition, end in self.end.items())


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """
    The consumers' group.

    Attributes:
        name: Its name.
        state: As the coordinator calls it; empty where we may not know.
        members: Client ids, with the number of partitions each has.
        positions: Committed position by queue partition.
    """

    name: str
    state: str = ""
    members: Mapping[str, int] = field(default_factory=dict)
    positions: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrackerFacts:
    """
    The tracker, as its group and the log show it.

    Attributes:
        group: Its group.
        positions: First marker not folded, by markers partition.
        needed: First marker needed for a rebuild, by markers partition.
        signers: Who committed last, by markers partition.
        unread: Markers, and control records, above the position, over all partitions.
        unread_since_ms: Append time of the oldest marker that it has not read; None where it has read all.
        heartbeat_at_ms: When it last committed, clock of its host; None where it left no heartbeat.
        is_stopped: Whether it was asked to stop.
        snapshot_lag: Batches since the last snapshot of its state was uploaded.
        keeps_offsets: Whether it restores expired offsets of the consumers' groups; False where it has not the rights
            to, None where its version does not.
    """

    group: str
    positions: Mapping[int, int] = field(default_factory=dict)
    needed: Mapping[int, int] = field(default_factory=dict)
    signers: Mapping[int, str] = field(default_factory=dict)
    unread: int = 0
    unread_since_ms: int | None = None
    heartbeat_at_ms: int | None = None
    is_stopped: bool = False
    snapshot_lag: int = 0
    keeps_offsets: bool | None = None


@dataclass(frozen=True, slots=True)
class Backlog:
    """
    Records of a topic past some position.

    Attributes:
        count: How many.
        is_exact: False where they were not counted one by one: control records of transactions are among them.
        oldest_at_ms: Append time of the oldest, None where there is none or it was not looked for.
    """

    count: int = 0
    is_exact: bool = True
    oldest_at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """
    The tracker's checkpoint folder.

    Attributes:
        path: Where it should be.
        problem: Why it cannot be used; empty where nothing is wrong.
        is_local: Whether it could be looked at from here.
        last_batch_at_ms: When the last batch was finished, None where none was.
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
        unused: Ids that have not committed for `producer_retention_ms`.
        unreadable: Ids whose position record cannot be read.
        open_for_ms: For how long, at least, a transaction has been open in the topic of the positions; 0 for none.
    """

    topic: TopicFacts
    ids: int = 0
    unused: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    open_for_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFacts:
    """
    Everything that `kmq doctor` looks at.

    Attributes:
        queue: Name, `queue@group` for a group's.
        now_ms: When it was looked at.
        cluster: Brokers.
        queue_topic: Messages.
        markers_topic: Markers.
        dead_letter_topic: Dead letters.
        consumers: Consumers' group.
        tracker: Tracker.
        ready: Messages not started.
        dead_letters: Dead letters not redriven or purged.
        new_dead_letters: Those of the last hour, control records among them.
        views: Markers partitions, folded.
        lease_ms: Lease of the queue, as its rules or the settings say.
        max_deliveries: Limit of the queue, likewise.
        max_in_flight: Messages in flight in a markers partition beyond which consumers fetch nothing, likewise.
        rules: The queue's own rules in words; empty where it has none.
        rules_differing: Settings that say otherwise than the queue's own rules.
        checkpoint: None where nobody named a folder.
        producers: Producers with an id; None where we may not read them.
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
    max_in_flight: int = 1_000_000
    rules: str = ""
    rules_differing: tuple[str, ...] = ()
    checkpoint: CheckpointFacts | None = None
    producers: ProducersFacts | None = None

    @property
    def topics(self) -> tuple[TopicFacts, TopicFacts, TopicFacts]:
        """The three topics that a queue cannot be without."""
        return (self.queue_topic, self.markers_topic, self.dead_letter_topic)
