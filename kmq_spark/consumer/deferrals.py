"""
Create the markers of deferrals: STARTs of messages that no consumer holds and that are delivered later.

Rule 1: messages that fall due together share a marker, so that 100,000 messages need only a few hundred markers.
Rule 2: no clock, no Kafka client.

Source: docs/protocol.md, "What a consumer does with a record".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kmq_spark.consumer.suspects import DEFER_S
from kmq_spark.core.markers import Marker, MarkerType
from kmq_spark.core.ranges import cut_ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    from confluent_kafka import Message as KafkaMessage

    from kmq_spark.consumer.admission import Admission, BatchPlan


def deferrals(
    records: Sequence[KafkaMessage],
    admissions: Sequence[Admission],
    plan: BatchPlan,
    consumer_id: str,
) -> list[Marker]:
    """
    Return the STARTs of the deferred messages.

    Args:
        records: Fetched records.
        admissions: The verdict on each record.
        plan: States which records are deferred, and which suspects are postponed.
        consumer_id: Written into the markers.
    """
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for index in plan.deferred:
        record, admission = records[index], admissions[index]
        key = (record.partition(), admission.delivery_count, admission.due_at_ms, 0)
        groups.setdefault(key, []).append(record.offset())
    for index in plan.postponed:
        record, admission = records[index], admissions[index]
        key = (record.partition(), admission.delivery_count, 0, DEFER_S * 1000)
        groups.setdefault(key, []).append(record.offset())
    return [
        Marker(
            MarkerType.START,
            partition,
            ranges,
            redeliver_after_ms=after_ms,
            delivery_count=delivery_count,
            consumer_id=consumer_id,
            never_handed_out=True,
            due_at_ms=due_at_ms,
        )
        for (partition, delivery_count, due_at_ms, after_ms), offsets in groups.items()
        for ranges in cut_ranges(offsets)
    ]
