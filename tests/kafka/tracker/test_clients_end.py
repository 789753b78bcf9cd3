"""The clients of a tracker end with it: its process may run many, one after the other, as a member of a fleet does."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.kafka.conftest import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.kafka.stage import Stage

pytestmark = [pytest.mark.kafka, pytest.mark.spark]

THREADS = Path("/proc/self/task")


def clients() -> int:
    """Return how many clients of librdkafka this process has: each has one main thread."""
    gc.collect()
    found = 0
    for thread in THREADS.iterdir():
        try:
            found += (thread / "comm").read_text().startswith("rdk:main")
        except OSError:
            # It has ended meanwhile.
            continue
    return found


@pytest.mark.skipif(not THREADS.is_dir(), reason="only Linux lists the threads of a process")
def test_tracker_that_has_ended_leaves_no_client(stage: Stage, spark: SparkSession) -> None:
    """Spark keeps the function that it calls for each batch, and with it all that the function uses."""
    stage.send("m")
    before = clients()
    with stage.tracking():
        assert clients() >= before + 3
    assert wait_until(lambda: clients() <= before)
