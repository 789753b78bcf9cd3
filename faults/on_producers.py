"""Faults of producers with an id: killed while they copy, at every crash point, and two lives at once."""

from __future__ import annotations

import json
import random
import sys
import time
from typing import TYPE_CHECKING, Any

from faults.checker import Verdict
from faults.copier import FENCED_CODE
from faults.processes import Child
from faults.sequences import line_of, read_sent, violations
from kmq_spark.failpoints import EXIT_CODE, FAILPOINTS
from kmq_spark.kafka.topics import create_queue

if TYPE_CHECKING:
    from pathlib import Path

    from faults.campaign import Campaign
    from kmq_spark.local.broker import EmbeddedBroker

PRODUCER_POINTS = tuple(name for name in FAILPOINTS if name.startswith("producer."))

BEGIN_TIMEOUT_S = 60.0
END_TIMEOUT_S = 300.0
BROKER_EACH = 15
"""Restarts of a copier to one restart of the broker."""


class CopierChild(Child):
    """A copier process."""

    def __init__(self, settings: dict[str, Any], folder: Path, **options: Any) -> None:  # noqa: ANN401  # of Child
        """Start it."""
        self._events: list[dict[str, Any]] = []
        command = [sys.executable, "-m", "faults.copier", json.dumps(settings)]
        super().__init__(command, folder / f"copier-{time.time_ns()}.log", None, **options)

    def wait_for(self, event: str, timeout_s: float = BEGIN_TIMEOUT_S) -> dict[str, Any] | None:
        """Wait for an event; None where the process ended before, or in time none came."""
        give_up_s = time.monotonic() + timeout_s
        while time.monotonic() < give_up_s:
            is_running = self.is_running
            found = next((each for each in self._events if each["event"] == event), None)
            if found is not None or not is_running:
                return found
            time.sleep(0.01)
        return None

    def _saw(self, line: str) -> None:
        self._events.append(json.loads(line))


class CopyStage:
    """
    A file of numbered lines, a queue that it is copied to, and the verdict.

    Args:
        broker: Running.
        folder: Of the campaign; the copy gets one inside.
        queue: Name.
        lines: Of the file.
        rate: Lines a second of one copier.
    """

    def __init__(self, broker: EmbeddedBroker, folder: Path, queue: str, *, lines: int, rate: float) -> None:
        """Make the queue and the file."""
        self.broker, self.queue, self.lines, self.rate = broker, queue, lines, rate
        self.folder = folder / queue
        self.folder.mkdir(parents=True)
        self.file = self.folder / "lines"
        self.file.write_bytes(b"".join(map(line_of, range(1, lines + 1))))
        create_queue(queue, bootstrap_servers=broker.bootstrap_servers, partitions=4)
        self.injections = 0
        self.is_drained = True
        self.notes: list[str] = []
        self.failures: list[str] = []
        self.recovery_s: list[float] = []
        self.group_protocols: set[str] = set()
        self._children: list[CopierChild] = []

    def copier(self, failpoint: str = "", **settings: Any) -> CopierChild:  # noqa: ANN401  # of the copier
        """Start a copier."""
        settings = {
            "bootstrap_servers": self.broker.bootstrap_servers, "queue": self.queue, "file": str(self.file),
            "rate": self.rate, **settings,
        }  # fmt: skip
        child = CopierChild(settings, self.folder, failpoint=failpoint)
        self._children.append(child)
        return child

    def begun(self, child: CopierChild) -> dict[str, Any] | None:
        """Wait until a copier knows its position; note how long that took, and where it did not get there."""
        began = child.wait_for("began")
        if began is None:
            self.fail(f"S: a copier did not begin: exit code {child.exit_code}, {child.last_words()}")
        else:
            self.recovery_s.append(time.monotonic() - child.began_s)
        return began

    def finish(self) -> None:
        """Copy what is left."""
        code = self.copier(rate=0).wait(END_TIMEOUT_S)
        if code != 0:
            self.fail(f"S: the last copier ended with {code}: {self._children[-1].last_words()}")

    def fail(self, what: str) -> None:
        """Note that something besides the sequence went wrong: it counts as a violation."""
        self.failures.append(what)

    def verdict(self, *, is_drained: bool = True) -> Verdict:
        """Read the queue topic and check it."""
        del is_drained
        found = Verdict()
        sent = read_sent(self.broker.bootstrap_servers, self.queue)
        for what in (*self.failures, *violations(sent, self.lines)):
            found.add("sequence", what)
        found.counts["lines_copied"] += len(sent)
        found.counts["producer_generations"] += max((record.generation for record in sent), default=0)
        return found

    def close(self) -> None:
        """End whatever still runs."""
        for child in self._children:
            if child.is_running:
                child.resume()
                child.kill()


def restarted(campaign: Campaign) -> CopyStage:
    """S1: a producer that copies lines killed at random and started again, the broker restarted in between."""
    restarts = campaign.scaled(60, least=3)
    stage = campaign.copy_stage("s1", lines=max(2_000, restarts * 100_000 // 60), rate=1_500)
    generator = random.Random(campaign.seed)  # noqa: S311  # repeatable
    for number in range(1, restarts + 1):
        copier = stage.copier(commit_every_ms=generator.choice((5, 20, 100)))
        if stage.begun(copier) is None or copier.wait_for("copied", generator.uniform(0.0, 1.0)) is not None:
            stage.notes.append(f"{number - 1} of {restarts} restarts: the file was copied by then")
            break
        if number % BROKER_EACH == 0:
            (campaign.broker.kill if number % (2 * BROKER_EACH) else campaign.broker.stop)()
            campaign.broker.start()
            stage.injections += 1
            copier.wait_for("copied", generator.uniform(0.0, 5.0))
        copier.kill()
        stage.injections += 1
    stage.finish()
    return stage


def killed_at_points(campaign: Campaign) -> CopyStage:
    """S2: a producer that copies lines killed at every crash point."""
    stage = campaign.copy_stage("s2", lines=20_000, rate=2_000)
    for nth in campaign.picked((1, 2, 3, 5, 8, 4, 6, 7, 9, 10), 10, least=2):
        for point in PRODUCER_POINTS:
            copier = stage.copier(failpoint=f"{point}:{nth}", commit_every_ms=20)
            code = copier.wait(BEGIN_TIMEOUT_S)
            if code == EXIT_CODE:
                stage.injections += 1
            else:
                stage.notes.append(f"{point}:{nth} was not passed: exit code {code}")
    stage.finish()
    return stage


def two_at_once(campaign: Campaign) -> CopyStage:
    """S3: a producer that copies lines suspended, a second one started, the first one woken up."""
    stage = campaign.copy_stage("s3", lines=20_000, rate=1_000)
    generator = random.Random(campaign.seed)  # noqa: S311  # repeatable
    older = stage.copier(commit_every_ms=20, is_staying=True)
    stage.begun(older)
    for _ in range(campaign.scaled(10, least=2)):
        older.wait_for("copied", generator.uniform(0.2, 1.0))
        older.pause()
        newer = stage.copier(commit_every_ms=20, is_staying=True)
        stage.begun(newer)
        newer.wait_for("copied", generator.uniform(0.0, 0.5))
        older.resume()
        stage.injections += 1
        code = older.wait(BEGIN_TIMEOUT_S)
        if code != FENCED_CODE:
            stage.fail(f"S: the older copier did not end as fenced: exit code {code}, {older.last_words()}")
        older = newer
    older.kill()
    stage.finish()
    return stage
