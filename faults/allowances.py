"""
What the promises leave room for, counted, and bounded: an allowance without a bound is a hole.

| allowance | bound |
|---|---|
| fetched again | only after something happened to a consumer or the broker; each time what is started at once |
| acked, renewed, released or started after the decision | the tracker's END comes within I8's bound of the TICK |
| ends of one message | one, and one more for each lease that it had besides, and for each ack behind the decision |
| sends without an answer | none while every sender was closed in order |
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from faults.hands import Hands, TrueTimes
    from faults.waits import Stretch

BEFORE_MS = 15_000
"""So long before a START that fetches a message again something may have happened: session time-outs, rebalances."""

OF_CONSUMERS = frozenset({"began", "ended", "injected", "interrupted"})
"""Events of what happens to a group."""


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


def disturbances_ms(
    run: Run, events: Sequence[Mapping[str, Any]], times: TrueTimes, away: Sequence[Stretch]
) -> list[int]:
    """Return when something happened to consumers, to the broker or to a group, epoch milliseconds, in order."""
    found = [process.ended_at_ms for process in run.processes if process.ended_at_ms is not None]
    found += [at_ms for event in events if event["event"] in OF_CONSUMERS and (at_ms := times.of(event)) is not None]
    # All of a long absence: its end is what matters, and its begin.
    found += [edge for stretch in away for edge in stretch]
    return sorted(found)


def fetched_again(hands: Hands, disturbed_ms: Sequence[int]) -> Iterator[str]:
    """Yield messages that were fetched again without anything that happened, or too many of them."""
    repeated = hands.repeated_starts()
    for one in repeated:
        first = bisect_left(disturbed_ms, one.at_ms - BEFORE_MS)
        if first == bisect_right(disturbed_ms, one.at_ms):
            yield f"marker {one.marker_offset} of partition {one.partition} starts again what was started, for no cause"
    bound = len(disturbed_ms) * hands.most_started
    if len(repeated) > bound:
        yield f"{len(repeated)} messages were fetched again, at most {bound} for {len(disturbed_ms)} causes"


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
