"""
What the promises leave room for, counted, and bounded: an allowance without a bound is a hole.

| allowance | bound |
|---|---|
| fetched again | its consumer has ended, was torn or away, or the group has changed; what it starts in a second each |
| acked, renewed, released or started after the decision | the tracker's END comes within I8's bound of the TICK |
| ends of one message | one, and one more for each lease that it had besides, and for each ack behind the decision |
| acked again | the broker was away between START and ACKED; once for each 10 s of it, see `hands` |
| sends without an answer | none while every sender was closed in order |
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from faults.hands import EDGE_MS, TrueTimes, process_of_actor
from faults.waits import Stretch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from faults.hands import Hands

CHANGES = frozenset({"began", "ended"})
"""Events of workers that change the group."""

CHANGE_MS = 15_000
"""So long after a worker has come or gone the group may change: a session has to end, the others have to join."""

COMMIT_MS = 1_000
"""What a consumer starts within this time it may have left uncommitted."""

FOREVER_MS = 2**62


@dataclass(frozen=True, slots=True)
class Process:
    """
    A process of the campaign, and how it ended.

    Attributes:
        kind: `WorkerChild` or `TrackerChild`.
        name: Of its log.
        exit_code: As a shell gives it; None while it runs.
        is_ended_by_us: Whether it was killed, or armed to end by itself.
        ended_at_ms: Epoch milliseconds; None where that is not known.
        is_hung: Whether it did not end when it was asked to, so that it was killed.
        log: What it wrote.
    """

    kind: str
    name: str
    exit_code: int | None
    is_ended_by_us: bool = False
    ended_at_ms: int | None = None
    is_hung: bool = False
    log: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """
    What a run was besides its topics and events.

    Attributes:
        processes: Workers and trackers.
        injections: How many; None where it is no fault campaign.
    """

    processes: Sequence[Process] = field(default_factory=list)
    injections: int | None = None


class Refetches:
    """
    Messages that were fetched again: started, and started again.

    That is right where the consumer that had started one before could not commit its position: it has ended, it was
    torn by an exception, or it or the broker was away, and that between the two STARTs; or the group has just changed,
    since a commit of an older generation is refused. For each such cause it is no more than that consumer had started
    within a second: a commit follows each START.

    Attributes:
        found: Message, process and time of the first START, process and time of the next one.
        by_change: How many of them a changed group alone explains, once `faults` was asked.

    Args:
        hands: What consumers wrote.
        run: When processes ended.
        events: What they were called, and what tore them.
        away: Stretches on which something was away.
    """

    def __init__(self, hands: Hands, run: Run, events: Sequence[Mapping[str, Any]], away: Sequence[Stretch]) -> None:
        """Find them."""
        times = TrueTimes(events)
        names = {str(event["actor"]).rpartition("-")[0]: str(event["actor"]) for event in events if "actor" in event}
        self._causes: defaultdict[str, list[Stretch]] = defaultdict(list)
        for process in run.processes:
            if process.ended_at_ms is not None and process.name in names:
                ended = Stretch(process.ended_at_ms - EDGE_MS, FOREVER_MS)
                self._causes[process_of_actor(names[process.name])].append(ended)
        for event in events:
            if event["event"] == "interrupted" and (at_ms := times.of(event)) is not None:
                self._causes[process_of_actor(str(event["actor"]))].append(Stretch(at_ms - EDGE_MS, at_ms + EDGE_MS))
        self._away = list(away)
        changed = [process.ended_at_ms for process in run.processes if process.ended_at_ms is not None]
        changed += [at_ms for event in events if event["event"] in CHANGES and (at_ms := times.of(event)) is not None]
        self._changes = sorted(changed)
        self._starts = hands.starts()
        self.by_change = 0
        self.found = [
            (message_id, before, again)
            for message_id, starts in self._starts.items()
            for before, again in pairwise(starts)
        ]

    def at_most(self, process: str) -> int:
        """Return how many messages of a consumer may be fetched again."""
        written = sorted(at_ms for starts in self._starts.values() for name, at_ms in starts if name == process)
        most = max((at - bisect_left(written, at_ms - COMMIT_MS) + 1 for at, at_ms in enumerate(written)), default=0)
        return most * (len(self._causes[process]) + len(self._away) + len(self._changes))

    def faults(self) -> Iterator[str]:
        """Yield what has no cause, and what is too many."""
        lost: Counter[str] = Counter()
        for message_id, (process, before_ms), (_, again_ms) in self.found:
            lost[process] += 1
            causes = [*self._causes[process], *self._away]
            if any(begin_ms <= again_ms and end_ms >= before_ms for begin_ms, end_ms in causes):
                continue
            self.by_change += 1
            first = bisect_left(self._changes, again_ms - CHANGE_MS)
            if first == len(self._changes) or self._changes[first] > again_ms:
                yield f"{message_id} was started by process {process}, and again, and nothing has happened to it"
        for process, count in lost.items():
            if count > (most := self.at_most(process)):
                yield f"{count} messages of process {process} were fetched again, at most {most} are allowed"


TRACEBACK = "Traceback (most recent call last)"
FENCED = "has taken over"
SAME_CHECKPOINT = "concurrent"
"""Spark refuses the second query on one checkpoint in these words."""


def bad_endings(run: Run, events: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield processes that ended by themselves, or with an error, or that wrote of one that nothing caught."""
    said = {str(event.get("actor", "")).rpartition("-")[0] for event in events if event["event"] == "ended"}
    trackers = [process for process in run.processes if process.kind == "TrackerChild"]
    for process in run.processes:
        is_worker = process.kind == "WorkerChild"
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
