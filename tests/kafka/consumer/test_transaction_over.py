"""A transactional producer with a permanent failure raises the same error for all of its users."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kmq_spark.errors import KafkaClientError
from kmq_spark.kafka.settings import transactional_producer_config
from kmq_spark.kafka.transaction import TransactionalProducer

if TYPE_CHECKING:
    from tests.kafka.conftest import Queue

pytestmark = pytest.mark.kafka


def test_second_user_of_a_producer_that_is_over_gets_the_error_that_ended_it(queue: Queue) -> None:
    """
    The tracker's upkeep fails while the broker is away and leaves its transaction open; then a batch uses the producer.

    The batch used to get "not valid in this state", which is not retriable, and the tracker ended.
    """
    config = transactional_producer_config(queue.bootstrap_servers, f"over-{queue.name}", "over", None)
    producer = TransactionalProducer(config, 10)

    def lose_the_broker() -> None:
        message = "no answer within 10 s"
        raise KafkaClientError(message, code="_TIMED_OUT", retriable=True)

    with pytest.raises(KafkaClientError, match="no answer"):
        producer.run(lose_the_broker, [], None)
    assert producer.has_ended
    with pytest.raises(KafkaClientError, match="no answer") as again:
        producer.run(lambda: None, [], None)
    assert again.value.retriable
    producer.close()
