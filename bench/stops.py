"""
Measure how long a tracker takes to stop beside busy consumers.

    .venv/bin/python -m bench.stops [stops, default 10]

A process of its own writes what consumers at full speed write: a START for 500 messages and its END, 700 of each a
second, with leases of 30 s.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from confluent_kafka import Producer

from bench.stage import PARTITIONS, PER_MARKER, Bench
from kmq_spark.core.markers import Marker, MarkerType, OffsetRange
from kmq_spark.wire.codec import encode_marker

if TYPE_CHECKING:
    from collections.abc import Iterator

LEASE_MS = 30_000
STARTS_PER_S = 700
CHUNKS = 500
"""So many times `PER_MARKER` messages has each queue partition; they are started and ended again and again."""
ROUND_S = 0.02


def main(stops: int = 10) -> dict[str, Any]:
    """Return how long each stop took, seconds, and the median."""
    bench = Bench()
    try:
        queue = bench.queue("stops")
        bench.send(queue.queue_topic, CHUNKS * PER_MARKER * PARTITIONS, size=10)
        stop_s: list[float] = []
        with _busy(bench.broker.bootstrap_servers, queue.markers_topic):
            for number in range(stops):
                with bench.tracking(queue):
                    time.sleep(3 + number * 0.37)  # at any moment of a batch and of a pause
                    began_s = time.monotonic()
                stop_s.append(round(time.monotonic() - began_s, 2))
        return {"stop_s": stop_s, "p50_s": statistics.median(stop_s)}
    finally:
        bench.close()


@contextmanager
def _busy(bootstrap_servers: str, topic: str) -> Iterator[None]:
    writer = multiprocessing.get_context("spawn").Process(target=_write, args=(bootstrap_servers, topic), daemon=True)
    writer.start()
    try:
        yield
    finally:
        writer.terminate()
        writer.join()


def _write(bootstrap_servers: str, topic: str) -> None:
    """Write STARTs and, a second later, their ENDs, until this process is ended."""
    producer = Producer({"bootstrap.servers": bootstrap_servers, "linger.ms": 5})
    begun, ended, began_s = 0, 0, time.monotonic()
    while True:
        wanted = int((time.monotonic() - began_s) * STARTS_PER_S)
        for kind, numbers in (
            (MarkerType.START, range(begun, wanted)),
            (MarkerType.END, range(ended, max(ended, wanted - STARTS_PER_S))),
        ):
            for number in numbers:
                covered = (OffsetRange(number // PARTITIONS % CHUNKS * PER_MARKER, PER_MARKER),)
                lease_ms = LEASE_MS if kind is MarkerType.START else 0
                partition = number % PARTITIONS
                value = encode_marker(Marker(kind, partition, covered, redeliver_after_ms=lease_ms))
                producer.produce(topic, value, partition=partition)
        begun, ended = wanted, max(ended, wanted - STARTS_PER_S)
        producer.poll(ROUND_S)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*(int(argument) for argument in sys.argv[1:]))) + "\n")
