"""The short form of `make faults`: each kind of fault once, the same checker."""

from __future__ import annotations

from functools import partial, update_wrapper
from typing import TYPE_CHECKING

import pytest

from faults import on_consumers, on_markers, on_trackers
from faults.run import run_scenario

if TYPE_CHECKING:
    from collections.abc import Callable

    from faults.campaign import Campaign
    from faults.stage import Stage

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.kafka, pytest.mark.timeout(240)]

MOST_TELLING = ("tracker.before-commit", "tracker.committed")
"""Nothing is committed; all is, and nobody knows."""


def run(campaign: Campaign, scenario: Callable[[Campaign], Stage | None], injections: int) -> None:
    """Run a scenario, and look that it injected and that nothing was violated."""
    result = run_scenario("", scenario, campaign)
    assert result.violations == []
    assert result.injections >= injections, result.notes


def test_consumer_killed_at_every_step(campaign: Campaign) -> None:
    """Whatever a consumer was doing: its messages come again once, after their lease."""
    run(campaign, on_consumers.killed, len(on_consumers.CONSUMER_POINTS))


def test_tracker_killed_around_its_commit(campaign: Campaign) -> None:
    """Before the commit nothing is sent, after it nothing is sent again."""
    scenario = partial(on_trackers.killed, points=MOST_TELLING)
    run(campaign, update_wrapper(scenario, on_trackers.killed), len(MOST_TELLING) + 1)


def test_newer_tracker_fences_the_older_one(campaign: Campaign) -> None:
    """Two trackers, different checkpoints: the older ends, says why, and nothing is sent twice."""
    run(campaign, on_trackers.two_at_once, 1)


def test_markers_twice_late_and_out_of_order(campaign: Campaign) -> None:
    """Every order of markers is folded as the model folds it."""
    run(campaign, on_markers.disordered, 5)


def test_records_that_are_no_markers(campaign: Campaign) -> None:
    """Each is set aside, none stops the tracker."""
    run(campaign, on_markers.corrupted, len(on_markers.NOT_MARKERS))
