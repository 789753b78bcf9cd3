"""A small campaign on the broker and the Spark session of all tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from faults.campaign import Campaign

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from kmq_spark.local.broker import EmbeddedBroker


@pytest.fixture(scope="session")
def campaign(
    broker: EmbeddedBroker, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Campaign]:
    """The least of every fault: one injection of each kind."""
    campaign = Campaign(tmp_path_factory.mktemp("faults"), seed=1, scale=0.0, broker=broker, spark=spark)
    try:
        yield campaign
    finally:
        campaign.close()
