"""Settings of the clients that the documentation promises."""

from __future__ import annotations

from kmq_spark.kafka.settings import consumer_config, reader_config

KBYTES = "queued.max.messages.kbytes"


def test_a_client_that_reads_keeps_4_mib_of_a_partition_unless_the_operator_says_otherwise() -> None:
    for config_of in (consumer_config, reader_config):
        assert config_of("localhost:9092", "group")[KBYTES] == 4_096
        assert config_of("localhost:9092", "group", extra={KBYTES: "65536"})[KBYTES] == "65536"


def test_a_consumer_gets_4_mib_of_a_partition_in_one_response_unless_the_operator_says_otherwise() -> None:
    name = "fetch.message.max.bytes"
    assert consumer_config("localhost:9092", "group")[name] == 4_194_304
    assert consumer_config("localhost:9092", "group", extra={name: "1048576"})[name] == "1048576"
