"""A Spark sink on a broker with Kafka's own authorizer: what `kmq acls` lists for it is enough."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kmq_spark.errors import KmqError
from kmq_spark.sink import write_queue
from tests.kafka.secured import SecuredBroker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.slow]

QUEUE = "orders"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    """A broker with a queue."""
    folder = tmp_path_factory.mktemp("secured")
    with SecuredBroker.with_queue(folder, QUEUE, "producer", "sink", "viewer") as broker:
        yield broker


def test_sink_does_its_work_with_what_kmq_acls_lists(secured: SecuredBroker, spark: SparkSession) -> None:
    to: dict[str, Any] = {
        "bootstrap_servers": secured.bootstrap_servers,
        "extra": secured.credentials("sink"),
        "slots": 2,
    }
    frame = spark.sql("select 'x' as v from range(10)")
    assert write_queue(frame, QUEUE, sink_id="a", run_id="1", value="v", **to).written == 10


def test_error_of_a_sink_without_its_rights_names_where_they_are_listed(
    secured: SecuredBroker, spark: SparkSession
) -> None:
    with pytest.raises(KmqError, match="kmq acls"):
        write_queue(
            spark.sql("select 'x' as v"), QUEUE, sink_id="c", run_id="1", value="v",
            bootstrap_servers=secured.bootstrap_servers, extra=secured.credentials("producer"),
        )  # fmt: skip
