"""Read the progress reports of a streaming query."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql.streaming.query import StreamingQuery


def read_to(query: StreamingQuery) -> dict[int, int]:
    """Return the end offset of the last finished batch by markers partition: the first marker that it did not read."""
    progress = query.lastProgress
    if progress is None or not progress.sources:
        return {}
    end = progress.sources[0].endOffset
    by_topic = json.loads(end) if isinstance(end, str) else (end or {})
    return {int(partition): int(offset) for offsets in by_topic.values() for partition, offset in offsets.items()}


SNAPSHOT_METRIC = "SnapshotLastUploaded."
"""Prefix of the metric, one per state store, that contains the newest version whose snapshot Spark has uploaded."""


SNAPSHOT_LATE_BATCHES = 300
"""More batches than this without a snapshot are a problem: Spark uploads one about every ten seconds."""


def batches_since_snapshot(query: StreamingQuery, first_batch: int) -> int:
    """
    Return how many batches ago the newest snapshot of the state was uploaded.

    Of several state stores the one with the oldest snapshot counts. The number is from Spark's metrics, so it is
    available for a checkpoint on any file system.
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


def batch_s(query: StreamingQuery, pauses_s: Mapping[int, float]) -> float | None:
    """Return the duration of the newest batch without its pause, seconds; None before the first batch."""
    progress = query.lastProgress
    if progress is None:
        return None
    return max(0.0, progress.durationMs.get("triggerExecution", 0) / 1000 - pauses_s.get(progress.batchId, 0.0))
