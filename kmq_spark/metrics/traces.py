"""
What spans of producers, handlers and the tracker have in common.

Source: OpenTelemetry's semantic conventions for messaging; for links instead of parents, their section on batches.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from opentelemetry import propagate, trace
from opentelemetry.trace import Link

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    Attributes = Mapping[str, str | int]
    Sent = Iterable[tuple[Iterable[tuple[str, bytes | None]], Attributes | None]]
    """Headers of messages, and what a link says of each."""

MOST_LINKS = 128
"""Links of a span; the default limit of the SDK."""


def attributes_of(topic: str, operation: str, operation_type: str) -> dict[str, str | int]:
    """Return the attributes that every span has."""
    return {
        "messaging.system": "kafka",
        "messaging.destination.name": topic,
        "messaging.operation.name": operation,
        "messaging.operation.type": operation_type,
    }


def links_of(messages: Sent) -> list[Link]:
    """Return links to the spans that sent messages, the first of them; a message without such a span has none."""
    links: list[Link] = []
    for headers, attributes in islice(messages, MOST_LINKS):
        carrier = {name: value.decode("latin-1") for name, value in headers if value is not None}
        sender = trace.get_current_span(propagate.extract(carrier)).get_span_context()
        links += [Link(sender, attributes)] if sender.is_valid else []
    return links
