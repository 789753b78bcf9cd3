"""
A queue in a few numbers: what `kmq top`, `kmq queue list` and the metrics show.

Rule 1: from the log alone, never from what a process has counted: those numbers drift when another finishes the work.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kmq_spark.inspection.facts import Backlog
    from kmq_spark.inspection.view import MarkersView

COUNTED = ("started", "acked", "rejected", "redelivered", "dead_lettered", "expired")


@dataclass(frozen=True, slots=True)
class Figures:
    """
    One queue at one moment.

    Attributes:
        queue: Name.
        at_ms: When, epoch milliseconds.
        ready: Messages that no consumer has started.
        is_ready_exact: False where control records of transactions may be among them.
        oldest_ready_at_ms: Append time of the oldest of them, None for none.
        in_flight: Messages that a consumer holds.
        deferred: Messages that wait for their time.
        oldest_in_flight_at_ms: When the message that is held longest was started, None for none.
        overdue: Messages past their deadline.
        dead_letters: Not redriven or purged.
        tracker_lag: Markers that the tracker has not read.
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
        """Return the figures as JSON can hold them, ages in milliseconds beside the instants."""
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
    Put the figures together.

    Args:
        queue: Name.
        at_ms: Now, epoch milliseconds; what is past its deadline depends on it.
        views: Markers partitions, folded.
        ready: Messages past the consumers' positions.
        dead_letters: Not redriven or purged.
        tracker_lag: Markers past the tracker's positions.
    """
    in_flight = deferred = overdue = 0
    oldest_at_ms: int | None = None
    counted = dict.fromkeys(COUNTED, 0)
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
        for name in COUNTED:
            counted[name] += counters[name]
    return Figures(
        queue, at_ms, ready.count, ready.is_exact, ready.oldest_at_ms, in_flight, deferred, oldest_at_ms, overdue,
        dead_letters.count, tracker_lag, counted,
    )  # fmt: skip
