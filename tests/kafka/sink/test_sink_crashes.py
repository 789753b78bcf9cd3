"""The Spark sink whose Python workers die at its crash points, and whose driver is killed: every row once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from kmq_spark.failpoints import FAILPOINTS, ONCE_VARIABLE, VARIABLE
from tests.kafka.conftest import Queue, seen
from tests.limits import ENDS_S

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(1800)]

ROWS = 3_000

SINK = f"""
import sys
from kmq_spark.sink import write_queue
from kmq_spark.spark.session import build_session, session_settings

# Eight failures of a task end a job.
spark = build_session("sink", master="local[2,8]", settings=session_settings(driver_memory="1g"))
frame = spark.range({ROWS}).selectExpr("cast(id as string) as v")
summary = write_queue(
    frame, sys.argv[2], sink_id="s", run_id="1", value="v", bootstrap_servers=sys.argv[1], slots=4,
    rows_per_transaction=100,
)
print(summary.rows, flush=True)
spark.stop()
"""


def start(queue: Queue, **environment: str) -> subprocess.Popen[bytes]:
    """Start a batch job."""
    command = [sys.executable, "-c", SINK, queue.bootstrap_servers, queue.name]
    return subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )


def every_row_once(queue: Queue) -> bool:
    """Return whether every row is there, each once."""
    counts = Counter(map(int, seen(queue)))
    return sorted(counts) == list(range(ROWS)) and set(counts.values()) == {1}


@pytest.mark.parametrize("point", [name for name in FAILPOINTS if name.startswith("sink.")])
def test_task_whose_worker_dies_at_a_crash_point_is_run_again_and_every_row_is_written_once(
    queue: Queue, tmp_path: Path, point: str
) -> None:
    once = tmp_path / "once"
    output, _ = start(queue, **{VARIABLE: f"{point}:3", ONCE_VARIABLE: str(once)}).communicate(timeout=ENDS_S)
    assert once.exists()
    assert output.strip() == str(ROWS).encode()
    assert every_row_once(queue)
