"""What a streaming query tells of its progress."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery


def read_to(query: StreamingQuery) -> dict[int, int]:
    """Return the first marker offset that the last finished batch did not read, by markers partition."""
    progress = query.lastProgress
    if progress is None or not progress.sources:
        return {}
    end = progress.sources[0].endOffset
    by_topic = json.loads(end) if isinstance(end, str) else (end or {})
    return {int(partition): int(offset) for offsets in by_topic.values() for partition, offset in offsets.items()}


def batch_s(query: StreamingQuery) -> float | None:
    """Return how long the newest batch took, seconds; None before the first."""
    progress = query.lastProgress
    return None if progress is None else progress.durationMs.get("triggerExecution", 0) / 1000
