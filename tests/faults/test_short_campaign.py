"""The short form of `make faults`: each kind of fault once, the same checker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from faults import on_brokers, on_consumers, on_ledgers, on_letters, on_markers, on_sinks, on_trackers
from faults.run import Result, Scenario

if TYPE_CHECKING:
    from faults.campaign import Campaign

pytestmark = [pytest.mark.faults, pytest.mark.kafka, pytest.mark.timeout(1800)]

SLOW = [(on_consumers.killed, len(on_consumers.CONSUMER_POINTS)), (on_markers.disordered, 7)]
LONG = [
    (on_trackers.killed, len(on_trackers.TRACKER_POINTS)), (on_trackers.two_at_once, 1), (on_trackers.stalled, 1),
    (on_consumers.paused, 4), (on_consumers.holding_many, 2), (on_consumers.poisoned, 1), (on_brokers.cut, 4),
    (on_brokers.answers_lost, 4), (on_brokers.offsets_expired, 2), (on_brokers.clock_stepped, 6),
    (on_brokers.grown_too_large, 4), (on_markers.corrupted, 8), (on_markers.hostile, 3), (on_letters.redriven, 4),
    (on_ledgers.killed, 2), (on_sinks.killed, 1),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "injections"), [*SLOW, *(pytest.param(*each, marks=pytest.mark.long) for each in LONG)]
)
def test_fault_at_its_smallest(campaign: Campaign, scenario: Scenario, injections: int) -> None:
    """
    It is injected, and no promise is broken.

    Lateness (I8) depends on the load of the machine: `make faults` judges it, a test does not.
    """
    result = Result("", campaign.seed)
    result.run(scenario, campaign)
    assert [each for each in result.violations if each.invariant != "I8"] == []
    assert result.injections >= injections, result.notes
