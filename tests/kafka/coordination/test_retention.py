"""A group outlives the retention of its topic: snapshots replace what Kafka deletes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, TopicPartition

from kmq_spark.coordination import COORDINATION_TOPIC, Coordinator, create_coordination_topic
from kmq_spark.core.coordination.world import Resource
from kmq_spark.inspection.groups import read_groups
from tests.brokers import quick_broker
from tests.kafka.conftest import wait_until
from tests.limits import COMES_S

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

T = 1_000
RETENTION_S = 60
"""The shortest retention that is allowed; a segment is half of it, and a snapshot is written every quarter of it."""


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    """A broker that deletes segments a second after they are due, with a coordination topic of one partition."""
    settings = {"log.retention.check.interval.ms": "1000", "log.segment.delete.delay.ms": "100"}
    with quick_broker(extra=settings) as broker:
        create_coordination_topic(broker.bootstrap_servers, partitions=1, retention=RETENTION_S)
        yield broker.bootstrap_servers


def first_offset(servers: str) -> int:
    """Return the first offset that retention has kept."""
    client = Consumer({"bootstrap.servers": servers, "group.id": "tests"})
    try:
        low, _ = client.get_watermark_offsets(TopicPartition(COORDINATION_TOPIC, 0), timeout=10, cached=False)
    finally:
        client.close()
    return int(low)


def test_group_outlives_the_retention_of_one_minute(servers: str) -> None:
    """JOIN, CLAIM, ADD_TASK and the position are deleted; a new member knows all of it, and the claim is respected."""
    first = Coordinator("g", bootstrap_servers=servers, client_id="a", heartbeat=T / 1000)
    first.join()
    first.add_task("orders", b"payload")
    claim = first.claim("clicks/0", COMES_S)
    assert claim is not None
    claim.commit(7, timeout=COMES_S)
    before = first.view()

    def is_deleted() -> bool:
        assert claim.is_held, first.failure
        return first_offset(servers) > int(before.next_offset)

    assert wait_until(is_deleted)
    (shown,) = read_groups(servers)
    assert shown.is_complete
    second = Coordinator("g", bootstrap_servers=servers, client_id="b", heartbeat=T / 1000)
    second.join(COMES_S)
    view = second.view()
    assert view.resources["clicks/0"] == Resource("a", claim.epoch, 7)
    assert view.tasks["orders"].payload == b"payload"
    assert view.leader == "a"
    assert view.members["a"].joined_at == before.members["a"].joined_at
    assert second.claim("clicks/0") is None
    claim.check()
    first.close(leave=False)
    taken = second.claim("clicks/0", COMES_S)
    assert taken is not None
    assert (taken.position, taken.epoch > claim.epoch) == (7, True)
    second.close()
