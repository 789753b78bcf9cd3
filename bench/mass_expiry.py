"""
Measure a mass expiry: a million messages whose leases end at the same instant.

    .venv/bin/python -m bench.mass_expiry [messages, default 1000000]

Reported: messages sent again by second, between the append times of the first and the last copy; and how late an END
beside them was folded, since a flood of redeliveries must not hold up what consumers say.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

from bench.stage import Bench, markers_of, memory_mib, wait_until
from kmq_spark.core.markers import MarkerType

LEASE_MS = 5_000


def measure(bench: Bench, count: int) -> dict[str, Any]:
    """Return the figures of one mass expiry."""
    queue = bench.queue(f"mass-{count}")
    bench.send(queue.queue_topic, count)
    with bench.tracking(queue) as tracker:
        began_s = time.monotonic()
        bench.write(queue.markers_topic, markers_of(MarkerType.START, count, LEASE_MS))
        peak = 0

        def is_done() -> bool:
            nonlocal peak
            peak = max(peak, sum(memory_mib().values()))
            time.sleep(0.2)
            return tracker.stats.redelivered >= count

        wait_until("the last redelivery", is_done, 600)
        took_s = time.monotonic() - began_s
        lateness_ms = np.array(tracker.stats.lateness_ms)
    # The newest ones are kept: their spread gives the rate of the stretch that they cover.
    stretch_s = (lateness_ms.max() - lateness_ms.min()) / 1000
    return {
        "messages": count,
        "per_s": round(count / (lateness_ms.max() / 1000)),
        "per_s_last": round(len(lateness_ms) / stretch_s) if stretch_s else 0,
        "last_after_deadline_s": round(float(lateness_ms.max()) / 1000, 1),
        "early": int((lateness_ms < 0).sum()),
        "batches": tracker.stats.batches,
        "took_s": round(took_s, 1),
        "peak_rss_mib": peak,
    }


def main(count: int = 1_000_000) -> dict[str, Any]:
    """Measure once."""
    bench = Bench()
    try:
        return measure(bench, count)
    finally:
        bench.close()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*map(int, sys.argv[1:]))) + "\n")
