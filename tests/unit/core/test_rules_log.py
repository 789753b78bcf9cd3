"""Which rules of a queue are in force at which marker."""

from __future__ import annotations

import pytest

from kmq_spark.core.policy import QueueRules
from kmq_spark.core.rules_log import BEFORE_ALL, RulesLog

FIRST, SECOND, THIRD = (QueueRules(version) for version in (1, 2, 3))
LOG = RulesLog().changed(10, FIRST).changed(20, SECOND).changed(30, THIRD)


@pytest.mark.parametrize(
    ("marker_offset", "expected"),
    [(0, None), (9, None), (10, FIRST), (19, FIRST), (20, SECOND), (29, SECOND), (30, THIRD), (10**9, THIRD)],
)
def test_rules_are_in_force_from_their_own_marker_on(marker_offset: int, expected: QueueRules | None) -> None:
    assert LOG.at(marker_offset) == expected
    assert (LOG.in_force, RulesLog().in_force, RulesLog().at(5)) == (THIRD, None, None)


def test_same_rules_again_are_no_change() -> None:
    assert LOG.changed(40, QueueRules(3)) is LOG


@pytest.mark.parametrize(
    ("needed_from", "changes"),
    [
        (5, ((10, FIRST), (20, SECOND), (30, THIRD))),
        (10, ((BEFORE_ALL, FIRST), (20, SECOND), (30, THIRD))),
        (19, ((BEFORE_ALL, FIRST), (20, SECOND), (30, THIRD))),
        (20, ((BEFORE_ALL, SECOND), (30, THIRD))),
        (30, ((BEFORE_ALL, THIRD),)),
        (31, ((BEFORE_ALL, THIRD),)),
    ],
)
def test_changes_that_only_older_markers_need_are_left_out(
    needed_from: int, changes: tuple[tuple[int, QueueRules], ...]
) -> None:
    kept = LOG.needed_from(needed_from)
    assert kept.changes == changes
    for marker_offset in (needed_from, needed_from + 1, 40):
        assert kept.at(marker_offset) == LOG.at(marker_offset)


def test_log_that_begins_with_rules_has_them_at_every_marker() -> None:
    begun = RulesLog.beginning_with(FIRST)
    assert (begun.at(0), begun.in_force, begun.needed_from(7)) == (FIRST, FIRST, begun)
    assert RulesLog.beginning_with(None) == RulesLog() == RulesLog().needed_from(7)
