"""An abort of a producer that is fenced at that moment."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from kmq_spark.kafka.transaction import start_abort

if TYPE_CHECKING:
    from kmq_spark.local.broker import EmbeddedBroker

pytestmark = pytest.mark.kafka


def test_abort_of_a_fenced_producer_reports_it_by_its_future_alone(broker: EmbeddedBroker) -> None:
    """The client's `poll` raises the fatal error as well: a fenced producer with an id did not raise FencedError."""
    name = f"fenced-{uuid4().hex}"
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    admin.create_topics([NewTopic(name, 4, 1)])[name].result(30)
    config = {"bootstrap.servers": broker.bootstrap_servers, "transactional.id": name, "log_level": 0}
    older, newer = Producer(config), Producer(config)
    older.init_transactions(30)
    older.begin_transaction()
    older.produce(name, b"first", partition=0)
    older.flush(30)
    newer.init_transactions(30)
    for partition in range(1, 4):
        older.produce(name, b"fenced", partition=partition)
    answer = start_abort(older, 10)
    with pytest.raises(KafkaException):
        answer.result(10)
