"""
Measure what a tracker costs beside busy consumers while nothing is due, and how long it takes to stop then.

    .venv/bin/python -m bench.pacing [seconds, default 60] [stops, default 10]

A process of its own writes what consumers at full speed write: a START for 500 messages and its END, 700 of each a
second, with leases of 30 s. CPU is of the tracker's processes: the driver (this process), its JVM and its workers.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confluent_kafka import Producer

from bench.stage import PARTITIONS, PER_MARKER, Bench, kind_of
from kmq_spark.core.markers import Marker, MarkerType, OffsetRange
from kmq_spark.wire.codec import encode_marker

if TYPE_CHECKING:
    from collections.abc import Iterator

LEASE_MS = 30_000
STARTS_PER_S = 700
CHUNKS = 500
"""So many times `PER_MARKER` messages has each queue partition; they are started and ended again and again."""
ROUND_S = 0.02
WARM_UP_S = 30.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def main(seconds: float = 60, stops: int = 10) -> dict[str, Any]:
    """Return cores by process class over so many seconds, batches in them, and the durations of the stops, seconds."""
    bench = Bench()
    try:
        queue = bench.queue("pacing")
        bench.send(queue.queue_topic, CHUNKS * PER_MARKER * PARTITIONS, size=10)
        with _busy(bench.broker.bootstrap_servers, queue.markers_topic):
            stop_s: list[float] = []
            with bench.tracking(queue) as tracker:
                time.sleep(WARM_UP_S)
                first, before = _newest_batch(bench), cpu_s()
                time.sleep(seconds)
                cores = {name: round((spent - before[name]) / seconds, 3) for name, spent in cpu_s().items()}
                batches = _newest_batch(bench) - first
                in_flight = sum(status.in_flight for status in tracker.stats.statuses.values())
            for number in range(stops):
                with bench.tracking(queue):
                    time.sleep(3 + number * 0.37)  # at any moment of a batch and of a pause
                    began_s = time.monotonic()
                stop_s.append(round(time.monotonic() - began_s, 2))
        return {
            "cores": cores, "all": round(sum(cores.values()), 3), "batches": batches, "in_flight": in_flight,
            "stop_s": stop_s, "stop_p50_s": statistics.median(stop_s) if stop_s else None,
        }  # fmt: skip
    finally:
        bench.close()


def _newest_batch(bench: Bench) -> int:
    (query,) = bench.spark.streams.active
    progress = query.lastProgress
    return -1 if progress is None else progress.batchId


def cpu_s() -> dict[str, float]:
    """
    Return the processor time so far of this process, of its Spark JVM and of its Python workers, seconds.

    Only descendants of this process count: other Spark sessions may run on the machine.
    """
    found = {"driver_python": 0.0, "jvm": 0.0, "workers": 0.0}
    own = Path("/proc/self").resolve().name
    parents: dict[str, str] = {}
    spent: dict[str, tuple[str, float]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            kind = kind_of((folder / "cmdline").read_bytes(), is_own=folder.name == own)
            fields = (folder / "stat").read_text(encoding="ascii").rpartition(")")[2].split()
        except OSError:
            continue
        parents[folder.name] = fields[1]
        if kind:
            # Its own time, and for the daemon of the workers that of those that have ended.
            parts = fields[11:15] if kind == "workers" else fields[11:13]
            spent[folder.name] = kind, sum(map(int, parts)) / _TICKS_PER_S
    for process, (kind, seconds) in spent.items():
        ancestor = process
        while ancestor not in {own, "0", ""}:
            ancestor = parents.get(ancestor, "")
        if ancestor == own:
            found[kind] += seconds
    return found


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
