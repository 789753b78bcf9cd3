"""
Build the records that the tracker writes: decisions and payloads in, the records of one transaction out.

Rule 1: This module uses no Kafka client: values in, values out.
Rule 2: Key, value and application headers of a message are kept byte for byte, headers in their order.
Rule 3: Every decision gets exactly one END, in the markers partition of the message's START.
Rule 4: Decisions that need the payload are made here, by the same rules: the TTL, and the delivery count if the START
contained none.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from kmq_spark.core.in_flight import spread
from kmq_spark.core.markers import Marker, MarkerType, Outcome
from kmq_spark.core.policy import exhausted_reason, is_exhausted, with_last_error
from kmq_spark.core.ranges import cut_ranges
from kmq_spark.kafka.records import OutgoingRecord, headers_of
from kmq_spark.wire.codec import encode_marker
from kmq_spark.wire.headers import (
    CommonHeaders,
    Headers,
    by_name,
    dead_letter_headers,
    delivery_count_of,
    expires_at_ms_of,
    first_sent_ms_of,
    last_error_of,
    redelivery_headers,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from kmq_spark.core.policy import QueueRules
    from kmq_spark.kafka.queue_topics import QueueTopics
    from kmq_spark.tracker.sender.due_decisions import DueRun


def common_headers(run: DueRun, topics: QueueTopics, rules: QueueRules) -> CommonHeaders | None:
    """Return the headers of the copies of a run; None if even a message without headers is not redelivered."""
    decision = _with_headers(run, {}, -1, rules)
    if decision.outcome is not Outcome.REDELIVERED:
        return None
    return CommonHeaders(
        delivery_count=decision.delivery_count,
        queue_partition=run.queue_partition,
        is_silent=run.is_silent,
        subscription=topics.subscription,
        max_deliveries=rules.max_deliveries,
        last_error=decision.reason,
    )


def final_decision(run: DueRun, rejection_count: int, topics: QueueTopics, rules: QueueRules) -> DueRun:
    """
    Return the final decision on a message, with the payload to send.

    A message that cannot be redelivered becomes a dead letter. A message whose TTL has expired gets the outcome
    EXPIRED, or becomes a dead letter if the queue's rules require it.
    """
    (message,) = run.messages
    if message is not None:
        run = _with_headers(run, by_name(headers_of(message)), message.timestamp()[1], rules)
        if rejection_count == 0 or run.outcome is Outcome.EXPIRED:
            return run
    elif run.outcome is Outcome.EXPIRED:
        # The queue topic never had this offset. With a dead letter here, any client that can write markers could create
        # as many dead letters as it likes.
        return run
    place = f"{topics.queue_topic}[{run.queue_partition}]@{run.message_offset}"
    if message is None:
        reason = f"payload gone: {place} is not in the topic; raise its retention.ms above lease and outage"
    else:
        reason = "too large to redeliver: the broker refused it with the tracker's headers; raise max.message.bytes"
    if rejection_count > 1:
        reason = f"{reason}; too large for the dead-letter topic too, so the payload stays at {place}"
        message = None
    return run._replace(outcome=Outcome.DEAD_LETTERED, reason=_joined(run.reason, reason), messages=[message])


def _with_headers(run: DueRun, headers: dict[str, bytes | None], sent_at_ms: int, rules: QueueRules) -> DueRun:
    """Return the decision corrected by the headers: deliveries that no START counted, last error, expired TTL."""
    if run.is_silent and run.delivery_count <= (counted := delivery_count_of(headers)):
        # A START of kafka-mq-go contains no delivery count; one of ours contains the header's count + 1. Only silent
        # deliveries are corrected: a released one may not count, and the fold has handled that.
        run = run._replace(delivery_count=counted + 1)
    if run.is_exhausted:
        # If the last delivery ended without an error text, use that of an earlier delivery.
        run = run._replace(reason=with_last_error(run.reason, last_error_of(headers)))
    if run.outcome is not Outcome.REDELIVERED:
        return run
    if is_exhausted(run.delivery_count, rules):
        reason = exhausted_reason(run.delivery_count, rules, run.reason or last_error_of(headers))
        return run._replace(outcome=Outcome.DEAD_LETTERED, reason=reason)
    if not headers:
        return run
    expires_at_ms = expires_at_ms_of(headers, sent_at_ms)
    if expires_at_ms is None or run.tick_at_ms < expires_at_ms:
        return run
    if rules.dead_letters_expired:
        ttl_ms = expires_at_ms - (first_sent_ms_of(headers, sent_at_ms) or 0)
        reason = f"expired: ttl of {ttl_ms} ms was over"
        return run._replace(outcome=Outcome.DEAD_LETTERED, reason=reason)
    return run._replace(outcome=Outcome.EXPIRED)


def _joined(first: str, second: str) -> str:
    return f"{first}; {second}" if first else second


def outgoing_record(
    run: DueRun, topics: QueueTopics, dead_letter_partitions: int, max_deliveries: int = 0
) -> OutgoingRecord:
    """Return the record for a final decision: the redelivered message or the dead letter."""
    (message,) = run.messages
    headers: Headers = []
    sent_at_ms, key, value = -1, None, None
    if message is not None:
        headers, sent_at_ms, key, value = headers_of(message), message.timestamp()[1], message.key(), message.value()
    if run.is_dead_letter:
        new_headers = dead_letter_headers(
            headers,
            source_topic=topics.queue_topic,
            group=topics.consumer_group,
            delivery_count=run.delivery_count,
            queue_partition=run.queue_partition,
            message_offset=run.message_offset,
            sent_at_ms=sent_at_ms,
            reason=run.reason,
        )
        partition = run.queue_partition % dead_letter_partitions
        return OutgoingRecord(topics.dead_letter_topic, partition, key, value, new_headers)
    new_headers = redelivery_headers(
        headers,
        delivery_count=run.delivery_count,
        queue_partition=run.queue_partition,
        message_offset=run.message_offset,
        sent_at_ms=sent_at_ms,
        is_silent=run.is_silent,
        subscription=topics.subscription,
        max_deliveries=max_deliveries,
        decided_at_ms=run.tick_at_ms,
        last_error=run.reason,
    )
    # The same queue partition as before: the partition count may have changed, and the key may map elsewhere now.
    return OutgoingRecord(topics.queue_topic, run.queue_partition, key, value, new_headers)


class Ends:
    """Collects the ENDs of final decisions, and builds as few records as their ranges allow."""

    def __init__(self) -> None:
        self._runs: defaultdict[tuple[int, int, Outcome, str], list[tuple[int, int]]] = defaultdict(list)
        self.decided: list[DueRun] = []

    def add(self, run: DueRun) -> None:
        """Add an END for each message of a run whose decision is final; the run may be empty."""
        if run.messages:
            self.decided.append(run)
            reason = run.reason if run.is_dead_letter else ""
            runs = self._runs[run.marker_partition, run.queue_partition, run.outcome, reason]
            runs.append((run.message_offset, len(run.messages)))

    def records(self, topics: QueueTopics, tracker_id: str, term: int) -> Iterator[OutgoingRecord]:
        """Yield the ENDs of a tracker in a term."""
        for (marker_partition, queue_partition, outcome, reason), runs in self._runs.items():
            for message_offsets in _rounds(spread(*np.array(runs).T)[1]):
                for ranges in cut_ranges(message_offsets.tolist()):
                    marker = Marker(
                        type=MarkerType.END,
                        queue_partition=queue_partition,
                        ranges=ranges,
                        outcome=outcome,
                        reason=reason,
                        consumer_id=tracker_id,
                        term=term,
                    )
                    yield OutgoingRecord(topics.markers_topic, marker_partition, None, encode_marker(marker), [])


def _rounds(message_offsets: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield the offsets without repeats, then those that are left: two decisions on one message have two ENDs."""
    while len(message_offsets):
        once, index = np.unique(message_offsets, return_index=True)
        yield once
        message_offsets = np.delete(message_offsets, index)
