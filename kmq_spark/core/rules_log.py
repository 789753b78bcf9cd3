"""
Track which rules of the queue are in force at each marker of one markers partition.

Rule 1: a RULES marker changes the rules from its own offset on. A replay therefore applies the same rules to the same
markers.
Rule 2: only these are kept: the rules in force at the oldest marker still needed, and later changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kmq_spark.core.policy import QueueRules

BEFORE_ALL = -1
"""Used as a marker offset: the rules were in force before the oldest marker that is needed."""


@dataclass(frozen=True, slots=True)
class RulesLog:
    """
    The rule changes of one markers partition.

    Attributes:
        changes: Marker offset and rules of each change, ascending; empty if the queue has no rules of its own.
    """

    changes: tuple[tuple[int, QueueRules], ...] = ()

    @classmethod
    def beginning_with(cls, rules: QueueRules | None) -> RulesLog:
        """Return a log in which these rules are in force from the beginning."""
        return cls(() if rules is None else ((BEFORE_ALL, rules),))

    @property
    def in_force(self) -> QueueRules | None:
        """The newest rules; None if the queue has no rules of its own."""
        return self.changes[-1][1] if self.changes else None

    def at(self, marker_offset: int) -> QueueRules | None:
        """Return the rules in force at a marker; None if the queue had no rules of its own there."""
        found = None
        for changed_at, rules in self.changes:
            if changed_at > marker_offset:
                break
            found = rules
        return found

    def changed(self, marker_offset: int, rules: QueueRules) -> RulesLog:
        """Return the log with one more change; the log itself if the rules are already in force."""
        if rules == self.in_force:
            return self
        return RulesLog((*self.changes, (marker_offset, rules)))

    def needed_from(self, marker_offset: int) -> RulesLog:
        """Return the log without changes that only older markers need."""
        if not self.changes or (len(self.changes) == 1 and self.changes[0][0] == BEFORE_ALL):
            return self
        before = RulesLog.beginning_with(self.at(marker_offset)).changes
        return RulesLog((*before, *(change for change in self.changes if change[0] > marker_offset)))
