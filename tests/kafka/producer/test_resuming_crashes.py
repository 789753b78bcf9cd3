"""A resuming producer that is killed, suspended or held up: each line of its source once, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from faults.campaign import Campaign
from faults.on_producers import PRODUCER_POINTS, CopyStage
from kmq_spark.failpoints import EXIT_CODE
from kmq_spark.local.broker import EmbeddedBroker
from kmq_spark.producer.resuming import ResumingProducer
from tests.kafka.conftest import Queue, seen, wait_until
from tests.limits import ENDS_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.kafka


@pytest.fixture
def stage(broker: EmbeddedBroker, tmp_path: Path) -> Iterator[CopyStage]:
    """A file and a queue that it is copied to; what still runs in the end is killed."""
    stage = CopyStage(Campaign(tmp_path, seed=1, broker=broker), f"copy-{tmp_path.name}", lines=4_000, rate=2_000)
    yield stage
    stage.close()


def test_producer_killed_at_each_crash_point_loses_and_repeats_nothing(stage: CopyStage) -> None:
    kills = [f"{point}:{nth}" for point in PRODUCER_POINTS for nth in (1, 3)]
    for kill in kills:
        copier = stage.copier(failpoint=kill, commit_every_s=0.02)
        assert copier.wait(ENDS_S) == EXIT_CODE, (kill, copier.last_words())
    verdict = stage.finish().verdict()
    assert verdict.violations == []
    assert verdict.counts["producer_generations"] == len(kills) + 1


def test_producer_whose_transaction_the_broker_gave_up_goes_on(queue: Queue) -> None:
    """Its process was suspended for longer than a transaction may take; no other life has begun."""
    with ResumingProducer(queue.name, "copier", bootstrap_servers=queue.bootstrap_servers) as producer:
        producer.send("a")
        producer.commit(1)
        # What the broker does with a transactional id of such a process: a new epoch.
        transactional_id = f"kmq.{queue.name}.producer.copier"
        Producer(
            {"bootstrap.servers": queue.bootstrap_servers, "transactional.id": transactional_id}
        ).init_transactions(30)
        producer.send("b")
        producer.commit(2)
        assert producer.position == 2
    assert seen(queue) == [b"a", b"b"]


def test_producer_is_not_held_up_for_good_by_the_open_transaction_of_another(queue: Queue) -> None:
    """A reader of committed records would take an older position for the newest one."""
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
