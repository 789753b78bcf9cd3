"""
Measure what a tracker costs while nothing is due: cores, beside a consumer at full speed.

A consumer takes batches from a full queue, leases of 30 s, one `ack()` a batch. The cores are the CPU of the tracker's
processes (this one, which does nothing else meanwhile, Spark's JVM, its Python workers) from before the consumer starts
until its last END is folded, divided by the seconds in which it worked. The queue may be empty sooner: fewer seconds
then. On Linux only.
"""

from __future__ import annotations

import sys
from typing import Any

from bench.processes import HAS_PROC, cpu_by_class
from bench.stage import Bench, acked_of
from bench.throughput import contend, let_fold, wait_until_folded

SIZE = 100
TRACKER = ("driver", "jvm", "workers")
WARM_UP_FOLDS = 40
"""Trackers run for weeks. After a dozen folds the JVM still compiles, which is a third of its CPU in the next 20 s."""


def measure(bench: Bench, seconds: float, messages: int) -> dict[str, Any]:
    """
    Return the cores of a tracker, by class of its processes and in total, and how fast its consumer was.

    Args:
        bench: Broker and Spark.
        seconds: How long the consumer works.
        messages: In the queue before it starts: enough for that time.
    """
    if not HAS_PROC:
        sys.stderr.write("no /proc on this system: the tracker's cores are left out\n")
        return {}
    queue = bench.queue("busy")
    try:
        bench.send(queue.queue_topic, messages, SIZE)
        with bench.tracking(queue) as tracker:
            let_fold(bench, tracker, queue.markers_topic, WARM_UP_FOLDS)
            acked, batches = acked_of(tracker), tracker.stats.batches
            before = cpu_by_class(bench.broker.pid)
            (result,) = contend(
                "batch", 1, bootstrap_servers=bench.broker.bootstrap_servers, topic=queue.queue, group=queue.queue,
                messages=messages, seconds=seconds,
            )  # fmt: skip
            wait_until_folded(tracker, acked + result["messages"])
            after = cpu_by_class(bench.broker.pid)
            batches = tracker.stats.batches - batches
    finally:
        bench.remove(queue)
    worked_s = result["last_s"] - result["first_s"]
    cores = {name: (after[name] - before[name]) / worked_s for name in TRACKER}
    return {
        "cores": round(sum(cores.values()), 3),
        "by_class": {name: round(value, 3) for name, value in cores.items()},
        "seconds": round(worked_s, 1),
        "messages": result["messages"],
        "per_s": round(result["messages"] / worked_s),
        "batches": batches,
    }
