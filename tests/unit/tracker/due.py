"""Build messages as the client gives them, and runs of decisions about them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from confluent_kafka import Message

from kmq_spark.core.markers import Outcome
from kmq_spark.tracker.sender.due_decisions import DueRun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kmq_spark.wire.headers import Headers


def message(
    headers: Headers | None = None, at_ms: int = 1_000, value: bytes | None = b"v", key: bytes | None = b"k"
) -> Message:
    """Return a message, appended at *at_ms*."""
    given: list[tuple[str, str | bytes | None]] | None = None if headers is None else list(headers)
    return Message(topic="orders", partition=3, offset=0, key=key, value=value, timestamp=(2, at_ms), headers=given)


def due(
    messages: Sequence[Message | None] = (None,),
    first: int = 7,
    outcome: Outcome = Outcome.REDELIVERED,
    *,
    delivery_count: int = 2,
    reason: str = "",
    marker_partition: int = 0,
    tick_at_ms: int = 5_100,
    is_silent: bool = False,
) -> DueRun:
    """Return a run of decisions on messages of partition 3."""
    return DueRun(marker_partition, 3, first, delivery_count, outcome, reason, 5_000, tick_at_ms, is_silent, messages)
