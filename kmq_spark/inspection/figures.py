"""
The key figures of a queue, for `kmq top`, `kmq queue list` and the metrics.

Rule 1: All figures come from the log, never from counters of a process: these drift when another process finishes the
work.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kmq_spark.inspection.facts import Backlog
    from kmq_spark.inspection.view import MarkersView

COUNTER_NAMES = ("started", "acked", "rejected", "redelivered", "dead_lettered", "expired")


@dataclass(frozen=True, slots=True)
class Figures:
    """
    One queue at one moment.

    Attributes:
        queue: Name of the queue.
        at_ms: Time of the figures, epoch milliseconds.
        ready: Number of messages that no consumer has started.
        is_ready_exact: False if `ready` may include control records of transactions.
        oldest_ready_at_ms: Append time of the oldest ready message; None if there is none.
        in_flight: Number of messages that a consumer holds.
        deferred: Number of messages that wait until they are due.
        oldest_in_flight_at_ms: Start of the message that is held longest; None if there is none.
        overdue: Number of messages past their deadline.
        dead_letters: Number of dead letters that were neither redriven nor purged.
        tracker_lag: Number of markers that the tracker has not read.
        counted: Counters of the fold by name, since the view began.
    """

    queue: str
    at_ms: int
    ready: int
    is_ready_exact: bool
    oldest_ready_at_ms: int | None
    in_flight: int
    deferred: int
    oldest_in_flight_at_ms: int | None
    overdue: int
    dead_letters: int
    tracker_lag: int
    counted: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as values for JSON, with the age in milliseconds of each oldest message."""
        return {
            **asdict(self),
            "oldest_ready_age_ms": self._age(self.oldest_ready_at_ms),
            "oldest_in_flight_age_ms": self._age(self.oldest_in_flight_at_ms),
        }

    def _age(self, at_ms: int | None) -> int | None:
        return None if at_ms is None else max(0, self.at_ms - at_ms)


def figures(
    queue: str,
    at_ms: int,
    views: Iterable[MarkersView],
    *,
    ready: Backlog,
    dead_letters: Backlog,
    tracker_lag: int,
) -> Figures:
    """
    Compute the figures of a queue.

    Args:
        queue: Name of the queue.
        at_ms: Present time, epoch milliseconds; decides which messages are overdue.
        views: Folded markers partitions.
        ready: Messages past the consumers' positions.
        dead_letters: Dead letters that were neither redriven nor purged.
        tracker_lag: Number of markers past the tracker's positions.
    """
    in_flight = deferred = overdue = 0
    oldest_at_ms: int | None = None
    counted = dict.fromkeys(COUNTER_NAMES, 0)
    for view in views:
        for start, count, _ in view.by_start():
            if start is not None and start.is_deferral:
                deferred += count
                continue
            in_flight += count
            if start is not None and (oldest_at_ms is None or start.at_ms < oldest_at_ms):
                oldest_at_ms = start.at_ms
        overdue += view.overdue(at_ms)
        counters = view.state.counters.to_dict()
        for name in COUNTER_NAMES:
            counted[name] += counters[name]
    return Figures(
        queue, at_ms, ready.count, ready.is_exact, ready.oldest_at_ms, in_flight, deferred, oldest_at_ms, overdue,
        dead_letters.count, tracker_lag, counted,
    )  # fmt: skip
