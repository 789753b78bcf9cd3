"""
A client that knows a partition's leader from before a restart of the broker.

librdkafka's admin client reads no new metadata when the broker refuses a request for offsets because of its leader
epoch: it got no answer until it read the metadata all the same, which it does every five minutes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from confluent_kafka.admin import AdminClient

from kmq_spark.kafka.lookups import EARLIEST, LATEST, offsets_of
from kmq_spark.kafka.settings import admin_config
from kmq_spark.kafka.topics import create_queue
from tests.brokers import quick_broker
from tests.limits import COMES_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kmq_spark.local.broker import EmbeddedBroker

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

PARTITIONS = 4

BEFORE_REFRESH_S = 100.0
"""Well before librdkafka reads the metadata by itself, seconds."""


@pytest.fixture
def own_broker() -> Iterator[EmbeddedBroker]:
    """A broker that the test may restart."""
    with quick_broker() as broker:
        yield broker


def test_offsets_are_read_after_a_restart_of_the_broker(own_broker: EmbeddedBroker) -> None:
    servers = own_broker.bootstrap_servers
    topic = create_queue("orders", bootstrap_servers=servers, partitions=PARTITIONS).topics.queue_topic
    config = admin_config(servers, "test")
    admin = AdminClient(config)
    nothing = dict.fromkeys(range(PARTITIONS), 0)
    assert offsets_of(admin, topic, range(PARTITIONS), LATEST, COMES_S) == nothing

    own_broker.restart()

    assert offsets_of(admin, topic, range(PARTITIONS), EARLIEST, BEFORE_REFRESH_S) == nothing
