"""Faults of producers that resume: killed while they copy, at every crash point, and two lives at once."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from faults.copier import FENCED_CODE
from faults.processes import BEGIN_TIMEOUT_S, Child
from faults.proxy import TRANSACTIONAL, ProxiedBroker
from faults.sequences import line_of, read_sent, violations
from faults.stage import Judged
from kmq_spark.failpoints import EXIT_CODE, FAILPOINTS
from kmq_spark.kafka.topics import create_queue_topics

if TYPE_CHECKING:
    from faults.campaign import Campaign
    from faults.evidence import Verdict
    from kmq_spark.local.broker import EmbeddedBroker
    from kmq_spark.local.cluster import EmbeddedCluster

PRODUCER_POINTS = tuple(name for name in FAILPOINTS if name.startswith("producer."))
PARTITIONS, END_TIMEOUT_S = 4, 300.0
BROKER_EACH = 10
"""Restarts of a copier to one restart of the broker."""


class SentStage(Judged):
    """A queue, and processes that send to it; each prints `began`."""

    def __init__(self, campaign: Campaign, name: str, broker: EmbeddedBroker | EmbeddedCluster | None = None) -> None:
        super().__init__(campaign, name)
        self.broker, self.queue = broker or campaign.broker, self.name
        create_queue_topics(self.queue, bootstrap_servers=self.broker.bootstrap_servers, partitions=PARTITIONS)

    def start(self, module: str, settings: dict[str, Any], **options: Any) -> Child:  # of Child
        """Start a module of this package."""
        settings = {"bootstrap_servers": self.broker.bootstrap_servers, "queue": self.queue, **settings}
        name = f"{module}-{next(self._numbers)}"
        child = Child([sys.executable, "-m", f"faults.{module}", json.dumps(settings)], self.folder, name, **options)
        self.children.append(child)
        return child

    def begun(self, child: Child, timeout_s: float = BEGIN_TIMEOUT_S) -> bool:
        """Wait until a process knows its position; note how long that took, or fail."""
        if child.wait_for("began", timeout_s):
            self.recovery_s.append(child.lived_s)
            return True
        self.fail(f"S: a sender did not begin: exit code {child.exit_code}, {child.last_words()}")
        return False

    def finished(self, child: Child, timeout_s: float = END_TIMEOUT_S) -> None:
        """Wait until a process has sent all."""
        if (code := child.wait(timeout_s)) != 0:
            self.fail(f"S: the last sender ended with {code}: {child.last_words()}")


class CopyStage(SentStage):
    """A file of numbered lines, a queue that copiers copy it to at *rate* lines a second, and the verdict."""

    def __init__(
        self,
        campaign: Campaign,
        name: str,
        *,
        lines: int,
        rate: float,
        broker: EmbeddedBroker | EmbeddedCluster | None = None,
    ) -> None:
        super().__init__(campaign, name, broker)
        self.lines, self._rate = lines, rate
        self.file = self.folder / "lines"
        self.file.write_bytes(b"".join(map(line_of, range(1, lines + 1))))

    def copier(self, failpoint: str = "", **settings: Any) -> Child:
        """Start a copier."""
        settings = {"file": str(self.file), "rate": self._rate, **settings}
        return self.start("copier", settings, failpoint=failpoint)

    def finish(self) -> CopyStage:
        """Copy what is left."""
        self.finished(self.copier(rate=0))
        return self

    def verdict(self) -> Verdict:
        """Read the queue topic and check it."""
        found, sent = super().verdict(), read_sent(self.broker.bootstrap_servers, self.queue)
        for what in violations(sent, self.lines):
            found.add("sequence", what)
        found.counts["lines_copied"] += len(sent)
        found.counts["producer_generations"] += max((record.generation for record in sent), default=0)
        return found


def killed(campaign: Campaign) -> CopyStage:
    """S1: a producer that copies lines killed at every crash point and at random, the broker restarted in between."""
    restarts = campaign.times(40, least=3)
    stage = CopyStage(campaign, "s1", lines=max(4_000, 2_000 * restarts), rate=1_500)
    for point in PRODUCER_POINTS:
        for nth in (1, 3)[: campaign.times(2)]:
            if (code := stage.copier(failpoint=f"{point}:{nth}").wait(BEGIN_TIMEOUT_S)) == EXIT_CODE:
                stage.injections += 1
            else:
                stage.fail(f"S: {point}:{nth} was not passed: exit code {code}")
    for number in range(1, restarts + 1):
        copier = stage.copier(commit_every_s=stage.random.choice((0.005, 0.02, 0.1)))
        if not stage.begun(copier) or copier.wait_for("copied", stage.random.uniform(0.0, 1.0)):
            stage.notes.append(f"{number - 1} of {restarts} restarts: the file was copied by then")
            break
        if number % BROKER_EACH == 0:
            (campaign.broker.kill if number % (2 * BROKER_EACH) else campaign.broker.stop)()
            campaign.broker.start()
            stage.injections += 1
            copier.wait_for("copied", stage.random.uniform(0.0, 5.0))
        copier.end()
        stage.injections += 1
    return stage.finish()


def answers_lost(campaign: Campaign) -> CopyStage:
    """S1: the answers to each kind of transactional call of a producer lost, what was asked for done."""
    broker, proxy, other = ProxiedBroker.start(campaign.folder, campaign.broker_environment)
    stage = CopyStage(campaign, "s1-answers", lines=20_000, rate=1_000, broker=broker)
    for each in (proxy, other, broker):
        stage.on_close(each.close)
    copier = stage.copier(bootstrap_servers=proxy.address)
    stage.begun(copier)
    for kind in [*TRANSACTIONAL] * campaign.times(3):
        proxy.lose_answer(kind)
        if copier.wait_for("copied", stage.random.uniform(0.5, 1.0)):
            break
    stage.injections += proxy.lost_count
    copier.end()
    return stage.finish()


def two_at_once(campaign: Campaign) -> CopyStage:
    """S3: a producer that copies lines suspended, a second one started, the first one woken up."""
    stage = CopyStage(campaign, "s3", lines=20_000, rate=1_000)
    older = stage.copier(is_staying=True)
    stage.begun(older)
    for number in range(campaign.times(6, least=2)):
        # Each second one suspends itself at a crash point.
        if number % 2 == 0 or not older.suspended(BEGIN_TIMEOUT_S):
            older.wait_for("copied", stage.random.uniform(0.2, 1.0))
            older.pause()
        point = f"{stage.random.choice(PRODUCER_POINTS)}:5:stop" if number % 2 == 0 else ""
        newer = stage.copier(point, is_staying=True)
        stage.begun(newer)
        newer.wait_for("copied", stage.random.uniform(0.0, 0.5))
        older.resume()
        stage.injections += 1
        if (code := older.wait(BEGIN_TIMEOUT_S)) != FENCED_CODE:
            stage.fail(f"S: the older copier did not end as fenced: exit code {code}, {older.last_words()}")
        older = newer
    older.end()
    return stage.finish()
