"""A slot of the Spark sink whose process dies at a crash point; the campaign kills the processes of Spark (S4)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kmq_spark.failpoints import EXIT_CODE, VARIABLE
from tests.kafka.conftest import Queue, seen
from tests.limits import ENDS_S

pytestmark = pytest.mark.kafka

ROWS = 1_000

WRITE = f"""
import sys
from kmq_spark.core.sinking import Batch
from kmq_spark.sink.slot_writer import Row, SinkSettings, write_slot

settings = SinkSettings(sys.argv[2], "s", sys.argv[1], rows_per_transaction=100)
rows = (Row(b"%d" % number, None, None, None, None, None) for number in range({ROWS}))
print(*write_slot(settings, Batch("run:1", 0, settings.slots), 0, rows))
"""


def write(queue: Queue, **environment: str) -> subprocess.CompletedProcess[str]:
    """Write a slot in a process of its own, as one attempt of a task does."""
    return subprocess.run(
        [sys.executable, "-c", WRITE, queue.bootstrap_servers, queue.name],
        capture_output=True, text=True, check=False, timeout=ENDS_S, env={**os.environ, **environment},
    )  # fmt: skip


@pytest.mark.parametrize(("point", "committed"), [("sink.rows-sent", 200), ("sink.committed", 300)])
def test_slot_whose_writer_dies_in_its_third_transaction_is_continued_and_every_row_is_written_once(
    queue: Queue, point: str, committed: int
) -> None:
    first = write(queue, **{VARIABLE: f"{point}:3"})
    assert first.returncode == EXIT_CODE, first.stderr
    again = write(queue)
    assert again.stdout.split() == ["0", str(ROWS - committed), str(committed)], again.stderr
    assert sorted(map(int, seen(queue))) == list(range(ROWS))
