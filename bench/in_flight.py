"""
Measure what the tracker costs with many messages in flight: a TICK, a million events, its state, its memory.

The whole way is measured: Kafka source, Python worker, state store, foreachBatch. The queue topic has all the messages,
empty ones: a tracker drops what it does not have. `scattered`: no two messages are neighbours, the gaps between them
are of 1 to 4 by chance; else they lie in runs, as a consumer leaves them.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

from bench.processes import memory_mib
from bench.stage import PARTITIONS, Bench, acked_of, markers_of, wait_until
from kmq_spark.core.markers import Marker, MarkerType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kmq_spark.tracker.queue_tracker import QueueTracker

HOUR_MS = 3_600_000
EVENTS = 1_000_000
TICKS = 12
WIDEST_GAP = 5


def tick_ms_by_partitions(bench: Bench, counts: Sequence[int]) -> dict[str, int]:
    """Return how long a batch with a TICK in every markers partition takes, ms, by their number; few are in flight."""
    found = {}
    for partitions in counts:
        queue = bench.queue(f"flight-of-{partitions}", partitions)
        bench.send(queue.queue_topic, partitions, 0, partitions)
        with bench.tracking(queue) as tracker:
            bench.write(queue.markers_topic, markers_of(MarkerType.START, partitions, HOUR_MS, partitions=partitions))
            wait_until("the START markers", lambda tracker=tracker, most=partitions: _in_flight(tracker) >= most)
            ticks = [_tick_ms(bench, queue.markers_topic, partitions) for _ in range(TICKS)]
        found[str(partitions)] = round(statistics.median(ticks))
    return found


def measure(bench: Bench, in_flight: int, *, scattered: bool) -> dict[str, Any]:
    """Return the figures for so many messages in flight."""
    kind = "scattered" if scattered else "runs"
    queue = bench.queue(f"flight-{in_flight}-{kind}")
    gap = WIDEST_GAP if scattered else 1
    # All must exist: a tracker drops what the queue topic does not have.
    bench.send(queue.queue_topic, in_flight * gap + EVENTS // 2, 0)
    with bench.tracking(queue, max_markers_per_batch=1_000_000) as tracker:
        bench.write(queue.markers_topic, markers_of(MarkerType.START, in_flight, HOUR_MS, gap=gap))
        wait_until("the START markers", lambda: _in_flight(tracker) >= in_flight // PARTITIONS * PARTITIONS)
        tick_ms = statistics.median(_tick_ms(bench, queue.markers_topic) for _ in range(TICKS))
        memory = memory_mib()
        still = _in_flight(tracker)
        events_per_s = _events_per_s(bench, tracker, queue.markers_topic, first=in_flight * gap // PARTITIONS)
    if still < in_flight // PARTITIONS * PARTITIONS:
        message = f"the tracker has {still} of {in_flight} messages in flight after the TICKs; the figures are of less"
        raise RuntimeError(message)
    state_bytes = _state_bytes(bench, queue.queue)
    bench.remove(queue)
    return {
        "in_flight": in_flight,
        "kind": kind,
        "tick_ms": round(tick_ms),
        "events_per_s": round(events_per_s),
        "rss_mib": sum(memory.values()),
        "rss": memory,
        "state_bytes": state_bytes,
    }


def _in_flight(tracker: QueueTracker) -> int:
    return sum(status.in_flight for status in tracker.stats.statuses.values())


def _progress(bench: Bench) -> Any:  # noqa: ANN401  # of PySpark
    (query,) = bench.spark.streams.active
    return query.lastProgress


def _tick_ms(bench: Bench, topic: str, partitions: int = PARTITIONS) -> float:
    """Write a TICK to every partition and return how long the batch took that read them."""
    before = _progress(bench).batchId
    bench.write(topic, (Marker(MarkerType.TICK, partition) for partition in range(partitions)))
    wait_until("a batch with TICKs", lambda: _progress(bench).batchId > before and _progress(bench).numInputRows > 0)
    return float(_progress(bench).durationMs["triggerExecution"])


def _events_per_s(bench: Bench, tracker: QueueTracker, topic: str, first: int) -> float:
    """Start and end a million messages beside those in flight; return events by second, from written to folded."""
    acked = acked_of(tracker)
    half = EVENTS // 2
    began_s = time.monotonic()
    for kind in (MarkerType.START, MarkerType.END):
        bench.write(topic, markers_of(kind, half, HOUR_MS if kind is MarkerType.START else 0, first=first))
    wait_until("the ENDs", lambda: acked_of(tracker) >= acked + half)
    return EVENTS / (time.monotonic() - began_s)


def _state_bytes(bench: Bench, queue: str) -> int:
    """Return what the newest state takes on disk: changelogs and snapshots of the checkpoint, compressed."""
    folder = bench.folder / queue / "state"
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.name.startswith("."))
