"""Records to produce, and the headers of consumed records."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from confluent_kafka import Message

    from kmq_spark.wire.headers import Headers


class OutgoingRecord(NamedTuple):
    """One record to produce."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: Headers


def headers_of(message: Message) -> Headers:
    """Return the headers of a message in their order."""
    return message.headers() or []  # type: ignore[return-value]  # the stub allows what may be sent; this was read
