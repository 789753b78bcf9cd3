"""
Measure a mass expiry: a million messages whose leases end at the same instant.

Reported: messages sent again by second, from the deadline to the append time of the last copy; and how long an END of
the same queue takes meanwhile until it is folded. Then the same flood again, beside another queue of the same Spark
application that redelivers ten messages a second: how late these come, before the flood and in it.
"""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
from confluent_kafka import Producer

from bench.processes import memory_mib
from bench.stage import PARTITIONS, acked_of, every_lateness, markers_of, spread, wait_until
from kmq_spark.core.markers import Marker, MarkerType, OffsetRange
from kmq_spark.wire.codec import encode_marker

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.stage import Bench

LEASE_MS, BESIDE_LEASE_MS = 5_000, 1_000
BESIDE, BESIDE_INTERVAL_S = 1_000, 0.1
"""Messages for what is measured beside the flood, one each time: more than a minute of them."""

FLOODS = 3
_numbers = itertools.count()


def measure(bench: Bench, count: int, *, is_alone: bool = True) -> dict[str, Any]:
    """Return the figures of one mass expiry; beside another queue that is tracked meanwhile, or alone."""
    number, first = next(_numbers), count // PARTITIONS
    queue, other = bench.queue(f"mass-{number}"), bench.queue(f"beside-{number}")
    bench.send(queue.queue_topic, count + BESIDE)
    bench.send(other.queue_topic, BESIDE)
    producer = Producer({"bootstrap.servers": bench.broker.bootstrap_servers, "linger.ms": 0})
    folded_ms: list[float] = []

    def write(topic: str, kind: MarkerType, offset: int, lease_ms: int = 0) -> None:
        covered = (OffsetRange(offset // PARTITIONS, 1),)
        marker = Marker(kind, offset % PARTITIONS, covered, redeliver_after_ms=lease_ms)
        producer.produce(topic, encode_marker(marker), partition=marker.queue_partition)
        producer.flush()

    with ExitStack() as trackers:
        tracker = trackers.enter_context(bench.tracking(queue))
        beside = None if is_alone else trackers.enter_context(bench.tracking(other))
        late = every_lateness(tracker)

        def end_one(at: int) -> None:
            """End a held message, and note how long it took until the tracker said that it knows."""
            write(queue.markers_topic, MarkerType.END, first * PARTITIONS + at)
            written_s = time.monotonic()
            while acked_of(tracker) <= at and not ends.stopping.is_set():
                time.sleep(0.005)
            if not ends.stopping.is_set():
                folded_ms.append((time.monotonic() - written_s) * 1000)

        def start_one(at: int) -> None:
            if beside is not None:
                write(other.markers_topic, MarkerType.START, at, BESIDE_LEASE_MS)

        ends, others = _Repeated(end_one), _Repeated(start_one)
        # Held by another consumer, which acks them one by one during the flood.
        bench.write(queue.markers_topic, markers_of(MarkerType.START, BESIDE, 3_600_000, first=first))
        began_s = time.monotonic()
        bench.write(queue.markers_topic, markers_of(MarkerType.START, count, LEASE_MS))
        others.start()
        wait_until("the first redelivery", lambda: tracker.stats.redelivered > 0)
        calm = len(beside.stats.lateness_ms) if beside else 0
        ends.start()
        peak_mib = 0
        while tracker.stats.redelivered < count:
            peak_mib = max(peak_mib, sum(memory_mib().values()))
            time.sleep(0.2)
        took_s = time.monotonic() - began_s
        for each in (ends, others):
            each.stop()
        lateness_ms, others_ms = np.array(late), list(beside.stats.lateness_ms) if beside else []
    bench.remove(queue)
    bench.remove(other)
    return {
        "messages": count,
        "per_s": round(count / (lateness_ms.max() / 1000)),
        "last_after_deadline_s": round(float(lateness_ms.max()) / 1000, 1),
        "early": int((lateness_ms < 0).sum()),
        "batches": tracker.stats.batches,
        "took_s": round(took_s, 1),
        "peak_rss_mib": peak_mib,
        "end_folded_ms": spread(folded_ms),
        "other_queue_lateness_ms": {"before": spread(others_ms[:calm]), "in_the_flood": spread(others_ms[calm:])},
    }


def measure_all(bench: Bench, count: int) -> dict[str, Any]:
    """Return the flood with the median rate of `FLOODS` alone, and one beside another queue."""
    measure(bench, count // 4)  # a warm-up: this way through tracker and broker is cold
    floods = sorted([measure(bench, count) for _ in range(FLOODS)], key=lambda flood: flood["per_s"])
    rates = [flood["per_s"] for flood in floods]
    return floods[FLOODS // 2] | {"rates": rates, "beside": measure(bench, count, is_alone=False)}


class _Repeated(threading.Thread):
    """Does something ten times a second until stopped."""

    def __init__(self, act: Callable[[int], None]) -> None:
        super().__init__(daemon=True)
        self._act, self.stopping = act, threading.Event()

    def run(self) -> None:
        number = 0
        while not self.stopping.wait(BESIDE_INTERVAL_S) and number < BESIDE:
            self._act(number)
            number += 1

    def stop(self) -> None:
        self.stopping.set()
        self.join()
