"""
What can be observed of a queue from outside. The inspector fills it in; `doctor`, `top`, `status` and metrics judge it.

Rule 1: Values only. Instants are epoch milliseconds on the broker's clock.
Rule 2: None, or an empty mapping, means that this client may not read the fact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

HEARTBEAT_LATE_MS = 15_000
"""
A tracker whose newest heartbeat is older does not run: three heartbeats are missing. The heartbeat has the clock of the
tracker's host, so the bound allows clocks that differ by seconds.
"""

RESTART_MS = 60_000
"""As long for one that starts its query again: it pauses up to half a minute, and commits once a start."""

COUNTER_NAMES = ("started", "acked", "rejected", "redelivered", "dead_lettered", "expired")


class Life(StrEnum):
    """State of the tracker according to its heartbeat; the values are those of `kmq tracker status -o json`."""

    NEVER = "never"
    UNKNOWN = "unknown"
    """It has committed, but without a heartbeat."""
    RUNNING = "running"
    FAILING = "failing"
    """It starts its query again and again."""
    STOPPED = "stopped"
    LOST = "gone"
    """The heartbeats have ended without a stop flag."""


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """
    One topic; without partitions if it does not exist.

    `replicas` are those of the first partition, `first` is the first offset and `end` the last stable offset by
    partition.
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
    """A consumer group: assigned partitions by client id, and committed positions by partition of the queue."""

    name: str
    state: str = ""
    members: Mapping[str, frozenset[int]] = field(default_factory=dict)
    positions: Mapping[int, int] = field(default_factory=dict)


class LogicalFacts(NamedTuple):
    """A logical queue: the number of its ready messages, and its consumer group; None if it has no consumer group."""

    ready: int
    group: GroupFacts | None


@dataclass(frozen=True, slots=True)
class Backlog:
    """
    Records of a topic past a position: their number by partition, and the append time of the oldest one.

    It is not exact if a count includes control records of transactions, because it is large.
    """

    counts: Mapping[int, int] = field(default_factory=dict)
    is_exact: bool = True
    oldest_at_ms: int | None = None

    @property
    def count(self) -> int:
        """Number of records."""
        return sum(self.counts.values())


@dataclass(frozen=True, slots=True)
class TrackerFacts:
    """
    The tracker, as observed from its group and the log; by markers partition, as of its last commit.

    Attributes:
        positions: First marker not folded.
        last_committers: Id of the tracker that committed last.
        heartbeat_at_ms: Time of the last commit, clock of the tracker's host; None if there is no heartbeat.
        snapshot_lag: Number of batches since the last snapshot of its state was uploaded.
        trouble: Why its query was started again; empty after a batch that succeeded.
    """

    positions: Mapping[int, int] = field(default_factory=dict)
    needed: Mapping[int, int] = field(default_factory=dict)
    last_committers: Mapping[int, str] = field(default_factory=dict)
    unread: Backlog = Backlog()
    heartbeat_at_ms: int | None = None
    is_stopped: bool = False
    snapshot_lag: int = 0
    trouble: str = ""

    def life(self, now_ms: int) -> Life:
        """Return whether a tracker runs; *now_ms* is of this machine's clock."""
        if not self.positions:
            return Life.NEVER
        if self.heartbeat_at_ms is None:
            return Life.UNKNOWN
        if self.is_stopped:
            return Life.STOPPED
        if now_ms - self.heartbeat_at_ms > (RESTART_MS if self.trouble else HEARTBEAT_LATE_MS):
            return Life.LOST
        return Life.FAILING if self.trouble else Life.RUNNING


class Holder(NamedTuple):
    """A consumer with messages whose lease runs: how many, and since when it has held the oldest."""

    message_count: int
    since_ms: int


@dataclass(frozen=True, slots=True)
class PartitionView:
    """
    One markers partition, folded to its present end.

    Attributes:
        oldest_at_ms: Start of the message that is held longest; None if there is none.
        deadlines_ms: Deadline of each run in flight; a rejected message, which waits for the tracker, has none.
        acked_at_ms: Append time of the newest END without a copy: acknowledged, rejected or expired; 0 before.
        ticked_at_ms: Append time of the newest TICK; 0 before.
        counted: Counters of the fold by name, since the view began.
    """

    in_flight: int
    deferred: int
    oldest_at_ms: int | None
    deadlines_ms: NDArray[np.int64]
    run_counts: NDArray[np.int64]
    holders: Mapping[str, Holder]
    acked_at_ms: int
    newest_at_ms: int
    ticked_at_ms: int
    counted: Mapping[str, int]
    unreadable: int
    unreadable_at: tuple[int, ...]

    def overdue(self, before_ms: int) -> int:
        """Return the number of messages whose deadline is before an instant."""
        return int(self.run_counts[self.deadlines_ms < before_ms].sum())

    def due_without_tick_since_ms(self) -> int | None:
        """Return the earliest deadline that has passed without a later TICK; None if there is none."""
        without_tick = self.deadlines_ms[self.deadlines_ms >= self.ticked_at_ms]
        return int(without_tick.min()) if len(without_tick) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """
    A queue at one moment of this machine's clock. Everything that is said of a queue is judged from this.

    All figures come from the log, never from counters of a process: these drift when another process finishes the work.
    `partitions` is empty where the markers were not folded. `ready` has the messages of all logical queues, `logical`
    those of each but the default one.
    """

    queue: str
    now_ms: int
    queue_topic: TopicFacts
    markers_topic: TopicFacts
    dead_letter_topic: TopicFacts
    consumers: GroupFacts
    tracker: TrackerFacts
    ready: Backlog = Backlog()
    logical: Mapping[str, LogicalFacts] = field(default_factory=dict)
    dead_letters: Backlog = Backlog()
    partitions: Mapping[int, PartitionView] = field(default_factory=dict)

    @property
    def exists(self) -> bool:
        """Whether the queue topic and the markers topic exist."""
        return bool(self.queue_topic.partition_count and self.markers_topic.partition_count)

    @property
    def default_ready(self) -> int:
        """Number of ready messages of the default logical queue."""
        return self.ready.count - sum(each.ready for each in self.logical.values())

    @property
    def groups(self) -> dict[str, GroupFacts]:
        """The consumer groups by logical queue; the default one has the empty name."""
        logical = {name: each.group for name, each in self.logical.items() if each.group is not None}
        return {"": self.consumers, **logical}

    @property
    def in_flight(self) -> int:
        """Number of messages that a consumer holds."""
        return sum(each.in_flight for each in self.partitions.values())

    @property
    def deferred(self) -> int:
        """Number of messages that wait until they are due."""
        return sum(each.deferred for each in self.partitions.values())

    @property
    def oldest_in_flight_at_ms(self) -> int | None:
        """Start of the message that is held longest; None if there is none."""
        starts = (each.oldest_at_ms for each in self.partitions.values())
        return min((at_ms for at_ms in starts if at_ms is not None), default=None)

    @property
    def counted(self) -> dict[str, int]:
        """Counters of the fold by name, since the view began."""
        return {name: sum(each.counted[name] for each in self.partitions.values()) for name in COUNTER_NAMES}

    @property
    def life(self) -> Life:
        """Whether the tracker runs."""
        return self.tracker.life(self.now_ms)

    @property
    def tracker_late_ms(self) -> int:
        """Age of the oldest marker that the tracker has not read; 0 if it has read all."""
        oldest_at_ms = self.tracker.unread.oldest_at_ms
        return 0 if oldest_at_ms is None else max(0, self.now_ms - oldest_at_ms)

    def overdue(self, for_ms: int = 0) -> int:
        """Return the number of messages that have been past their deadline for longer than this."""
        return sum(each.overdue(self.now_ms - for_ms) for each in self.partitions.values())

    def figures(self) -> dict[str, Any]:
        """Return the key figures as values for JSON."""
        return {
            "queue": self.queue,
            "at_ms": self.now_ms,
            "ready": self.ready.count,
            "is_ready_exact": self.ready.is_exact,
            "ready_of_logical_queues": {name: each.ready for name, each in sorted(self.logical.items())},
            "oldest_ready_at_ms": self.ready.oldest_at_ms,
            "oldest_ready_age_ms": self._age(self.ready.oldest_at_ms),
            "in_flight": self.in_flight,
            "deferred": self.deferred,
            "oldest_in_flight_at_ms": self.oldest_in_flight_at_ms,
            "oldest_in_flight_age_ms": self._age(self.oldest_in_flight_at_ms),
            "overdue": self.overdue(),
            "dead_letters": self.dead_letters.count,
            "tracker": self.life.value,
            "tracker_lag": self.tracker.unread.count if self.tracker.positions else self.markers_topic.size,
            "counted": self.counted,
        }

    def holders(self) -> dict[str, Holder]:
        """Return the consumers with messages whose lease runs, over all partitions."""
        found: dict[str, Holder] = {}
        for partition in self.partitions.values():
            for name, (count, since_ms) in partition.holders.items():
                before = found.get(name, Holder(0, since_ms))
                found[name] = Holder(before.message_count + count, min(before.since_ms, since_ms))
        return found

    def _age(self, at_ms: int | None) -> int | None:
        return None if at_ms is None else max(0, self.now_ms - at_ms)


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """The brokers; the longest transaction that they accept is 0 if unknown."""

    address: str
    broker_count: int
    transaction_max_timeout_ms: int = 0


@dataclass(frozen=True, slots=True)
class ProducersFacts:
    """
    The producers of a queue that have an id: their number, and the ids whose position record cannot be read.

    `open_for_ms` is how long, at least, a transaction has been open in the topic of the positions; 0 for none.
    """

    topic: TopicFacts
    ids: int = 0
    unreadable: tuple[str, ...] = ()
    open_for_ms: int = 0


@dataclass(frozen=True, slots=True)
class FleetFacts:
    """
    A tracker fleet to which the queue belongs: the member that holds the queue, the one to which it is assigned.

    `processes` counts the members that are not stale. The state is incomplete if retention removed what it depends on.
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
class DoctorFacts:
    """
    A queue, and what only `kmq doctor` looks at.

    Attributes:
        taking_nothing: Consumers that started nothing in a minute, although a message was ready, by logical queue.
        new_dead_letters: Dead letters of the last hour, control records included.
        producers: Producers with an id; None if we may not read them.
        blocked: Partitions that cannot be read to their end because a transaction has been open for too long, by topic.
    """

    view: QueueView
    cluster: ClusterFacts
    rules: str = ""
    lease_ms: int = 30_000
    max_deliveries: int = 5
    taking_nothing: Mapping[str, frozenset[str]] = field(default_factory=dict)
    new_dead_letters: int = 0
    producers: ProducersFacts | None = None
    fleets: tuple[FleetFacts, ...] = ()
    blocked: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
