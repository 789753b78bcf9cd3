"""Spans of what the tracker sends, where OpenTelemetry is installed and the program has set a tracer provider."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kmq_spark.core.markers import MessageId, Outcome
from kmq_spark.kafka.records import headers_of
from kmq_spark.wire.headers import ORIGIN, place_of

try:
    from opentelemetry import trace

    from kmq_spark.metrics.traces import attributes_of, links_of
except ImportError:
    trace = None  # type: ignore[assignment]  # the package is optional

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kmq_spark.kafka.queue_topics import QueueTopics
    from kmq_spark.metrics.traces import Sent
    from kmq_spark.tracker.sender.due_decisions import DueRun


def trace_sent(decided: Sequence[DueRun], topics: QueueTopics, since_ns: int) -> None:
    """Make a span of the redeliveries of a transaction and one of its dead letters, linked to the messages' senders."""
    if trace is None or isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return
    redeliver = Outcome.REDELIVERED, "redeliver", topics.queue_topic
    for outcome, operation, topic in (redeliver, (Outcome.DEAD_LETTERED, "dead-letter", topics.dead_letter_topic)):
        if runs := [run for run in decided if run.outcome is outcome]:
            count = sum(len(run.messages) for run in runs)
            trace.get_tracer("kmq_spark").start_span(
                f"{operation} {topic}", kind=trace.SpanKind.CLIENT, start_time=since_ns, links=links_of(_sent(runs)),
                attributes=attributes_of(topic, operation, "send") | {"messaging.batch.message_count": count},
            ).end()  # fmt: skip


def _sent(runs: Iterable[DueRun]) -> Sent:
    for run in runs:
        for offset, message in enumerate(run.messages, run.message_offset):
            headers = [] if message is None else headers_of(message)
            yield (
                headers,
                {
                    "messaging.message.id": (place_of(headers, ORIGIN) or MessageId(run.queue_partition, offset)).text,
                    "kmq.delivery_count": run.delivery_count,
                    "kmq.reason": run.reason,
                },
            )
