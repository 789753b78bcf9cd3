"""What is ready of a queue whose logical queues have groups of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Message

from kmq_spark.inspection.ready import MAX_COUNTED, Ready, Sent, Span, ready_of
from kmq_spark.wire.headers import LOGICAL_QUEUE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def record(offset: int, logical_queue: str = "") -> Sent:
    """Return a record of the queue topic, appended at ten times its offset."""
    headers: Any = [(LOGICAL_QUEUE, logical_queue.encode())] if logical_queue else None
    return Sent.of(Message(topic="orders", partition=0, offset=offset, timestamp=(2, 10 * offset), headers=headers))


def ready(first: int, end: int, positions: Mapping[str, int], records: Iterable[Any]) -> Ready:
    """Return what is ready."""
    return ready_of(Span.of(first, end, positions), records)


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ({"": 4}, {"emails": 2}),  # the other one is acknowledged; nobody reads the logical queue
        ({"": 4, "emails": 2}, {"emails": 1}),
        ({"emails": 4}, {"": 2}),  # of a queue that has only logical queues nothing else is read
        ({"": 4, "emails": 4}, {}),
    ],
)
def test_messages_past_the_position_of_their_own_group_are_ready(
    positions: dict[str, int], expected: dict[str, int]
) -> None:
    records = [record(0), record(1, "emails"), record(2), record(3, "emails"), record(4, "emails")]
    found = ready(0, 4, {"": 0} | positions, records)
    assert ({name: count for name, count in found.counts.items() if count}, found.is_exact) == (expected, True)


def test_oldest_is_one_that_is_ready() -> None:
    assert ready(0, 3, {"": 1, "emails": 3}, [record(0), record(1, "emails"), record(2)]).oldest_at_ms == 20


def test_large_backlog_is_estimated_from_the_newest_records() -> None:
    """Half of them are of each: of 10,000 records half, of the last 2,000 half."""
    span = Span.of(0, 10_000, {"": 0, "emails": 8_000})
    assert (span.start, span.read_from) == (0, 10_000 - MAX_COUNTED)
    records: list[Any] = [record(at, "emails" if at % 2 else "") for at in range(span.read_from, span.end)]
    found = ready_of(span, records)
    assert (found.counts, found.is_exact) == ({"": 5_000, "emails": 1_000}, False)


def test_logical_queues_that_are_all_read_leave_nothing_ready() -> None:
    """The default group has committed nothing: all records lie behind its position, and none is its own."""
    span = Span.of(0, 6_000, {"": 0, "emails": 6_000})
    records: list[Any] = [record(at, "emails") for at in range(span.read_from, span.end)]
    assert ready_of(span, records).counts == {}
