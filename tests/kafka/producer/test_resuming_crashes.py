"""A resuming producer under `kill -9`, broker restarts and a second life: each line of its source once, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from faults.campaign import Campaign
from faults.copier import FENCED_CODE
from faults.on_producers import PRODUCER_POINTS, CopyStage
from kmq_spark.failpoints import EXIT_CODE
from kmq_spark.local.broker import EmbeddedBroker
from kmq_spark.producer.resuming import ResumingProducer
from tests.kafka.conftest import Queue, seen, wait_until
from tests.limits import ENDS_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.kafka


@pytest.fixture
def copy_of(
    broker: EmbeddedBroker, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., CopyStage]]:
    """Make a file and a queue that it is copied to; what still runs in the end is killed."""
    campaigns: list[Campaign] = []

    def make(lines: int, rate: float, on: EmbeddedBroker = broker) -> CopyStage:
        campaigns.append(Campaign(tmp_path, seed=1, broker=on))
        return CopyStage(campaigns[-1], f"copy-{tmp_path.name}", lines=lines, rate=rate)

    yield make
    for campaign in campaigns:
        for stage in campaign.stages:
            stage.close()


@pytest.mark.parametrize("point", PRODUCER_POINTS)
def test_producer_killed_at_a_crash_point_loses_and_repeats_nothing(
    copy_of: Callable[..., CopyStage], point: str
) -> None:
    stage = copy_of(lines=1_000, rate=2_000)
    for nth in (1, 3):
        copier = stage.copier(failpoint=f"{point}:{nth}", commit_every_s=0.02)
        assert copier.wait(ENDS_S) == EXIT_CODE, copier.last_words()
    stage.finish()
    verdict = stage.verdict()
    assert verdict.violations == []
    assert verdict.counts["producer_generations"] == 3


def test_suspended_producer_that_wakes_up_behind_a_newer_one_is_fenced_and_doubles_nothing(
    copy_of: Callable[..., CopyStage],
) -> None:
    stage = copy_of(lines=2_000, rate=1_000)
    older = stage.copier(commit_every_s=0.02, is_staying=True)
    assert stage.begun(older)
    older.wait_for("copied", 0.5)
    older.pause()
    newer = stage.copier(commit_every_s=0.02)
    assert stage.begun(newer)
    older.resume()
    assert older.wait(ENDS_S) == FENCED_CODE, older.last_words()
    assert newer.wait(ENDS_S) == 0, newer.last_words()
    assert stage.verdict().violations == []


def test_producer_whose_transaction_the_broker_gave_up_goes_on(queue: Queue) -> None:
    """Its process was suspended for longer than a transaction may take; no other life has begun."""
    with ResumingProducer(queue.name, "copier", bootstrap_servers=queue.bootstrap_servers) as producer:
        producer.send("a")
        producer.commit(1)
        # What the broker does with a transactional id of such a process: a new epoch.
        other = EpochBump(queue, "copier")
        other.bump()
        producer.send("b")
        producer.commit(2)
        assert producer.position == 2
    assert seen(queue) == [b"a", b"b"]


class EpochBump:
    """Takes a transactional id and writes nothing."""

    def __init__(self, queue: Queue, producer_id: str) -> None:
        name = f"kmq.{queue.name}.producer.{producer_id}"
        self._config = {"bootstrap.servers": queue.bootstrap_servers, "transactional.id": name}

    def bump(self) -> None:
        """Fence whatever has the id."""
        from confluent_kafka import Producer  # noqa: PLC0415  # of this class alone

        Producer(self._config).init_transactions(30)


def test_producer_is_not_held_up_for_good_by_the_open_transaction_of_another(queue: Queue) -> None:
    """A reader of committed records would take an older position for the newest one."""
    from confluent_kafka import Producer  # noqa: PLC0415  # the other

    with ResumingProducer(queue.name, "copier", bootstrap_servers=queue.bootstrap_servers) as producer:
        producer.send("a")
        producer.commit(1)
        other = Producer(
            {
                "bootstrap.servers": queue.bootstrap_servers, "transactional.id": f"{queue.name}-other",
                "transaction.timeout.ms": 3_000,
            }
        )  # fmt: skip
        other.init_transactions(30)
        other.begin_transaction()
        other.produce(f"{queue.name}.producers", b"open", b"other")
        other.flush(30)
        # Behind the open transaction's record: not yet visible to readers of committed records.
        producer.send("b")
        producer.commit(2)
    with ResumingProducer(queue.name, "copier", bootstrap_servers=queue.bootstrap_servers) as producer:
        assert (producer.position, producer.sequence) == (2, 2)
    assert wait_until(lambda: seen(queue) == [b"a", b"b"])
