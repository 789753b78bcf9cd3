"""The short form of `make faults`: each kind of fault once, the same checker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from faults import on_brokers, on_consumers, on_ledgers, on_letters, on_markers, on_sinks, on_trackers
from faults.campaign import Campaign
from faults.run import Result, Scenario
from tests.brokers import quick_java

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kmq_spark.local.broker import EmbeddedBroker

pytestmark = [pytest.mark.faults, pytest.mark.kafka, pytest.mark.timeout(1800)]

SHORT = (on_consumers.killed, len(on_consumers.CONSUMER_POINTS))
LONG = [
    (on_trackers.killed, len(on_trackers.TRACKER_POINTS)), (on_trackers.two_at_once, 1), (on_trackers.stalled, 1),
    (on_consumers.paused, 4), (on_consumers.holding_many, 2), (on_consumers.poisoned, 1), (on_brokers.cut, 4),
    (on_brokers.answers_lost, 4), (on_brokers.offsets_expired, 2), (on_brokers.clock_stepped, 6),
    (on_brokers.grown_too_large, 4), (on_markers.corrupted, 8), (on_markers.disordered, 7), (on_markers.hostile, 3),
    (on_letters.redriven, 4), (on_ledgers.killed, 2), (on_sinks.killed, 1),
]  # fmt: skip


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory, broker: EmbeddedBroker) -> Iterator[Campaign]:
    """The least of every fault: one injection of each kind."""
    # Processes of tests share the machine. `make faults` judges times, a test does not.
    folder = tmp_path_factory.mktemp("faults")
    campaign = Campaign(folder, seed=1, scale=0.0, patience=4.0, broker=broker, broker_environment=quick_java())
    try:
        yield campaign
    finally:
        campaign.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "injections"), [SHORT, *(pytest.param(*each, marks=pytest.mark.long) for each in LONG)]
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
