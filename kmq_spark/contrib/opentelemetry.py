"""
OpenTelemetry: a span where a message is sent, and one for each of its deliveries, linked to the first.

    from kmq_spark.contrib.opentelemetry import sending, traced

    with sending("orders") as headers:
        producer.send(value, headers=headers)
    consumer.run(traced(handle))

Rule 1: the headers of a trace are those of its sender. A redelivered copy and a dead letter keep them, so that every
delivery, and the tracker's spans, are linked to the same span.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

from kmq_spark.consumer.batch import Batch
from kmq_spark.consumer.hooks import around, topic_of
from kmq_spark.errors import needing
from kmq_spark.producer.options import checked_headers
from kmq_spark.wire.headers import last_error_of

with needing("opentelemetry", "trace messages"):
    from opentelemetry import propagate, trace
    from opentelemetry.trace import SpanKind, StatusCode

    from kmq_spark.metrics.traces import attributes_of, links_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from opentelemetry.trace import Link, Span, TracerProvider

    from kmq_spark.consumer.message import Message
    from kmq_spark.producer.options import Headers

Handler = TypeVar("Handler", bound="Callable[[Any], Any]")


@contextlib.contextmanager
def sending(
    queue: str, headers: Headers | None = None, *, tracer_provider: TracerProvider | None = None
) -> Iterator[list[tuple[str, bytes | str | None]]]:
    """
    Make a span *send*, with the queue's name, in which messages are sent with the headers that the block gets.

    Args:
        queue: Name of the queue.
        headers: Headers that the messages have besides.
        tracer_provider: Of the span; by default the global one.
    """
    tracer = trace.get_tracer("kmq_spark", tracer_provider=tracer_provider)
    attributes = attributes_of(queue, "send", "send")
    with tracer.start_as_current_span(f"send {queue}", kind=SpanKind.PRODUCER, attributes=attributes):
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        yield [*checked_headers(headers or ()), *carrier.items()]


def traced(handler: Handler, *, tracer_provider: TracerProvider | None = None) -> Handler:
    """
    Return a handler for `run` that works in a span of its own: *process*, with the topic's name.

    The span is the current one while the handler works, records its exception, and is linked to the span that sent the
    message. Its events say when the message was received, and when it was redelivered before. Coroutine functions and
    handlers of batches are wrapped likewise.

    Args:
        handler: Function or coroutine function of a message, or of a batch.
        tracer_provider: Of the spans; by default the global one.
    """
    tracer = trace.get_tracer("kmq_spark", tracer_provider=tracer_provider)

    @contextlib.contextmanager
    def working_on(given: Message | Batch) -> Iterator[None]:
        topic, attributes, links = _facts(given)
        with tracer.start_as_current_span(
            f"process {topic}", kind=SpanKind.CONSUMER, attributes=attributes, links=links, record_exception=False,
            set_status_on_exception=False,
        ) as span:  # fmt: skip
            if not isinstance(given, Batch):
                _note_life(span, given)
            try:
                yield
            except BaseException as error:
                _note(span, error)
                raise

    return around(handler, working_on)


def _note(span: Span, error: BaseException) -> None:
    span.record_exception(error)
    span.set_attribute("error.type", type(error).__name__)
    span.set_status(StatusCode.ERROR, f"{type(error).__name__}: {error}")


def _note_life(span: Span, message: Message) -> None:
    """Add what was before the handler, on the broker's clock."""
    if message.delivery_count > 1:
        reason = {"kmq.reason": last_error_of(message._all_headers())}  # noqa: SLF001  # private to the package
        span.add_event("redelivered", reason, message.appended_at_ms * 1_000_000)
    if received_at_ms := message._lease.started_at_ms:  # noqa: SLF001  # as above
        span.add_event("received", timestamp=received_at_ms * 1_000_000)


def _facts(given: Message | Batch) -> tuple[str, Mapping[str, str | int], list[Link]]:
    """Return topic, attributes and links of what a handler is given."""
    topic = topic_of(given)
    attributes = attributes_of(topic, "process", "process")
    if isinstance(given, Batch):
        attributes["messaging.batch.message_count"] = len(given)
    else:
        attributes |= {
            "messaging.destination.partition.id": str(given.id.queue_partition),
            "messaging.kafka.offset": given.id.message_offset,
            "messaging.message.id": given.origin.text,
            "kmq.delivery_count": given.delivery_count,
        }
    messages = given if isinstance(given, Batch) else [given]
    return topic, attributes, links_of((message.headers, None) for message in messages)
