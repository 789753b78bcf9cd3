"""
One owner at a time, work spread over processes, groups that can be paused: with nothing but a Kafka topic.

    from kmq_spark.coordination import Coordinator, GroupView

docs/coordination.md says how to use it and what it rests on; docs/internals/protocol.md has the protocol.
"""

from __future__ import annotations

from kmq_spark.coordination.claim import Claim
from kmq_spark.coordination.consumption import Batch, Consumption
from kmq_spark.coordination.coordinator import Coordinator, GroupView
from kmq_spark.coordination.tasks import RunningTask, TaskRunner
from kmq_spark.coordination.topic import COORDINATION_TOPIC, create_coordination_topic

__all__ = [
    "COORDINATION_TOPIC",
    "Batch",
    "Claim",
    "Consumption",
    "Coordinator",
    "GroupView",
    "RunningTask",
    "TaskRunner",
    "create_coordination_topic",
]
