"""
What the promises leave room for, counted, and bounded: an allowance without a bound is a hole.

| allowance | bound |
|---|---|
| fetched again | its consumer was killed, torn or away; what it starts in a second each |
| fetched again after a change | another worker came or went: one commit is refused; what it starts in a second |
| acked, renewed, released or started after the decision | the tracker's END comes within I8's bound of the TICK |
| ends of one message | one, and one more for each lease that it had besides, and for each ack behind the decision |
| acked again | the broker was away between START and ACKED, once for each 10 s; or its consumer said so; see `hands` |
| sends without an answer | none while every sender was closed in order |
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from faults.hands import EDGE_MS, TrueTimes, process_of_actor
from faults.waits import Interval

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from faults.hands import Hands
    from faults.waits import Bounds

CHANGES = frozenset({"began", "ended"})
"""Events of workers that change the group."""

CHANGE_MS = 15_000
"""So long after a worker has come or gone the group may change: a session has to end, the others have to join."""

COMMIT_MS = 1_000
"""What a consumer starts within this time it may have left uncommitted."""

REJOIN_MS = 3_000
"""The same for one that was away, or whose broker was: it joins again first, and its session is of two seconds."""

FOREVER_MS = 2**62

WORKER, TRACKER = "WorkerChild", "TrackerChild"
"""Kinds of processes."""


@dataclass(frozen=True, slots=True)
class Process:
    """
    A process of the campaign, and how it ended.

    Attributes:
        kind: `WorkerChild` or `TrackerChild`.
        name: Name of its log.
        exit_code: As a shell gives it; None while it runs.
        is_ended_by_us: Whether it was killed, or armed to end by itself.
        ended_at_ms: Epoch milliseconds; None where that is not known.
        is_hung: Whether it did not end when it was asked to, so that it was killed.
        log: What it wrote.
        python_mib: Largest resident memory that was seen, without a JVM's.
        jvm_mib: That of its JVM.
    """

    kind: str
    name: str
    exit_code: int | None
    is_ended_by_us: bool = False
    ended_at_ms: int | None = None
    is_hung: bool = False
    log: str = ""
    python_mib: int = 0
    jvm_mib: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """
    What a run was besides its topics and events.

    Attributes:
        processes: Workers and trackers.
        injections: How many; None where it is no fault campaign.
        checkpoint_mib: Size of the largest checkpoint.
    """

    processes: Sequence[Process] = field(default_factory=list)
    injections: int | None = None
    checkpoint_mib: int = 0


class Refetches:
    """
    Messages that were fetched again: started, and started again.

    That is right where the consumer that had started one before could not commit its position: it was killed, it was
    torn by an exception, or it or the broker was away, and that between the two STARTs; or another worker has just come
    or gone, or something has just come back, since a commit of an older generation is refused, once. A consumer that
    was asked to end commits before it leaves, so that its own end is no cause. For each cause it is no more than that
    consumer had started within a second: a commit follows each START. One that commits its position with its STARTs in
    a transaction has no cause.

    Attributes:
        found: Message, process and time of the first START, process and time of the next one.
        by_change: How many of them a changed group alone explains, once `faults` was asked.

    Args:
        hands: What consumers wrote.
        run: When processes ended.
        events: What they were called, and what tore them.
        bounds: When something was away, and how patiently a group is judged.
    """

    def __init__(self, hands: Hands, run: Run, events: Sequence[Mapping[str, Any]], bounds: Bounds) -> None:
        """Find them."""
        times = TrueTimes(events)
        names = {str(event["actor"]).rpartition("-")[0]: str(event["actor"]) for event in events if "actor" in event}
        self._causes: defaultdict[str, list[Interval]] = defaultdict(list)
        for process in run.processes:
            if process.is_ended_by_us and process.ended_at_ms is not None and process.name in names:
                ended = Interval(process.ended_at_ms - EDGE_MS, FOREVER_MS)
                self._causes[process_of_actor(names[process.name])].append(ended)
        for event in events:
            if event["event"] == "interrupted" and (at_ms := times.of(event)) is not None:
                self._causes[process_of_actor(str(event["actor"]))].append(Interval(at_ms - EDGE_MS, at_ms + EDGE_MS))
        self._away, self._patience = list(bounds.away), bounds.patience
        # Who comes back has lost its place in the group: it may start messages before it learns so, and joins again.
        self._changes = sorted([*self._changed(run, events, times, names), *((each.end_ms, "") for each in self._away)])
        self._starts = hands.starts()
        self.by_change = 0
        self.found = [
            (message_id, before, again)
            for message_id, starts in self._starts.items()
            for before, again in pairwise(starts)
        ]

    @staticmethod
    def _changed(
        run: Run, events: Sequence[Mapping[str, Any]], times: TrueTimes, names: Mapping[str, str]
    ) -> Iterator[tuple[int, str]]:
        """Yield when a worker came or went, and which."""
        for process in run.processes:
            if process.ended_at_ms is not None and process.kind == WORKER:
                yield process.ended_at_ms, process_of_actor(names.get(process.name, ""))
        for event in events:
            if event["event"] in CHANGES and (at_ms := times.of(event)) is not None:
                yield at_ms, process_of_actor(str(event["actor"]))

    def _most(self, process: str, span_ms: int) -> int:
        """Return the most that a consumer starts within some time, times the patience."""
        written = sorted(at_ms for starts in self._starts.values() for name, at_ms in starts if name == process)
        span_ms = round(span_ms * self._patience)
        return max((at - bisect_left(written, at_ms - span_ms) + 1 for at, at_ms in enumerate(written)), default=0)

    def _change(self, process: str, again_ms: int) -> tuple[int, str] | None:
        """Return when another worker came or went, or something came back, last before an instant; None: long ago."""
        for at_ms, other in reversed(self._changes[: bisect_left(self._changes, (again_ms + 1, ""))]):
            if other != process:
                return (at_ms, other) if at_ms >= again_ms - CHANGE_MS * self._patience else None
        return None

    def faults(self) -> Iterator[str]:
        """Yield what has no cause, and what is too many."""
        lost: Counter[str] = Counter()
        refused: Counter[tuple[str, tuple[int, str]]] = Counter()
        for message_id, (process, before_ms), (_, again_ms) in self.found:
            causes = [*self._causes[process], *self._away]
            if any(begin_ms <= again_ms and end_ms >= before_ms for begin_ms, end_ms in causes):
                lost[process] += 1
                continue
            self.by_change += 1
            change = self._change(process, again_ms)
            if change is None:
                yield f"{message_id} was started by process {process}, and again, and nothing has happened to it"
            else:
                refused[process, change] += 1
        for process, count in lost.items():
            most = self._most(process, COMMIT_MS) * (len(self._causes[process]) + len(self._away))
            if count > most:
                yield f"{count} messages of process {process} were fetched again, at most {most} are allowed"
        for (process, (_, other)), count in refused.items():
            if count > (most := self._most(process, COMMIT_MS if other else REJOIN_MS)):
                yield f"{count} messages of process {process} were fetched again after a change, at most {most} may be"


TRACEBACK = "Traceback (most recent call last)"
FENCED = "has taken over"
SAME_CHECKPOINT = "concurrent"
"""Spark refuses the second query on one checkpoint in these words."""


def bad_endings(run: Run, events: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield processes that ended by themselves, or with an error, or that wrote of one that nothing caught."""
    said = {str(event.get("actor", "")).rpartition("-")[0] for event in events if event["event"] == "ended"}
    trackers = [process for process in run.processes if process.kind == TRACKER]
    for process in run.processes:
        is_worker = process.kind == WORKER
        last = (process.log.strip().splitlines() or [""])[-1]
        # With several of them the older ends with an error, and says why.
        is_fenced = not is_worker and len(trackers) > 1 and (FENCED in last or SAME_CHECKPOINT in process.log.lower())
        if process.exit_code is None or process.is_hung:
            yield f"{process.name} did not end when it was asked to"
        elif process.exit_code and not process.is_ended_by_us and not is_fenced:
            yield f"{process.name} ended with {process.exit_code}: {last}"
        elif is_worker and process.exit_code == 0 and process.name not in said:
            yield f"{process.name} ended with 0 and left its work in the middle"
        if is_worker and TRACEBACK in process.log:
            lines = process.log.splitlines()
            at = next(number for number, line in enumerate(lines) if TRACEBACK in line)
            error = next((line for line in lines[at + 1 :] if line[:1].strip()), "")
            yield f"{process.name} logs an error that nothing caught: {error}"


MOST_MIB = {WORKER: (300, 0), TRACKER: (1_500, 1_800)}
"""Of processes, by kind: without a JVM, and their JVM, which has a heap of 1 GiB."""

MOST_CHECKPOINT_MIB = 100


def too_large(run: Run) -> Iterator[str]:
    """Yield what took more memory or disk than it may."""
    for process in run.processes:
        if process.kind in MOST_MIB:
            python_mib, jvm_mib = MOST_MIB[process.kind]
            if process.python_mib > python_mib or process.jvm_mib > jvm_mib:
                took = f"{process.python_mib} MiB and {process.jvm_mib} MiB in a JVM"
                yield f"{process.name} took {took}, bounds {python_mib} and {jvm_mib}"
    if run.checkpoint_mib > MOST_CHECKPOINT_MIB:
        yield f"a checkpoint has {run.checkpoint_mib} MiB, bound {MOST_CHECKPOINT_MIB}"
