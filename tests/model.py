"""The campaign's oracle in the terms of the fold: decisions and a status, which property tests compare."""

from __future__ import annotations

from typing import TYPE_CHECKING

from faults.oracle import Oracle
from kmq_spark.core.decisions import Decision
from kmq_spark.core.policy import DEFAULT_RULES, DecisionAction, QueueRules
from kmq_spark.core.state import Counters, Status

if TYPE_CHECKING:
    from collections.abc import Iterable

    from faults.oracle import Decided
    from kmq_spark.core.events import LoggedMarker


class ModelTracker(Oracle):
    """A model of the tracker for one markers partition; *rules* are in force before the first marker."""

    def __init__(self, rules: QueueRules | None = None) -> None:
        super().__init__(rules or DEFAULT_RULES)
        # Rules, and how far the broker's clock is behind, by the marker from which on they are so.
        self._history: list[tuple[int, QueueRules | None, int]] = [(-1, rules, 0)]

    def fold(self, markers: Iterable[LoggedMarker]) -> tuple[list[Decision], Status]:
        """Fold a batch, in any order; return the decisions of its newest term and the status behind it."""
        found: list[Decision] = []
        for logged in sorted(markers, key=lambda each: each.marker_offset):
            is_new = logged.marker_offset >= self.next_offset
            term = self.term
            found += map(_decision, self.take(logged))
            if self.term != term:
                found = []
            if is_new:
                changed = logged.marker is not None and logged.marker.rules is not None
                rules = self.rules if changed else self._history[-1][1]
                self._history.append((logged.marker_offset, rules, self.behind_ms))
        return found, self.status()

    def status(self) -> Status:
        """Return the status of the partition."""
        leases = self.in_flight.values()
        needed = min((lease.start for lease in leases), default=self.next_offset)
        earliest_ms = min((lease.deadline_ms for _, lease in self.unmarked()), default=None)
        if earliest_ms is not None and earliest_ms != -1:
            earliest_ms -= self.behind_ms
        _, needed_rules, needed_ahead_ms = [each for each in self._history if each[0] <= needed][-1]
        return Status(
            next_marker_offset=self.next_offset,
            clock_ms=self.clock_ms,
            in_flight=len(leases),
            needed_marker_offset=needed,
            next_deadline_at_ms=earliest_ms,
            counters={name: self.counts[name] for name in Counters().to_dict()},
            rules=self._history[-1][1],
            needed_rules=needed_rules,
            behind_ms=self.behind_ms,
            marked=len(self.marked),
            needed_ahead_ms=needed_ahead_ms,
            term=self.term,
            term_by=self.term_by,
        )


def _decision(decided: Decided) -> Decision:
    lease = decided.lease
    return Decision(
        *decided.message,
        lease.count,
        DecisionAction.DEAD_LETTER if decided.is_dead else DecisionAction.REDELIVER,
        decided.deadline_ms,
        decided.tick,
        decided.tick_ms,
        lease.start,
        decided.reason,
        lease.is_silent,
    )
