"""Records to produce; sizes of consumed records; which records of a transaction the broker rejected as too large."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, Message

from kmq_spark.wire.headers import header_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kmq_spark.wire.headers import Headers

_KEY = Message.key

MAX_REJECTIONS = 2
"""Rejections after which the payload is left out, so that nothing remains that the broker could reject."""


class OutgoingRecord(NamedTuple):
    """One record to produce."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: Headers


def place_of(report: Message) -> tuple[int, int] | None:
    """
    Return offset and append time of a durable record of a topic with `LogAppendTime`; None if the broker said neither.

    A leader that knows only that it has the batch, as after an election, says neither. The first record of the batch
    then has no offset in its report, and librdkafka counts from -1 for the others.
    """
    kind, appended_at_ms = report.timestamp()
    offset = report.offset()
    return None if offset is None or kind != TIMESTAMP_LOG_APPEND_TIME else (offset, appended_at_ms)


def headers_of(message: Message) -> Headers:
    """Return the headers of a message in their order."""
    return message.headers() or []  # type: ignore[return-value]  # the stub allows what may be sent; this was read


def sizes_of(records: Sequence[Message], headers: Sequence[Any]) -> list[int]:
    """Return the size of each record: the bytes of its value, key and headers (empty if no record has headers)."""
    sizes = list(map(len, records))
    # Keys and headers are added only if any record has them, because this code runs for each message.
    if any(map(_KEY, records)):
        keys: Iterable[Any] = map(_KEY, records)
        sizes = [size + len(key or b"") for size, key in zip(sizes, keys, strict=True)]
    if any(headers):
        sizes = [size + header_bytes(each) for size, each in zip(sizes, headers, strict=True)]
    return sizes


class RejectedRecords:
    """
    The rejections in one transaction, over all its attempts.

    A message that was rejected once becomes a dead letter, one that was rejected twice a dead letter without payload.
    A message at least as large as a rejected one counts as rejected without an attempt: librdkafka reports about three
    rejections per attempt, and a batch may contain thousands of such messages.
    """

    def __init__(self) -> None:
        self._by_index: Counter[int] = Counter()
        self._smallest_bytes: dict[int, int] = {}
        self.total_count = 0

    def rejection_count(self, index: int, size_bytes: int) -> int:
        """Return how often a message was rejected, or would be: 2 by the dead-letter topic too."""
        count = self._by_index[index]
        while count < MAX_REJECTIONS and size_bytes >= self._smallest_bytes.get(count, size_bytes + 1):
            count += 1
        return count

    def note_unknown(self) -> None:
        """Record that the broker rejected one of several messages that share a callback: the next attempt finds it."""
        self.total_count += 1

    def note(self, index: int, size_bytes: int, before: int) -> None:
        """Record that the broker rejected a message that had been rejected *before* times."""
        self._by_index[index] = before + 1
        self._smallest_bytes[before] = min(size_bytes, self._smallest_bytes.get(before, size_bytes))
        self.total_count += 1
