"""The Spark session of a program that is a guest in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kmq_spark.spark import session as module

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def test_session_that_was_there_before_goes_on(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Databricks, where later tasks use it."""
    monkeypatch.setattr(module, "_started", [])
    module.stop_session(module.build_session("guest"))
    assert spark.range(3).count() == 3
