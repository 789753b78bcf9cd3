"""Faults of producers with an id: killed while they copy, at every crash point, and two lives at once."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from faults.checker import Verdict
from faults.copier import FENCED_CODE
from faults.sent_stage import BEGIN_TIMEOUT_S, SentStage
from faults.sequences import line_of, read_sent, violations
from kmq_spark.failpoints import EXIT_CODE, FAILPOINTS

if TYPE_CHECKING:
    from pathlib import Path

    from faults.campaign import Campaign
    from faults.sent_stage import EventChild
    from kmq_spark.local.broker import EmbeddedBroker

PRODUCER_POINTS = tuple(name for name in FAILPOINTS if name.startswith("producer."))

END_TIMEOUT_S = 300.0
BROKER_EACH = 15
"""Restarts of a copier to one restart of the broker."""


class CopyStage(SentStage):
    """
    A file of numbered lines, a queue that it is copied to, and the verdict.

    Args:
        broker: Running.
        folder: Folder of the campaign; the copy gets one inside.
        queue: Name.
        lines: Lines of the file.
        rate: Lines a second of one copier.
    """

    def __init__(self, broker: EmbeddedBroker, folder: Path, queue: str, *, lines: int, rate: float) -> None:
        """Create the queue and the file."""
        super().__init__(broker, folder, queue)
        self.lines, self.rate = lines, rate
        self.file = self.folder / "lines"
        self.file.write_bytes(b"".join(map(line_of, range(1, lines + 1))))

    def copier(self, failpoint: str = "", **settings: Any) -> EventChild:
        """Start a copier."""
        settings = {
            "bootstrap_servers": self.broker.bootstrap_servers, "queue": self.queue, "file": str(self.file),
            "rate": self.rate, **settings,
        }  # fmt: skip
        return self.start("faults.copier", settings, failpoint=failpoint)

    def finish(self) -> None:
        """Copy what is left."""
        code = self.copier(rate=0).wait(END_TIMEOUT_S)
        if code != 0:
            self.fail(f"S: the last copier ended with {code}: {self.children[-1].last_words()}")

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


def restarted(campaign: Campaign) -> CopyStage:
    """S1: a producer that copies lines killed at random and started again, the broker restarted in between."""
    restarts = campaign.scaled(60, least=3)
    stage = campaign.copy_stage("s1", lines=max(2_000, restarts * 100_000 // 60), rate=1_500)
    generator = random.Random(campaign.seed)  # noqa: S311  # repeatable
    for number in range(1, restarts + 1):
        copier = stage.copier(commit_every_s=generator.choice((0.005, 0.02, 0.1)))
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
            copier = stage.copier(failpoint=f"{point}:{nth}", commit_every_s=0.02)
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
    older = stage.copier(commit_every_s=0.02, is_staying=True)
    stage.begun(older)
    for _ in range(campaign.scaled(10, least=2)):
        older.wait_for("copied", generator.uniform(0.2, 1.0))
        older.pause()
        newer = stage.copier(commit_every_s=0.02, is_staying=True)
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
