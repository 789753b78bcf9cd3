"""Spans of handlers, collected in memory."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from kmq_spark.contrib.opentelemetry import sending, traced
from kmq_spark.testing import InMemoryQueue, make_message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kmq_spark import Batch, Message


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> TracerProvider:
    found = TracerProvider()
    found.add_span_processor(SimpleSpanProcessor(exporter))
    return found


def send_traced(provider: TracerProvider, queue: InMemoryQueue, *values: str) -> None:
    with sending("orders", {"source": b"shop"}, tracer_provider=provider) as headers:
        for value in values:
            queue.producer().send(value, headers=headers)


def id_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


def spans_of(exporter: InMemorySpanExporter, name: str) -> Sequence[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


def test_every_delivery_is_a_span_linked_to_the_one_that_sent_the_message(
    exporter: InMemorySpanExporter, provider: TracerProvider
) -> None:
    queue = InMemoryQueue("orders", rules={"max_deliveries": 2, "backoff": "none"})
    send_traced(provider, queue, "a")
    current: list[Any] = []

    def handle(message: Message) -> None:
        current.append(trace.get_current_span())
        if message.delivery_count == 1:
            raise ValueError("no such order")

    queue.work(traced(handle, tracer_provider=provider))
    (sent,) = spans_of(exporter, "send orders")
    assert sent.kind is SpanKind.PRODUCER
    assert sent.attributes == {
        "messaging.system": "kafka",
        "messaging.destination.name": "orders",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
    }
    first, second = spans_of(exporter, "process orders")
    assert [span.get_span_context() for span in current] == [first.get_span_context(), second.get_span_context()]
    for span, offset, count in ((first, 0, 1), (second, 1, 2)):
        assert span.kind is SpanKind.CONSUMER
        assert [link.context.span_id for link in span.links] == [id_of(sent)]
        assert span.attributes == {
            "messaging.system": "kafka",
            "messaging.destination.name": "orders",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.partition.id": "0",
            "messaging.kafka.offset": offset,
            "messaging.message.id": "0:0",
            "kmq.delivery_count": count,
            **({"error.type": "ValueError"} if count == 1 else {}),
        }
    assert (first.status.description, second.status.is_ok) == ("ValueError: no such order", True)
    assert [event.name for event in first.events] == ["received", "exception"]
    redelivered, received = second.events
    assert (redelivered.name, redelivered.attributes) == ("redelivered", {"kmq.reason": "ValueError: no such order"})
    assert (received.name, redelivered.timestamp <= received.timestamp) == ("received", True)


def test_batch_is_one_span_with_links(exporter: InMemorySpanExporter, provider: TracerProvider) -> None:
    queue = InMemoryQueue("orders")
    send_traced(provider, queue, *map(str, range(5)))

    def store(batch: Batch) -> None:
        assert len(batch) == 5

    assert queue.work(traced(store, tracer_provider=provider), batch=5).acked == 5
    (span,) = spans_of(exporter, "process orders")
    assert len(span.links) == 5
    assert (span.attributes or {})["messaging.batch.message_count"] == 5


def test_coroutines_work_in_spans_of_their_own(exporter: InMemorySpanExporter, provider: TracerProvider) -> None:
    queue = InMemoryQueue("orders")
    send_traced(provider, queue, *map(str, range(20)))
    current: set[int] = set()

    async def handle(_message: Message) -> None:
        await asyncio.sleep(0.01)
        current.add(trace.get_current_span().get_span_context().span_id)

    assert queue.work(traced(handle, tracer_provider=provider), concurrency=20).acked == 20
    assert {id_of(span) for span in spans_of(exporter, "process orders")} == current
    assert len(current) == 20


def test_headers_of_a_stranger_are_no_link(exporter: InMemorySpanExporter, provider: TracerProvider) -> None:
    handled: list[Any] = []
    message = make_message("a", headers={"traceparent": b"\xffnonsense"})
    traced(handled.append, tracer_provider=provider)(message)
    assert handled == [message]
    (span,) = spans_of(exporter, "process queue")
    assert span.links == ()
