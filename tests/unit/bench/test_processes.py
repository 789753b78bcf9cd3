"""CPU and memory of real processes, as the benchmarks read them."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from bench.processes import HAS_PROC, cpu_by_class, cpu_s, memory_mib

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(not HAS_PROC, reason="needs /proc")

WORK = "import time\nwhile time.process_time() < 0.4: pass\n"
LEAST_S = 0.35
"""Of that, as the kernel shows it: it cuts off parts of a tick, 10 ms, for each of user code, kernel and children."""
WAIT = "import sys; print('done', flush=True); sys.stdin.read()"


@contextmanager
def worked(*arguments: str) -> Iterator[int]:
    """Run Python; the process is there, and has worked, for the time of the block. Yields its id."""
    with subprocess.Popen([sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        yield process.pid
        process.communicate()


def test_cpu_of_a_child_that_has_ended_counts() -> None:
    both = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {WORK!r}])\n{WORK}{WAIT}"
    with worked("-c", both) as process:
        assert 2 * LEAST_S <= cpu_s(process) < 3


def test_each_class_has_the_cpu_of_its_own_processes() -> None:
    before = cpu_by_class(broker=0)
    # PySpark's daemon has the second one's argument, and so have the workers that it forks.
    with worked("-c", WORK + WAIT) as broker, worked("-c", WORK + WAIT, "pyspark.worker"):
        own_s = time.process_time()
        after = cpu_by_class(broker)
        assert memory_mib()["workers"] > 0
    assert after["broker"] >= LEAST_S
    assert after["workers"] - before["workers"] >= LEAST_S
    assert after["jvm"] == before["jvm"]
    assert after["driver"] == pytest.approx(own_s, abs=0.1)  # without its children
