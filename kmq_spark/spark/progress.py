"""What a streaming query tells of its progress."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql.streaming.query import StreamingQuery


def read_to(query: StreamingQuery) -> dict[int, int]:
    """Return the first marker offset that the last finished batch did not read, by markers partition."""
    progress = query.lastProgress
    if progress is None or not progress.sources:
        return {}
    end = progress.sources[0].endOffset
    by_topic = json.loads(end) if isinstance(end, str) else (end or {})
    return {int(partition): int(offset) for offsets in by_topic.values() for partition, offset in offsets.items()}


def batch_s(query: StreamingQuery, rests_s: Mapping[int, float]) -> float | None:
    """
    Return how long the newest batch worked, seconds; None before the first.

    Args:
        query: A query.
        rests_s: How long the newest batches rested at their end, by their number.
    """
    progress = query.lastProgress
    if progress is None:
        return None
    return max(0.0, progress.durationMs.get("triggerExecution", 0) / 1000 - rests_s.get(progress.batchId, 0.0))
