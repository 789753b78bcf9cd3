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


SNAPSHOT_METRIC = "SnapshotLastUploaded."
"""How Spark's instance metrics of a state store begin that name the newest version whose snapshot was uploaded."""


SNAPSHOT_LATE_BATCHES = 300
"""Batches without a snapshot from which on something is wrong: Spark uploads one every ten seconds or so."""


def batches_since_snapshot(query: StreamingQuery, first_batch: int) -> int:
    """
    Return how many batches the state's oldest newest snapshot lies behind; on any file system.

    Args:
        query: A query.
        first_batch: Number of the first batch since the query was started, -1 before it; Spark forgets earlier uploads.
    """
    progress = query.lastProgress
    if progress is None or not progress.stateOperators:
        return 0
    metrics = progress.stateOperators[0].customMetrics
    if first_batch < 0:
        return 0
    uploaded = [version for name, version in metrics.items() if name.startswith(SNAPSHOT_METRIC)]
    newest = max(min(uploaded, default=first_batch), first_batch)
    return max(0, progress.batchId + 1 - newest)


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
