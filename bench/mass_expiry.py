"""
Measure a mass expiry: a million messages whose leases end at the same instant.

    .venv/bin/python -m bench.mass_expiry [messages, default 1000000]

Reported: messages sent again by second, from the deadline to the append time of the last copy; and what a flood of
redeliveries must not hold up. Measured beside it: how long an END of the same queue takes until it is folded. Then
the same flood again, beside another queue of the same Spark application that redelivers ten messages a second: how late
these come, before the flood and in it. A batch of that queue uses the same cores.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
from confluent_kafka import Producer

from bench.processes import memory_mib
from bench.stage import Bench, every_lateness, markers_of, spread, wait_until
from kmq_spark.core.markers import Marker, MarkerType, OffsetRange
from kmq_spark.wire.codec import encode_marker

if TYPE_CHECKING:
    from collections.abc import Callable

    from kmq_spark.tracker.queue_tracker import QueueTracker

LEASE_MS = 5_000
BESIDE = 1_000
"""Messages for what is measured beside the flood: more than a minute of them."""
BESIDE_INTERVAL_S = 0.1
BESIDE_LEASE_MS = 1_000
PARTITIONS = 4
FLOODS = 3
_numbers = itertools.count()


def measure(bench: Bench, count: int, *, is_alone: bool = True) -> dict[str, Any]:
    """
    Return the figures of one mass expiry.

    Args:
        bench: Broker and Spark.
        count: Messages.
        is_alone: Whether no other queue is tracked meanwhile.
    """
    number = next(_numbers)
    queue = bench.queue(f"mass-{number}")
    other = None if is_alone else bench.queue(f"beside-{number}")
    bench.send(queue.queue_topic, count + BESIDE)
    if other is not None:
        bench.send(other.queue_topic, BESIDE)
    producer = Producer({"bootstrap.servers": bench.broker.bootstrap_servers, "linger.ms": 0})
    with ExitStack() as trackers:
        tracker = trackers.enter_context(bench.tracking(queue))
        beside = None if other is None else trackers.enter_context(bench.tracking(other))
        late = every_lateness(tracker)
        # Held by another consumer, which acks them one by one during the flood.
        held = markers_of(MarkerType.START, BESIDE, 3_600_000, first=count // PARTITIONS)
        bench.write(queue.markers_topic, held)
        ends = _Ends(producer, queue.markers_topic, count // PARTITIONS, tracker)
        others = _Repeated(lambda number: _start_one(producer, other.markers_topic, number) if other else None)
        began_s = time.monotonic()
        bench.write(queue.markers_topic, markers_of(MarkerType.START, count, LEASE_MS))
        others.start()
        wait_until("the first redelivery", lambda: tracker.stats.redelivered > 0)
        calm = len(beside.stats.lateness_ms) if beside else 0
        ends.start()
        peak = _peak_until(lambda: tracker.stats.redelivered >= count)
        took_s = time.monotonic() - began_s
        for each in (ends, others):
            each.stop()
        lateness_ms = np.array(late)
        others_ms = list(beside.stats.lateness_ms) if beside else []
    bench.remove(queue)
    if other is not None:
        bench.remove(other)
    return {
        "messages": count,
        "per_s": round(count / (lateness_ms.max() / 1000)),
        "last_after_deadline_s": round(float(lateness_ms.max()) / 1000, 1),
        "early": int((lateness_ms < 0).sum()),
        "batches": tracker.stats.batches,
        "took_s": round(took_s, 1),
        "peak_rss_mib": peak,
        "end_folded_ms": spread(ends.folded_ms),
        "other_queue_lateness_ms": {"before": spread(others_ms[:calm]), "in_the_flood": spread(others_ms[calm:])},
    }


def measure_all(bench: Bench, count: int) -> dict[str, Any]:
    """Return the flood with the median rate of `FLOODS` alone, and one beside another queue."""
    measure(bench, count // 4)  # a warm-up: this way through tracker and broker is cold
    floods = sorted([measure(bench, count) for _ in range(FLOODS)], key=lambda flood: flood["per_s"])
    rates = [flood["per_s"] for flood in floods]
    return floods[FLOODS // 2] | {"rates": rates, "beside": measure(bench, count, is_alone=False)}


def _peak_until(is_done: Callable[[], bool]) -> int:
    """Wait; return the most memory that driver, JVM and workers had meanwhile, MiB."""
    peak = 0

    def look() -> bool:
        nonlocal peak
        peak = max(peak, sum(memory_mib().values()))
        time.sleep(0.2)
        return is_done()

    wait_until("the last redelivery", look, 600)
    return peak


def _start_one(producer: Producer, topic: str, number: int) -> None:
    covered = (OffsetRange(number // PARTITIONS, 1),)
    _write(producer, topic, Marker(MarkerType.START, number % PARTITIONS, covered, redeliver_after_ms=BESIDE_LEASE_MS))


def _write(producer: Producer, topic: str, marker: Marker) -> None:
    producer.produce(topic, encode_marker(marker), partition=marker.queue_partition)
    producer.flush()


class _Repeated(threading.Thread):
    """Does something ten times a second until stopped."""

    def __init__(self, act: Callable[[int], None]) -> None:
        super().__init__(daemon=True)
        self._act = act
        self._stopping = threading.Event()

    def run(self) -> None:
        number = 0
        while not self._stopping.wait(BESIDE_INTERVAL_S) and number < BESIDE:
            self._act(number)
            number += 1

    def stop(self) -> None:
        self._stopping.set()
        self.join()


class _Ends(_Repeated):
    """Ends a held message each time, and notes how long it took until the tracker said that it knows."""

    def __init__(self, producer: Producer, topic: str, first: int, tracker: QueueTracker) -> None:
        super().__init__(self._end_one)
        self._producer = producer
        self._topic = topic
        self._first = first
        self._tracker = tracker
        self.folded_ms: list[float] = []

    def _end_one(self, number: int) -> None:
        covered = (OffsetRange(self._first + number // PARTITIONS, 1),)
        _write(self._producer, self._topic, Marker(MarkerType.END, number % PARTITIONS, covered))
        written_s = time.monotonic()
        while self._acked() <= number and not self._stopping.is_set():
            time.sleep(0.005)
        if not self._stopping.is_set():
            self.folded_ms.append((time.monotonic() - written_s) * 1000)

    def _acked(self) -> int:
        return sum(status.counters["acked"] for status in list(self._tracker.stats.statuses.values()))


def main(count: int = 1_000_000) -> dict[str, Any]:
    """Measure once."""
    bench = Bench()
    try:
        return measure_all(bench, count)
    finally:
        bench.close()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*map(int, sys.argv[1:]))) + "\n")
