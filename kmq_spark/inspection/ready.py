"""
Count the messages that no consumer has started, by logical queue.

Rule 1: a logical queue has a group of its own. Its messages past that group's position are ready, whatever other groups
have committed. Without a group all of them are ready; of those that every group has passed, the newest are looked for.
Rule 2: a small backlog is counted record by record, because transactions leave control records in a log, which readers
do not receive. A large one is estimated from the share of each logical queue among the newest records.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from kmq_spark.wire.headers import LOGICAL_QUEUE, text_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from confluent_kafka import Message

MAX_COUNTED = 500
"""Records of a partition that are read at most."""


class Sent(NamedTuple):
    """What of a message is counted; without its bytes, so that it may be kept from one look to the next."""

    offset: int
    logical_queue: str
    at_ms: int

    @classmethod
    def of(cls, record: Message) -> Sent:
        """Return a record of the queue topic."""
        return cls(record.offset() or 0, logical_queue_of(record), record.timestamp()[1])


class Span(NamedTuple):
    """What of a partition is not started: first offset and end of the log, and the position of each group."""

    first: int
    end: int
    positions: Mapping[str, int]

    @classmethod
    def of(cls, first: int, end: int, positions: Mapping[str, int]) -> Span:
        """Return the span of a partition; a group without a position there has started nothing of it."""
        return cls(first, end, {name: max(at, first) for name, at in positions.items()})

    @property
    def start(self) -> int:
        """The lowest position."""
        return min(self.positions.values(), default=self.first)

    @property
    def read_from(self) -> int:
        """Where counting begins: below all positions too, where messages of a logical queue without a group may lie."""
        return max(self.first, self.end - MAX_COUNTED)

    def is_ready(self, record: Sent) -> bool:
        """Return whether no consumer of its logical queue has started a message."""
        return record.offset >= self.positions.get(record.logical_queue, self.first)


class Ready(NamedTuple):
    """The messages of a partition that are ready: their number by logical queue, and the append time of the oldest."""

    counts: Mapping[str, int]
    oldest_at_ms: int | None
    is_exact: bool


def logical_queue_of(record: Message) -> str:
    """Return the logical queue of a message; empty for none."""
    headers: Any = record.headers()
    return text_of(headers or [], LOGICAL_QUEUE)


def ready_of(span: Span, records: Iterable[Sent]) -> Ready:
    """Return what is ready of a partition; *records* are those from `Span.read_from` on."""
    seen, counts = Counter[str](), Counter[str]()
    oldest_at_ms: int | None = None
    for record in records:
        if record.offset >= span.end:
            continue
        seen[record.logical_queue] += 1
        if span.is_ready(record):
            counts[record.logical_queue] += 1
            oldest_at_ms = record.at_ms if oldest_at_ms is None else min(oldest_at_ms, record.at_ms)
    if span.read_from <= span.start:
        return Ready(dict(counts), oldest_at_ms, is_exact=True)
    total = max(1, seen.total())
    for name, at in span.positions.items():
        counts[name] = round((span.end - at) * seen[name] / total)
    return Ready({name: count for name, count in counts.items() if count}, oldest_at_ms, is_exact=False)
