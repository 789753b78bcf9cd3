"""
Measure how late redeliveries come: messages that expire at a steady rate, on a real broker and a real tracker.

    .venv/bin/python -m bench.lateness [expiries a second, default 100] [partitions, default 4] [seconds, default 120]

Lateness is the append time of the redelivered record less the deadline (append time of the START plus the lease): the
broker's clock on both sides. The first half is left out: trackers run for weeks, and in its first minute half of two
cores is Java's compiler. `windows` are six equal parts of the whole, the cold start
included.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from typing import Any

import numpy as np
from confluent_kafka import Producer

from bench.stage import every_lateness, spread
from kmq_spark.config import load_settings
from kmq_spark.core.markers import Marker, MarkerType, OffsetRange
from kmq_spark.kafka.topics import create_queue
from kmq_spark.local.broker import EmbeddedBroker
from kmq_spark.local.jars import jar_paths
from kmq_spark.producer.producer import QueueProducer
from kmq_spark.spark.session import build_session, session_settings
from kmq_spark.tracker.queue_tracker import QueueTracker
from kmq_spark.wire.codec import encode_marker

LEASE_MS = 2_000
MESSAGE_BYTES = 200
WINDOWS = 6


def main(rate_per_s: int = 100, partitions: int = 4, seconds: int = 120) -> dict[str, Any]:
    """Start messages as a consumer would and never end them; return the figures."""
    with EmbeddedBroker() as broker, tempfile.TemporaryDirectory() as folder:
        queue = create_queue("bench", bootstrap_servers=broker.bootstrap_servers, partitions=partitions).topics
        with QueueProducer(queue.queue, bootstrap_servers=broker.bootstrap_servers) as producer:
            for number in range(rate_per_s * seconds + partitions * max(1, rate_per_s // 1_000)):
                producer.send(bytes(MESSAGE_BYTES), partition=number % partitions)
        settings = load_settings(
            None,
            {
                "kafka": {"bootstrap_servers": broker.bootstrap_servers},
                "tracker": {"checkpoint_dir": folder},
            },
        )
        spark = build_session("kmq-bench", master="local[2]", settings=session_settings(jar_paths("spark")))
        tracker = QueueTracker(spark, queue.queue, settings)
        late = every_lateness(tracker)
        thread = threading.Thread(target=tracker.run)
        thread.start()
        tracker.wait_ready(120)
        _start_messages(broker.bootstrap_servers, queue.markers_topic, rate_per_s, partitions, seconds)
        time.sleep(LEASE_MS / 1000 + 3)
        tracker.stop()
        thread.join()
        spark.stop()
    measured = np.array(late)
    warm = measured[len(measured) // 2 :]
    return {
        "expiries_per_s": rate_per_s,
        "partitions": partitions,
        "redelivered": tracker.stats.redelivered,
        "batches": tracker.stats.batches,
        "early": int((measured < 0).sum()),
        "lateness_ms": spread(warm),
        "windows": [spread(part) for part in np.array_split(measured, WINDOWS) if len(part)],
    }


def _start_messages(bootstrap_servers: str, topic: str, rate_per_s: int, partitions: int, seconds: int) -> None:
    """Write STARTs evenly over time; above a thousand a second each covers some messages, as a consumer's do."""
    producer = Producer({"bootstrap.servers": bootstrap_servers, "linger.ms": 0})
    began_s = time.monotonic()
    size = max(1, rate_per_s // 1_000)
    for number in range(rate_per_s * seconds // size):
        pause_s = began_s + number * size / rate_per_s - time.monotonic()
        if pause_s > 0:
            producer.poll(0)
            time.sleep(pause_s)
        covered = (OffsetRange(number // partitions * size, size),)
        start = Marker(MarkerType.START, number % partitions, covered, redeliver_after_ms=LEASE_MS)
        producer.produce(topic, encode_marker(start), partition=number % partitions)
    producer.flush()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*map(int, sys.argv[1:]))) + "\n")
