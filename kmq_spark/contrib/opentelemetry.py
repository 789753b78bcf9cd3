"""
OpenTelemetry: a span for each message that a handler works on, linked to the span that sent it.

    from kmq_spark.contrib.opentelemetry import trace_headers, traced

    producer.send(value, headers=trace_headers())
    consumer.run(traced(handle))

Rule 1: the headers of a trace are those of its sender. A redelivered copy and a dead letter keep them, so that every
delivery is linked to the same span.

Source: OpenTelemetry's semantic conventions for messaging; for links instead of parents, their section on batches.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

from kmq_spark.consumer.batch import Batch
from kmq_spark.consumer.hooks import around, topic_of
from kmq_spark.errors import SetupError
from kmq_spark.producer.options import checked_headers

try:
    from opentelemetry import propagate, trace
    from opentelemetry.trace import Link, SpanKind, StatusCode
except ImportError as error:
    raise SetupError(
        f"cannot trace messages: module {error.name!r} is not installed; run `pip install 'kmq-spark[opentelemetry]'`"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from opentelemetry.trace import Span, TracerProvider

    from kmq_spark.consumer.message import Message
    from kmq_spark.producer.options import Headers

Handler = TypeVar("Handler", bound="Callable[[Any], Any]")

MOST_LINKS = 128
"""Links of the span of a batch; the default limit of the SDK."""


def trace_headers(headers: Headers | None = None) -> list[tuple[str, bytes | str | None]]:
    """Return headers to send, with those of the current span (`traceparent`): its trace goes on at the consumer."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return [*checked_headers(headers or ()), *carrier.items()]


def traced(handler: Handler, *, tracer_provider: TracerProvider | None = None) -> Handler:
    """
    Return a handler for `run` that works in a span of its own: *process*, with the topic's name.

    The span is the current one while the handler works, records its exception, and is linked to the span that sent the
    message. Coroutine functions and handlers of batches are wrapped likewise.

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
            try:
                yield
            except BaseException as error:
                _note(span, error)
                raise

    return around(handler, working_on)


def _note(span: Span, error: BaseException) -> None:
    span.record_exception(error)
    span.set_status(StatusCode.ERROR, f"{type(error).__name__}: {error}")


def _facts(given: Message | Batch) -> tuple[str, Mapping[str, str | int], list[Link]]:
    """Return topic, attributes and links of what a handler is given."""
    messages = list(given)[:MOST_LINKS] if isinstance(given, Batch) else [given]
    topic = topic_of(given)
    attributes: dict[str, str | int] = {
        "messaging.system": "kafka",
        "messaging.destination.name": topic,
        "messaging.operation.type": "process",
    }
    if isinstance(given, Batch):
        attributes["messaging.batch.message_count"] = len(given)
    else:
        attributes |= {
            "messaging.destination.partition.id": str(given.id.queue_partition),
            "messaging.kafka.offset": given.id.message_offset,
            "messaging.message.id": given.origin.text,
            "kmq.delivery_count": given.delivery_count,
        }
    return topic, attributes, [link for message in messages for link in _links(message)]


def _links(message: Message) -> list[Link]:
    carrier = {name: value.decode("latin-1") for name, value in message.headers if value is not None}
    sender = trace.get_current_span(propagate.extract(carrier)).get_span_context()
    return [Link(sender)] if sender.is_valid else []
