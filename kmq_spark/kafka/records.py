"""Records to produce; headers and sizes of consumed records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from confluent_kafka import Message

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kmq_spark.wire.headers import Headers

_KEY = Message.key


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


def sizes_of(records: Sequence[Message], headers: Sequence[Any]) -> list[int]:
    """
    Return the size of each record: the bytes of its value, key and headers.

    Args:
        records: Consumed records.
        headers: Headers of each record, None for none. Empty if no record has headers.
    """
    sizes = list(map(len, records))
    # Keys and headers are added only if any record has them, because this code runs for each message.
    if any(map(_KEY, records)):
        keys: Iterable[Any] = map(_KEY, records)
        sizes = [size + len(key or b"") for size, key in zip(sizes, keys, strict=True)]
    if any(headers):
        sizes = [size + _header_bytes(each) for size, each in zip(sizes, headers, strict=True)]
    return sizes


def _header_bytes(headers: Sequence[tuple[str, bytes | None]] | None) -> int:
    return sum([len(name) + len(value or b"") for name, value in headers or ()])
