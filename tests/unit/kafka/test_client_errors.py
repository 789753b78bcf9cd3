"""Errors of the Kafka client, and what its log says of normal work."""

from __future__ import annotations

import logging

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from kmq_spark.errors import KafkaClientError
from kmq_spark.kafka.client_errors import ADVICE, FENCED, REFUSED, TEMPORARY, client_error, client_logger

PID = "Failed to acquire transactional PID from broker TxnCoordinator/1: Broker: Coordinator load in progress: retrying"


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


def test_every_name_is_one_that_the_client_knows() -> None:
    """A name that is mistyped would never match."""
    known = {KafkaError(getattr(KafkaError, name)).name() for name in dir(KafkaError) if name.lstrip("_").isupper()}
    assert known >= TEMPORARY | FENCED | REFUSED | ADVICE.keys()


def test_coordinator_that_starts_is_logged_at_level_debug(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kmq_spark.kafka.client"):
        client_logger.warning("%s [%s] %s", "GETPID", "kmq-tracker-1", PID)
        client_logger.warning("%s [%s] %s", "GETPID", "kmq-tracker-2", "Fatal error: not authorized")
    assert [record.getMessage() for record in caplog.records] == ["GETPID [kmq-tracker-2] Fatal error: not authorized"]
    with caplog.at_level(logging.DEBUG, "kmq_spark.kafka.client"):
        client_logger.warning("%s [%s] %s", "GETPID", "kmq-tracker-3", PID)
    assert caplog.records[-1].levelname == "DEBUG"


def test_setting_that_one_of_several_clients_ignores_is_logged_at_level_debug(caplog: pytest.LogCaptureFixture) -> None:
    """`extra` of a consumer configures its producers too, and the library warns of each setting of consumers alone."""
    with caplog.at_level(logging.DEBUG, "kmq_spark.kafka.client"):
        Producer({"bootstrap.servers": "127.0.0.1:1", "session.timeout.ms": 6_000, "logger": client_logger}).poll(0)
    (record,) = [each for each in caplog.records if "session.timeout.ms" in each.getMessage()]
    assert record.levelname == "DEBUG"
