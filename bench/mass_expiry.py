"""
Measure a mass expiry: a million messages whose leases end at the same instant.

Reported: messages sent again by second, from the deadline to the append time of the last copy; and how long an END of
the same queue takes meanwhile until it is folded.
"""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from confluent_kafka import Producer

from bench.processes import memory_mib
from bench.stage import PARTITIONS, acked_of, every_lateness, markers_of, spread, wait_until
from kmq_spark.core.markers import Marker, MarkerType, OffsetRange
from kmq_spark.wire.codec import encode_marker

if TYPE_CHECKING:
    from bench.stage import Bench
    from kmq_spark.tracker.queue_tracker import QueueTracker

LEASE_MS = 5_000
HELD, END_INTERVAL_S = 1_000, 0.1
"""Messages that another consumer holds and acks during the flood, one each time: more than a minute of them."""

FLOODS = 3
_numbers = itertools.count()


def measure(bench: Bench, count: int) -> dict[str, Any]:
    """Return the figures of one mass expiry."""
    queue, first = bench.queue(f"mass-{next(_numbers)}"), count // PARTITIONS
    bench.send(queue.queue_topic, count + HELD)
    with bench.tracking(queue) as tracker, ThreadPoolExecutor() as pool:
        late = every_lateness(tracker)
        bench.write(queue.markers_topic, markers_of(MarkerType.START, HELD, 3_600_000, first=first))
        began_s = time.monotonic()
        bench.write(queue.markers_topic, markers_of(MarkerType.START, count, LEASE_MS))
        wait_until("the first redelivery", lambda: tracker.stats.redelivered > 0)
        stopping = threading.Event()
        acks = pool.submit(_ack_one_by_one, bench, tracker, queue.markers_topic, first, stopping)
        peak_mib = 0
        while tracker.stats.redelivered < count:
            peak_mib = max(peak_mib, sum(memory_mib().values()))
            time.sleep(0.2)
        took_s = time.monotonic() - began_s
        stopping.set()
        folded_ms = acks.result()
    bench.remove(queue)
    lateness_ms = np.array(late)
    return {
        "messages": count,
        "per_s": round(count / (lateness_ms.max() / 1000)),
        "last_after_deadline_s": round(float(lateness_ms.max()) / 1000, 1),
        "early": int((lateness_ms < 0).sum()),
        "batches": tracker.stats.batches,
        "took_s": round(took_s, 1),
        "peak_rss_mib": peak_mib,
        "end_folded_ms": spread(folded_ms),
    }


def _ack_one_by_one(
    bench: Bench, tracker: QueueTracker, topic: str, first: int, stopping: threading.Event
) -> list[float]:
    """End held messages; return how long each took, ms, until the tracker had counted it."""
    folded_ms: list[float] = []
    producer = Producer({"bootstrap.servers": bench.broker.bootstrap_servers, "linger.ms": 0})
    for number in range(HELD):
        partition, offset = number % PARTITIONS, first + number // PARTITIONS
        marker = Marker(MarkerType.END, partition, (OffsetRange(offset, 1),))
        producer.produce(topic, encode_marker(marker), partition=partition)
        producer.flush()
        written_s = time.monotonic()
        while acked_of(tracker) <= number:
            if stopping.wait(0.005):
                return folded_ms
        folded_ms.append((time.monotonic() - written_s) * 1000)
        if stopping.wait(END_INTERVAL_S):
            break
    return folded_ms


def measure_all(bench: Bench, count: int) -> dict[str, Any]:
    """Return the flood with the median rate of `FLOODS`."""
    measure(bench, count // 4)  # a warm-up: this way through tracker and broker is cold
    floods = sorted([measure(bench, count) for _ in range(FLOODS)], key=lambda flood: flood["per_s"])
    return floods[FLOODS // 2] | {"rates": [flood["per_s"] for flood in floods]}
