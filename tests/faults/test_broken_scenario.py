"""A scenario that breaks off: it is a violation, it leaves nothing running, and the next fault is injected."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from confluent_kafka.admin import AdminClient

from faults.run import run_scenario
from kmq_spark.kafka.settings import admin_config

if TYPE_CHECKING:
    from faults.campaign import Campaign
    from faults.processes import WorkerChild
    from faults.stage import Stage

pytestmark = [pytest.mark.faults, pytest.mark.kafka]


def test_scenario_that_raises_leaves_no_process(campaign: Campaign) -> None:
    left: list[WorkerChild] = []

    def breaks_off(campaign: Campaign) -> Stage:
        """F0: a scenario with a defect."""
        stage = campaign.stage("broken")
        stage.send(rate=10)
        left.append(stage.worker("left"))
        message = "a defect of the scenario"
        raise RuntimeError(message)

    result = run_scenario("F0", breaks_off, campaign)
    assert [each.invariant for each in result.violations] == ["harness"]
    assert [worker.is_running for worker in left] == [False]


def test_verdict_that_cannot_be_reached_is_a_violation(campaign: Campaign) -> None:
    """The campaign continues, and the fault counts as violated."""

    def loses_its_topics(campaign: Campaign) -> Stage:
        """F0: a scenario that leaves no evidence."""
        stage = campaign.stage("no-evidence")
        topics = stage.layout.topics
        admin = AdminClient(admin_config(stage.bootstrap_servers))
        for future in admin.delete_topics([topics.queue_topic, topics.markers_topic]).values():
            future.result()
        return stage

    result = run_scenario("F0", loses_its_topics, campaign)
    assert [each.invariant for each in result.violations] == ["harness"]
