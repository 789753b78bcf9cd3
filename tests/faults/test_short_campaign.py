"""The short form of `make faults`: each kind of fault once, the same checker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from faults import on_brokers, on_consumers, on_ledgers, on_letters, on_markers, on_sinks, on_trackers
from faults.run import Result, Scenario
from faults.stage import Judged, Stage

if TYPE_CHECKING:
    from faults.campaign import Campaign

pytestmark = [pytest.mark.faults, pytest.mark.kafka, pytest.mark.timeout(1800)]

QUICK = [(on_consumers.killed, len(on_consumers.CONSUMER_POINTS))]
SLOW = [
    (on_trackers.killed, len(on_trackers.TRACKER_POINTS)), (on_trackers.two_at_once, 1), (on_consumers.poisoned, 1),
    (on_brokers.cut, 4), (on_brokers.offsets_expired, 2), (on_markers.disordered, 7),
]  # fmt: skip
LONG = [
    (on_consumers.paused, 4), (on_consumers.holding_many, 2), (on_brokers.clock_stepped, 6),
    (on_brokers.grown_too_large, 4), (on_markers.corrupted, 8), (on_markers.hostile, 3), (on_letters.redriven, 4),
    (on_ledgers.killed, 2), (on_sinks.killed, 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("scenario", "injections"),
    [
        *QUICK,
        *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW),
        *(pytest.param(*each, marks=[pytest.mark.slow, pytest.mark.long]) for each in LONG),
    ],
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


def test_scenario_that_breaks_off_leaves_no_process(campaign: Campaign) -> None:
    """It is a violation, as is a verdict that cannot be reached; the next fault is injected."""
    begun: list[Stage] = []

    def breaks_off(campaign: Campaign) -> Judged:
        """F0: a scenario with a defect."""
        begun.append(Stage(campaign, "broken"))
        begun[-1].send(rate=10)
        begun[-1].worker("left")
        raise RuntimeError("a defect of the scenario")

    def loses_its_topics(campaign: Campaign) -> Judged:
        """F0: a scenario that leaves no evidence."""
        stage = Stage(campaign, "no-evidence")
        stage.done(stage.admin.delete_topics([stage.queue, f"{stage.queue}.markers"]))
        return stage

    for scenario in (breaks_off, loses_its_topics):
        result = Result("F0", campaign.seed)
        result.run(scenario, campaign)
        assert [each.invariant for each in result.violations] == ["harness"]
    assert [child.is_running for child in begun[0].children] == [False]


def test_worker_ends_cleanly_however_early_it_is_asked_to(campaign: Campaign) -> None:
    """A drain that finds nothing open stops its workers while their interpreters still start."""
    stage = Stage(campaign, "early-end")
    workers = [stage.worker(mode, mode=mode) for mode in ("run", "receive")]
    assert [worker.stop() for worker in workers] == [0, 0]
    stage.drain()
    assert stage.failures == []
