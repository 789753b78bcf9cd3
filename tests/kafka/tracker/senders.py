"""Senders without a fold: what a test gives them to deliver is of their newest term, unless it says another one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kmq_spark.kafka.queue_rules import RulesReader
from kmq_spark.kafka.settings import new_client_id, reader_config
from kmq_spark.tracker.sender.limits import SenderLimits
from kmq_spark.tracker.sender.redelivery import RedeliverySender

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kmq_spark.core.outcome import PartitionOutcome
    from kmq_spark.kafka.topics import QueueLayout
    from kmq_spark.tracker.sender.sent import Sent


class StampingSender(RedeliverySender):
    """A sender whose outcomes say its own term where they say none."""

    def deliver(self, outcomes: Sequence[PartitionOutcome]) -> Sent:
        """Deliver, with the term."""
        own = {"term": self.term, "term_by": self.tracker_id}
        return super().deliver(
            [each if each.status.term else replace(each, status=replace(each.status, **own)) for each in outcomes]  # type: ignore[arg-type]  # two fields
        )


def new_sender(layout: QueueLayout, bootstrap_servers: str, **limits: Any) -> StampingSender:  # those of SenderLimits
    """Return a sender of a queue, not open yet."""
    reading = reader_config(bootstrap_servers, layout.topics.tracker_group, new_client_id("rules"))
    return StampingSender(
        layout,
        bootstrap_servers=bootstrap_servers,
        limits=SenderLimits(**{"timeout": 10, **limits}),
        rules_reader=RulesReader(layout.topics, reading, 10),
    )
