"""Faults of an exactly-once sink: driver, executors and Python workers killed while a query writes numbered rows."""

from __future__ import annotations

import itertools
import os
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
from confluent_kafka import Consumer, KafkaException, TopicPartition

from faults.on_producers import PARTITIONS, SentStage
from faults.processes import processes_of
from faults.sequences import line_of, read_sent, sink_violations

if TYPE_CHECKING:
    from faults.campaign import Campaign
    from faults.evidence import Verdict
    from faults.processes import Child
    from faults.three_brokers import ThreeBrokers

KILLS, ROWS, LEAST_ROWS, ROWS_PER_FILE = 3, 100_000, 20_000, 10_000
"""A file is a batch."""

SPARK_TIMEOUT_S = 900.0
"""For Spark to start, with two executors, on a slow machine that others use too; and for a row to arrive."""

END_TIMEOUT_S = 1_800.0
ASK_TIMES = 60
POLL_S = 0.05
LONGEST_DELAY_S = 1.0
"""Between the first row that arrives and the kill."""

FIND_TIMEOUT_S = 30.0
"""For an executor or a Python worker that was killed to be replaced."""

DRIVER, EXECUTOR, PYTHON_WORKER = "", "CoarseGrainedExecutorBackend", "-m kmq_spark.spark.python_daemon"
"""
What is killed: the driver with all that it started, or one of the processes whose command line has these words. The
driver's command line has the name of the daemon too, as a setting.
"""


class SinkStage(SentStage):
    """Files of numbered rows, a queue, and the query that writes the rows to it."""

    def __init__(self, campaign: Campaign, name: str, rows: int, cluster: ThreeBrokers | None = None) -> None:
        super().__init__(campaign, name, cluster)
        self.rows, self._files = rows, self.folder / "rows"
        self._files.mkdir()
        for first in range(1, rows + 1, ROWS_PER_FILE):
            numbers = range(first, min(first + ROWS_PER_FILE, rows + 1))
            (self._files / f"{first:08d}.txt").write_bytes(b"".join(map(line_of, numbers)))
        self._home = _spark_home(self.folder)
        self._watcher = self._new_watcher()

    def writer(self) -> Child:
        """Start the query."""
        variables = {"SPARK_HOME": str(self._home), "SPARK_LOCAL_IP": "127.0.0.1"}
        settings = {"rows": str(self._files), "checkpoint": str(self.folder / "checkpoint")}
        return self.start("sink_writer", settings, environment=variables)

    def appended(self) -> int:
        """Return how many records the queue topic has, also of open transactions."""
        places = [TopicPartition(self.queue, number) for number in range(PARTITIONS)]
        failure: KafkaException | None = None
        for _ in range(ASK_TIMES):
            try:
                return sum((self._watcher.get_watermark_offsets(place, timeout=10) or (0, 0))[1] for place in places)
            except KafkaException as error:  # a leader is away, or not known yet
                failure = error
            time.sleep(1.0)
            # librdkafka may never connect again to a broker that has come back; see `CoordinatorContact`.
            self._watcher.close()
            self._watcher = self._new_watcher()
        raise RuntimeError(f"the ends of {self.queue} are not known after {ASK_TIMES} times") from failure

    def _new_watcher(self) -> Consumer:
        return Consumer({"bootstrap.servers": self.broker.bootstrap_servers, "group.id": "kmq-faults-sinks"})

    def has_more_than(self, count: int) -> bool:
        """Return whether more records have come."""
        return self.appended() > count

    def verdict(self) -> Verdict:
        """Read the queue topic and check it."""
        found, sent = super().verdict(), read_sent(self.broker.bootstrap_servers, self.queue)
        for each in sink_violations(sent, self.rows):
            found.add("sequence", each)
        found.counts["sink_rows"] += self.rows
        return found

    def close(self) -> None:
        """End every process that still runs."""
        super().close()
        self._watcher.close()


def killed(campaign: Campaign) -> SinkStage:
    """S4: driver, executors and Python workers of an exactly-once sink killed while it writes."""
    stage = SinkStage(campaign, "s4", max(LEAST_ROWS, round(ROWS * campaign.scale)))
    child = None
    for number, target in zip(range(campaign.times(KILLS)), itertools.cycle((DRIVER, EXECUTOR, PYTHON_WORKER))):
        if child is None:
            child = stage.writer()
            if not stage.begun(child, SPARK_TIMEOUT_S):
                return stage
        if not child.until(partial(stage.has_more_than, stage.appended()), SPARK_TIMEOUT_S):
            stage.notes.append(f"{number} kills: the query wrote nothing more")
            break
        time.sleep(stage.random.uniform(0.0, LONGEST_DELAY_S))
        if target == DRIVER:
            child.end()
            child = None
            stage.injections += 1
        else:
            stage.injections += _kill_one(stage, child, target)
    stage.finished(child or stage.writer(), END_TIMEOUT_S)
    return stage


def _kill_one(stage: SinkStage, child: Child, words: str) -> int:
    """Kill one of a query's processes by words of its command line; return how many were killed."""
    give_up_s = time.monotonic() + FIND_TIMEOUT_S
    while child.is_running and time.monotonic() < give_up_s:
        found = [use.pid for use in processes_of(child.group) if words in use.command]
        for pid in stage.random.sample(found, min(1, len(found))):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                return 1
        time.sleep(POLL_S)
    return 0


def _spark_home(folder: Path) -> Path:
    """Return a Spark of links to the installed one: executors write their logs beside it."""
    home = folder / "spark"
    home.mkdir()
    installed = Path(pyspark.__file__).parent
    for part in ("bin", "jars", "python"):
        if (installed / part).exists():
            (home / part).symlink_to(installed / part)
    return home
