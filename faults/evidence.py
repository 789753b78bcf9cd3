"""What a verdict is made from, and what it is: values alone."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from faults.topics import Dump
from faults.waits import Bounds, Wait
from kmq_spark.core.policy import DEFAULT_RULES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from kmq_spark.core.policy import QueueRules

WORKER, TRACKER = "worker", "tracker"
"""Kinds of processes."""

INJECTOR = "injector"


class Violation(NamedTuple):
    """A promise that was not kept."""

    invariant: str
    what: str


@dataclass(slots=True)
class Verdict:
    """What the checker found: waits of redelivered messages, and of those that ended, and what the promises allow."""

    violations: list[Violation] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    other_waits: list[Wait] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, invariant: str, what: str) -> None:
        """Note a violation."""
        self.violations.append(Violation(invariant, what))

    def add_all(self, violations: Iterable[Violation]) -> None:
        """Note violations."""
        self.violations += violations


class Reported(NamedTuple):
    """What the last tracker said of a markers partition as it ended; its state began at marker `begins_at`."""

    begins_at: int
    next_marker_offset: int
    in_flight: int
    counters: Mapping[str, int]


class Process(NamedTuple):
    """A process, how it ended, and when it was resumed; the largest memory seen, without a JVM's and of its JVM."""

    kind: str
    name: str
    exit_code: int | None
    is_ended_by_us: bool = False
    is_hung: bool = False
    log: str = ""
    python_mib: int = 0
    jvm_mib: int = 0
    woke_ms: Sequence[int] = ()


@dataclass(slots=True)
class Evidence:
    """
    What a verdict on a queue is made from.

    Attributes:
        trackers: Ids of the trackers that took over.
        rules: In force before the first RULES marker.
        injections: None where nothing needs to be injected.
        reported: By markers partition; empty where the last tracker was killed.
        ended: Names of the workers that have come to the end of their loop.
    """

    dump: Dump
    events: Sequence[Mapping[str, Any]]
    trackers: Collection[str] = ()
    rules: QueueRules = DEFAULT_RULES
    bounds: Bounds = field(default_factory=Bounds)
    processes: Sequence[Process] = ()
    injections: int | None = None
    reported: Mapping[int, Reported] = field(default_factory=dict)
    is_drained: bool = True
    checkpoint_mib: int = 0

    ended: set[str] = field(init=False)
    _clock: list[tuple[float, float]] = field(init=False)

    def __post_init__(self) -> None:
        self.ended = {str(event.get("actor", "")) for event in self.events if event["event"] == "ended"}
        clocks = [one for one in self.events if one.get("actor") == INJECTOR]
        # Where the machine's wall clock was set, from the last look before that on.
        self._clock = [(one["since"], one["ahead"]) for one in clocks if one["event"] == "clock set"]
        self._clock.insert(0, (0.0, clocks[0]["wall"] - clocks[0]["monotonic"] if clocks else 0.0))

    def true_ms(self, event: Mapping[str, Any]) -> int:
        """
        Return when an event was, epoch ms, on the wall clock of the machine, which the broker has too.

        Processes share the monotonic clock; the wall clock of a worker may be false, the injector's is the machine's.
        """
        monotonic_s = float(event["monotonic"])
        ahead_s = self._clock[bisect_right(self._clock, (monotonic_s, float("inf"))) - 1][1]
        return round(1000 * (monotonic_s + ahead_s))
