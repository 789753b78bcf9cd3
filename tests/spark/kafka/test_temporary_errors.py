"""Which errors of a broker are temporary: those that Kafka's own client repeats."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from confluent_kafka import KafkaError
from py4j.java_gateway import is_instance_of

from kmq_spark.kafka.client_errors import TEMPORARY

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

MISSING_TOPIC = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART).name()


def test_every_error_that_kafkas_own_client_repeats_is_temporary(spark: SparkSession) -> None:
    """The one for a missing topic is a `TopicError`, which the tracker repeats too once it has seen the topic."""
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    kafka = gateway.jvm.org.apache.kafka.common
    retriable = kafka.errors.RetriableException
    found = {
        KafkaError(error.code()).name()
        for error in kafka.protocol.Errors.values()
        if error.exception() is not None and is_instance_of(gateway, error.exception(), retriable)
    }
    known = {name for name in found if not name.startswith("ERR_")}  # librdkafka has no names for the others
    assert len(known) > 25
    assert known - TEMPORARY == {MISSING_TOPIC}
