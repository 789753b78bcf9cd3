"""A cluster's default of the type of instants changes no result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kmq_spark.spark.session import delta_settings, streaming_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("settings", [delta_settings(), streaming_settings(2)], ids=["ledger", "tracker"])
def test_instants_are_instants_whatever_the_default_of_the_cluster_is(
    spark: SparkSession, settings: dict[str, str]
) -> None:
    """With TIMESTAMP_NTZ in spark-defaults, a column declared as timestamp would be of another type."""
    session = spark.newSession()
    session.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    for key, value in settings.items():
        if session.conf.isModifiable(key):
            session.conf.set(key, value)
    assert session.sql("SELECT CAST(NULL AS timestamp) AS at").dtypes == [("at", "timestamp")]
