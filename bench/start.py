"""
Measure how long a tracker takes from its start to its first batch, without and with the archive of Spark's classes.

    .venv/bin/python -m bench.start [--rounds 5]

Both run by turns, each in a process of its own, as `kmq tracker run` starts it. `cpu_s` is the processor time of the
process and of its JVM until it was ready. Without the archive means with an empty cache directory; the archive is built
first, where it is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.processes import cpu_s
from kmq_spark.kafka.topics import create_queue
from kmq_spark.local.broker import EmbeddedBroker
from kmq_spark.local.jars import cache_directory, jar_paths
from kmq_spark.spark.class_archive import build_archive


def main(rounds: int) -> dict[str, Any]:
    """Measure; return medians and every single figure."""
    build_archive(jar_paths("spark"))
    jars = cache_directory()
    found: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    with EmbeddedBroker() as broker, tempfile.TemporaryDirectory() as empty:
        queue = create_queue("bench", bootstrap_servers=broker.bootstrap_servers, partitions=4).topics.queue
        _start(broker.bootstrap_servers, queue, {})  # files into the system's cache
        for _ in range(rounds):
            for name, caches in (("without", {"XDG_CACHE_HOME": empty, "KMQ_JARS_DIR": str(jars)}), ("with", {})):
                found[name].append(_start(broker.bootstrap_servers, queue, caches))
                print(name, found[name][-1], file=sys.stderr, flush=True)
    medians = {
        name: {key: round(statistics.median(one[key] for one in runs), 1) for key in ("ready_s", "cpu_s")}
        for name, runs in found.items()
    }
    ratios = {key: round(medians["with"][key] / medians["without"][key], 2) for key in ("ready_s", "cpu_s")}
    return {"rounds": rounds, "medians": medians, "with_to_without": ratios, "runs": found}


def _start(servers: str, queue: str, environment: dict[str, str]) -> dict[str, float]:
    """Start a tracker with a new checkpoint, wait until it is ready, and stop it; return what that took."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "kmq_spark.cli.main", "tracker", "run", queue, "--events"),
            *("--bootstrap-server", servers, "--checkpoint-dir", folder),
        ]
        began_s = time.monotonic()
        with Path(folder, "tracker.log").open("wb") as log:
            tracker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env={**os.environ, **environment})
        try:
            assert tracker.stdout is not None
            event = json.loads(tracker.stdout.readline() or b"{}").get("event")
            took_s = time.monotonic() - began_s
            if event != "ready":
                message = (
                    f"the tracker did not get ready: got {event}\n{Path(folder, 'tracker.log').read_text('utf-8')}"
                )
                raise RuntimeError(message)
            return {"ready_s": round(took_s, 2), "cpu_s": round(cpu_s(tracker.pid), 2)}
        finally:
            tracker.terminate()
            tracker.communicate()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure the start of a tracker with and without the class archive.")
    parser.add_argument("--rounds", type=int, default=5)
    print(json.dumps(main(parser.parse_args().rounds)))
