"""The clients of a coordinator end with it, and not when Python's garbage collector finds them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kafka.coordination.conftest import T

pytestmark = [pytest.mark.kafka, pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")]

ROOT = Path(__file__).resolve().parents[3]

PROCESS = """
import gc, sys, time
from pathlib import Path
from kmq_spark.coordination import Consumption, Coordinator

def threads():
    found = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            found += (task / "comm").read_text().startswith("rdk:")
        except OSError:  # it has ended in between
            pass
    return found

gc.disable()
servers, topic, t_ms = sys.argv[1:]
me = Coordinator("g", bootstrap_servers=servers, topic=topic, heartbeat=int(t_ms) / 1000, on_change=list)
me.join()
claim = me.claim("r")
with Consumption(me, topic, idle=0.1) as batches:
    list(batches)
during = threads()
me.close()
for _ in range(600):
    if (after := threads()) == 0:
        break
    time.sleep(0.05)
print(during > 0, after)
"""


def test_closed_coordinator_leaves_no_thread_of_a_client(bootstrap_servers: str, topic: str) -> None:
    """Nothing prints lines about a broker that goes away later. In a process of its own: it has no other client."""
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, bootstrap_servers, topic, str(T)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.split() == ["True", "0"]
