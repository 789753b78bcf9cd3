"""
Measure `kmq worker --processes N` against `--processes 1`: one partition, a handler that computes.

    .venv/bin/python -m bench.worker_processes --processes 1 2 --messages 400 --rounds 3

In each round each number of processes handles the same number of messages, with a command of its own; the order changes
from round to round. The rate is that of the messages between a tenth and nine tenths of them, read from the worker's
metrics, so starts and stops are not in it. Rates are only compared within a run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kmq_spark.kafka.topics import create_queue_topics
from kmq_spark.local.broker import EmbeddedBroker
from kmq_spark.producer.producer import QueueProducer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kmq_spark.consumer.message import Message

STEPS = 300_000
"""Of a handler; about 20 ms of one core, all of it in Python, so that threads would not help."""

PORT = 19_377
_numbers = itertools.count()


def handle(_message: Message) -> None:
    """Compute."""
    total = 0
    for number in range(STEPS):
        total += number * number


def measure(servers: str, counts: Sequence[int], messages: int, rounds: int) -> dict[str, Any]:
    """Return the median rates by number of processes, and their ratio to the first, round by round."""
    rates: dict[int, list[float]] = {count: [] for count in counts}
    for round_number in range(rounds):
        for count in counts if round_number % 2 == 0 else reversed(counts):
            rates[count].append(_rate(servers, count, messages))
            print(f"round {round_number + 1}: {count} process(es), {rates[count][-1]:.1f}/s", file=sys.stderr)
    first = counts[0]
    return {
        "per_s": {count: round(statistics.median(found), 1) for count, found in rates.items()},
        "ratio": {
            count: round(statistics.median(mine / base for mine, base in zip(found, rates[first], strict=True)), 2)
            for count, found in rates.items()
        },
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
    }


def _rate(servers: str, processes: int, messages: int) -> float:
    queue = f"worker-bench-{next(_numbers)}"
    create_queue_topics(queue, bootstrap_servers=servers, partitions=1)
    with QueueProducer(queue, bootstrap_servers=servers) as producer:
        for number in range(messages):
            producer.send(str(number))
    command = [
        sys.executable, "-m", "kmq_spark.cli.main", "worker", f"{__spec__.name}:handle", queue,
        "--processes", str(processes), "--metrics-port", str(PORT), "--bootstrap-server", servers,
        "--log-level", "WARNING",
    ]  # fmt: skip
    worker = subprocess.Popen(command, cwd=Path(__file__).parent.parent)
    try:
        (begun_s, begun), (ended_s, ended) = _at(messages // 10), _at(messages * 9 // 10)
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.wait()
    return (ended - begun) / (ended_s - begun_s)


def _at(count: int) -> tuple[float, float]:
    """Wait until so many messages are acknowledged; return when that was seen, and how many they were."""
    while True:
        time.sleep(0.02)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=10) as page:
                found = re.search(r"^kmq_acks_total\{.*\} (.*)$", page.read().decode(), re.MULTILINE)
        except OSError:  # it does not listen yet
            continue
        if found is not None and float(found[1]) >= count:
            return time.monotonic(), float(found[1])


def main() -> None:
    """Measure on a broker of its own and print a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--messages", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with EmbeddedBroker() as broker:
        print(json.dumps(measure(broker.bootstrap_servers, given.processes, given.messages, given.rounds)))


if __name__ == "__main__":
    main()
