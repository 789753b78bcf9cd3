"""Spans of what the tracker sends, collected in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from kmq_spark.contrib.opentelemetry import sending, traced
from tests.kafka.conftest import consumer_of, drop, receive_all, track

if TYPE_CHECKING:
    from kmq_spark import Message
    from tests.kafka.conftest import Queue

pytestmark = pytest.mark.kafka


def links_of(span: ReadableSpan) -> list[tuple[int, dict[str, object]]]:
    """Return span id and attributes of each link."""
    return [(link.context.span_id, dict(link.attributes or {})) for link in span.links]


def fail(_message: Message) -> None:
    """Fail."""
    raise ValueError("no such order")


def test_life_of_a_message_is_linked_from_send_to_dead_letter(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redeliveries of a transaction are one span, its dead letters another; without a provider there is none."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with sending(queue.name, tracer_provider=provider) as headers:
        queue.send("a", "b", headers=headers)
        queue.send("c")
    drop(queue, 3)
    track(queue)
    # A process can set its provider only once.
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    with consumer_of(queue, lease=1, max_lease=1) as consumer:
        for message in receive_all(consumer, 3):
            with pytest.raises(ValueError, match="no such order"):
                traced(fail)(message)
            if message.value == b"a":
                message.reject("closed")
            else:
                message.fail("no such order")
    assert track(queue).dead_lettered == 1
    send, *processed, redelivered, dead_letter = exporter.get_finished_spans()
    sender = (context := send.get_span_context()) and context.span_id
    assert [span.name for span in processed] == [f"process {queue.name}"] * 3
    assert [links_of(span) for span in processed] == [[(sender, {})], [(sender, {})], []]
    for span in processed:
        assert [event.name for event in span.events] == ["redelivered", "received", "exception"]
    assert (redelivered.name, dead_letter.name) == (f"redeliver {queue.name}", f"dead-letter {queue.name}.dlq")
    assert {redelivered.kind, dead_letter.kind} == {SpanKind.CLIENT}
    of_link = {"kmq.delivery_count": 2}
    assert links_of(redelivered) == [
        (sender, {**of_link, "messaging.message.id": "0:1", "kmq.reason": "no such order"})
    ]
    assert links_of(dead_letter) == [(sender, {**of_link, "messaging.message.id": "0:0", "kmq.reason": "closed"})]
    assert redelivered.attributes == {
        "messaging.system": "kafka",
        "messaging.destination.name": queue.name,
        "messaging.operation.name": "redeliver",
        "messaging.operation.type": "send",
        "messaging.batch.message_count": 2,
    }
    assert (redelivered.start_time or 0) < (redelivered.end_time or 0)
