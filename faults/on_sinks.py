"""
Faults of Spark sinks: driver, executors and Python workers killed while a query writes numbered rows, and Python
workers that end at each crash point.

Spark's own Kafka sink gets the same kills: it is at least once, and its repeated rows are counted for comparison.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
from confluent_kafka import Consumer, TopicPartition

from faults.checker import Verdict
from faults.sent_stage import PARTITIONS, SentStage
from faults.sequences import line_of, read_sent, repeated_rows, sink_violations
from kmq_spark.failpoints import FAILPOINTS, LOG_VARIABLE, VARIABLE

if TYPE_CHECKING:
    from faults.campaign import Campaign
    from faults.sent_stage import EventChild
    from kmq_spark.local.broker import EmbeddedBroker

KILLS = 20
ROWS = 1_000_000
LEAST_ROWS = 20_000
ROWS_PER_FILE = 10_000
"""Of one batch."""

WRITER = "faults.sink_writer"
BEGIN_TIMEOUT_S = 900.0
"""For Spark to start, with two executors, on a slow machine that others use too."""
WRITE_TIMEOUT_S = 900.0
END_TIMEOUT_S = 1_800.0
POLL_S = 0.05
LONGEST_DELAY_S = 1.0
"""Between the first row that arrives and the kill."""
FIND_TIMEOUT_S = 30.0
"""For an executor or a Python worker that was killed to be replaced."""

SINK_POINTS = tuple(name for name in FAILPOINTS if name.startswith("sink."))
PASSAGE = 3
"""A worker ends at its third passage of a crash point, as does each one that replaces it: two transactions each."""

DRIVER = ""
EXECUTOR = "CoarseGrainedExecutorBackend"
PYTHON_WORKER = "-m kmq_spark.spark.python_daemon"
"""
What is killed: the driver with all that it started, or the processes whose command line has these words. The driver's
command line has the name of the daemon too, as a setting.
"""


class SinkStage(SentStage):
    """
    Files of numbered rows, a queue, and the query that writes the rows to it.

    Args:
        broker: Running.
        folder: Folder of the campaign; the stage gets one inside.
        queue: Name.
        rows: How many.
        kind: `ours`, where a row that is written twice is a violation, or `spark`, where such rows are counted.
    """

    def __init__(self, broker: EmbeddedBroker, folder: Path, queue: str, *, rows: int, kind: str) -> None:
        """Create the queue and the files."""
        super().__init__(broker, folder, queue)
        self.rows, self.kind = rows, kind
        self._files = self.folder / "rows"
        self._files.mkdir()
        for first in range(1, rows + 1, ROWS_PER_FILE):
            numbers = range(first, min(first + ROWS_PER_FILE, rows + 1))
            (self._files / f"{first:08d}.txt").write_bytes(b"".join(map(line_of, numbers)))
        self._home = _spark_home(self.folder)
        self._watcher = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": "kmq-faults-sinks"})

    def writer(self, **environment: str) -> EventChild:
        """Start the query, with more environment variables."""
        settings = {
            "bootstrap_servers": self.broker.bootstrap_servers, "queue": self.queue, "kind": self.kind,
            "rows": str(self._files), "checkpoint": str(self.folder / "checkpoint"),
        }  # fmt: skip
        return self.start(
            WRITER, settings, environment={"SPARK_HOME": str(self._home), "SPARK_LOCAL_IP": "127.0.0.1", **environment}
        )

    def finish(self, child: EventChild) -> None:
        """Wait until a query has written all rows."""
        if (code := child.wait(END_TIMEOUT_S)) != 0:
            self.fail(f"S: the last query ended with {code}: {child.last_words()}")

    def appended(self) -> int:
        """Return how many records the queue topic has, also of open transactions."""
        places = (TopicPartition(self.queue, number) for number in range(PARTITIONS))
        return sum((self._watcher.get_watermark_offsets(place, timeout=10) or (0, 0))[1] for place in places)

    def wait_for_rows(self, child: EventChild, before: int) -> bool:
        """Wait until a query appends a record; return False if the query ends first, or none comes in time."""
        give_up_s = time.monotonic() + WRITE_TIMEOUT_S
        while child.is_running and time.monotonic() < give_up_s:
            if self.appended() > before:
                return True
            time.sleep(POLL_S)
        return False

    def verdict(self, *, is_drained: bool = True) -> Verdict:
        """Read the queue topic and check it."""
        del is_drained
        found = Verdict()
        sent = read_sent(self.broker.bootstrap_servers, self.queue)
        if self.kind == "ours":
            what = sink_violations(sent, self.rows)
            found.counts["sink_rows"] += self.rows
        else:
            lost = self.rows - len({record.line for record in sent})
            what = [f"Spark's own sink lost {lost} rows"] if lost else []
            found.counts["rows_of_sparks_own_sink"] += self.rows
            found.counts["rows_repeated_by_sparks_own_sink"] += repeated_rows(sent)
        for each in (*self.failures, *what):
            found.add("sequence", each)
        self.notes.append(
            f"{self.rows:,} rows, {self.injections} kills, sink of {self.kind}: "
            f"{len(sent):,} messages, {repeated_rows(sent):,} repeated"
        )
        return found

    def close(self) -> None:
        """End every process that still runs."""
        super().close()
        self._watcher.close()


def killed(campaign: Campaign) -> SinkStage:
    """S4: driver, executors and Python workers of an exactly-once sink killed while it writes."""
    return _killed(campaign, "s4", "ours", (DRIVER, EXECUTOR, PYTHON_WORKER))


def sparks_own_killed(campaign: Campaign) -> SinkStage:
    """S5: Spark's own Kafka sink under the same kills, for comparison: every row at least once."""
    return _killed(campaign, "s5", "spark", (DRIVER, EXECUTOR))


def killed_at_points(campaign: Campaign) -> list[SinkStage]:
    """S6: Python workers of an exactly-once sink end at its crash points, one after the other."""
    return [_killed_at(campaign, point) for point in campaign.picked(SINK_POINTS, len(SINK_POINTS), least=1)]


def _killed_at(campaign: Campaign, point: str) -> SinkStage:
    stage = campaign.sink_stage(f"s6.{point.partition('.')[2]}", rows=LEAST_ROWS, kind="ours")
    log = stage.folder / "passed"
    child = stage.writer(**{VARIABLE: f"{point}:{PASSAGE}", LOG_VARIABLE: str(log)})
    if stage.begun(child, BEGIN_TIMEOUT_S) is not None:
        stage.finish(child)
    stage.injections += len(log.read_text().splitlines()) if log.exists() else 0
    if not stage.injections:
        stage.fail(f"S: no Python worker ended at {point}")
    return stage


def _killed(campaign: Campaign, name: str, kind: str, targets: tuple[str, ...]) -> SinkStage:
    kills = campaign.scaled(KILLS, least=1)
    stage = campaign.sink_stage(name, rows=max(LEAST_ROWS, round(ROWS * campaign.scale)), kind=kind)
    generator = random.Random(campaign.seed)  # noqa: S311  # repeatable
    child = None
    for number, target in zip(range(kills), itertools.cycle(targets), strict=False):
        if child is None:
            child = stage.writer()
            if stage.begun(child, BEGIN_TIMEOUT_S) is None:
                return stage
        if not stage.wait_for_rows(child, stage.appended()):
            stage.notes.append(f"{number} of {kills} kills: the query wrote nothing more")
            break
        time.sleep(generator.uniform(0.0, LONGEST_DELAY_S))
        if target == DRIVER:
            child.kill()
            child = None
            stage.injections += 1
        else:
            stage.injections += _kill_one(child, target, generator)
    stage.finish(child or stage.writer())
    return stage


def _kill_one(child: EventChild, word: str, generator: random.Random) -> int:
    """Kill one of a query's processes by words of its command line; return how many were killed."""
    give_up_s = time.monotonic() + FIND_TIMEOUT_S
    while child.is_running and time.monotonic() < give_up_s:
        found = [pid for pid, command in _processes(child.group) if word in command]
        for pid in generator.sample(found, min(1, len(found))):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                return 1
        time.sleep(POLL_S)
    return 0


def _processes(session: int) -> list[tuple[int, str]]:
    """Return process id and command line of the processes of a session: what one of our children has started."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with suppress(OSError):  # it ended meanwhile
            # The name of the program is in parentheses and may have spaces; the session is the fourth field behind it.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                found.append((int(folder.name), (folder / "cmdline").read_text().replace("\0", " ")))
    return found


def _spark_home(folder: Path) -> Path:
    """Return a Spark of links to the installed one: executors write their logs beside it."""
    home = folder / "spark"
    home.mkdir()
    installed = Path(pyspark.__file__).parent
    for part in ("bin", "jars", "python"):
        if (installed / part).exists():
            (home / part).symlink_to(installed / part)
    return home
