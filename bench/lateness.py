"""
Measure how late redeliveries come: messages that expire at a steady rate, on a real broker and a real tracker.

Lateness is the append time of the redelivered record less the deadline (append time of the START plus the lease): the
broker's clock on both sides. The first half is left out: trackers run for weeks, and in its first minute half of two
cores is Java's compiler.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
from confluent_kafka import Producer

from bench.stage import PARTITIONS, every_lateness, spread
from kmq_spark.core.markers import Marker, MarkerType, OffsetRange
from kmq_spark.wire.codec import encode_marker

if TYPE_CHECKING:
    from bench.stage import Bench

LEASE_MS = 2_000


def measure(bench: Bench, rate_per_s: int, seconds: int) -> dict[str, Any]:
    """Start messages as a consumer would and never end them; return the figures."""
    queue = bench.queue(f"late-{rate_per_s}")
    size = max(1, rate_per_s // 1_000)
    bench.send(queue.queue_topic, rate_per_s * seconds + PARTITIONS * size)
    with bench.tracking(queue) as tracker:
        late = every_lateness(tracker)
        _start_messages(bench.broker.bootstrap_servers, queue.markers_topic, rate_per_s, seconds, size)
        time.sleep(LEASE_MS / 1000 + 3)
    bench.remove(queue)
    measured = np.array(late)
    return {
        "redelivered": tracker.stats.redelivered,
        "batches": tracker.stats.batches,
        "early": int((measured < 0).sum()),
        "lateness_ms": spread(measured[len(measured) // 2 :]),
    }


def _start_messages(bootstrap_servers: str, topic: str, rate_per_s: int, seconds: int, size: int) -> None:
    """Write STARTs evenly over time; above a thousand a second each covers some messages, as a consumer's do."""
    producer = Producer({"bootstrap.servers": bootstrap_servers, "linger.ms": 0})
    began_s = time.monotonic()
    for number in range(rate_per_s * seconds // size):
        pause_s = began_s + number * size / rate_per_s - time.monotonic()
        if pause_s > 0:
            producer.poll(0)
            time.sleep(pause_s)
        partition, covered = number % PARTITIONS, (OffsetRange(number // PARTITIONS * size, size),)
        start = Marker(MarkerType.START, partition, covered, redeliver_after_ms=LEASE_MS)
        producer.produce(topic, encode_marker(start), partition=partition)
    producer.flush()
