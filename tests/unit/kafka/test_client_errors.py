"""Failures of the Kafka client that pass by themselves: the tracker starts its query again, and does not end."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from kmq_spark.errors import KafkaClientError
from kmq_spark.kafka.client_errors import TEMPORARY_NAMES, client_error


@pytest.mark.parametrize(
    "code",
    [
        KafkaError._DESTROY_BROKER,  # a broker killed with a request under way
        KafkaError._TRANSPORT,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NETWORK_EXCEPTION,
    ],
)
def test_failure_of_a_broker_that_comes_back_is_retriable(code: int) -> None:
    error = client_error(KafkaException(KafkaError(code)), "cannot read")
    assert isinstance(error, KafkaClientError)
    assert error.retriable


def test_every_passing_name_is_one_that_the_client_knows() -> None:
    """A name that is mistyped would never match."""
    known = {KafkaError(getattr(KafkaError, name)).name() for name in dir(KafkaError) if name.lstrip("_").isupper()}
    assert known >= TEMPORARY_NAMES
