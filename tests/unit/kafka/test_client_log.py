"""The client's log: what it says of normal work is no warning, whatever else it says passes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from confluent_kafka import Producer

from kmq_spark.kafka.client_log import client_logger

if TYPE_CHECKING:
    import pytest

PID = "Failed to acquire transactional PID from broker TxnCoordinator/1: Broker: Coordinator load in progress: retrying"


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
