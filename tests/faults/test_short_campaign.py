"""The short form of `make faults`: each kind of fault once, the same checker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from faults import (
    on_brokers,
    on_consumers,
    on_ledgers,
    on_markers,
    on_networks,
    on_topics,
    on_trackers,
    on_versions,
)
from faults.run import Scenario, run_scenario

if TYPE_CHECKING:
    from faults.campaign import Campaign

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.kafka, pytest.mark.timeout(960)]

IN_PROCESS = pytest.mark.usefixtures("spark")
"""The tracker runs in this process; the others start processes of their own."""


def run(campaign: Campaign, scenario: Scenario, injections: int) -> None:
    """
    Run a scenario, and look that it injected and that nothing was violated.

    Lateness (I8) depends on the load of the machine: `make faults` judges it, a test does not.
    """
    result = run_scenario("", scenario, campaign)
    assert [each for each in result.violations if each.invariant != "I8"] == []
    assert result.injections >= injections, result.notes


@IN_PROCESS
def test_consumer_killed_at_every_step(campaign: Campaign) -> None:
    """Whatever a consumer was doing: its messages come again once, after their lease."""
    run(campaign, on_consumers.killed, len(on_consumers.CONSUMER_POINTS))


@pytest.mark.slow  # two trackers in processes of their own
def test_newer_tracker_fences_the_older_one(campaign: Campaign) -> None:
    """Two trackers, different checkpoints: the older ends, says why, and nothing is sent twice."""
    run(campaign, on_trackers.two_at_once, 1)


@IN_PROCESS
def test_markers_twice_late_and_out_of_order(campaign: Campaign) -> None:
    """Every order of markers is folded as the model folds it."""
    run(campaign, on_markers.disordered, 5)


@IN_PROCESS
def test_records_that_are_no_markers(campaign: Campaign) -> None:
    """Each is set aside, none stops the tracker."""
    run(campaign, on_markers.corrupted, len(on_markers.NOT_MARKERS))


@IN_PROCESS
def test_interrupts_in_a_receive_loop(campaign: Campaign) -> None:
    """KeyboardInterrupt and other exceptions at random moments: the loop continues, and nothing is lost."""
    run(campaign, on_consumers.interrupted, 10)


@IN_PROCESS
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_tracker_killed_at_every_step(campaign: Campaign) -> None:
    """Whatever the tracker was doing: each message is redelivered once, and nothing is lost."""
    run(campaign, on_trackers.killed, len(on_trackers.TRACKER_POINTS) + 1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("scenario", "injections"),
    [
        (on_consumers.paused, 4), (on_brokers.paused, 1), (on_brokers.clock_stepped, 6),
        (on_markers.hostile, 6),
        (on_topics.retention_passed, 1), (on_topics.grown_too_large, 4), (on_versions.mixed, 4), (on_networks.cut, 4),
        pytest.param(on_ledgers.killed, 2, marks=pytest.mark.long),
        pytest.param(on_ledgers.compacted, 6, marks=pytest.mark.long),
        (on_consumers.holding_many, 2), (on_consumers.poisoned, 1),
        (on_brokers.offsets_expired, 2),
    ],
)  # fmt: skip
def test_fault_at_its_smallest(campaign: Campaign, scenario: Scenario, injections: int) -> None:
    """Those that take a minute and more each."""
    run(campaign, scenario, injections)
