"""What every tier shares: one embedded broker, started when the first test asks for it."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from kmq_spark.local.broker import EmbeddedBroker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

# A shared machine may be slow for a moment: time is measured in benchmarks, not here.
settings.register_profile("kmq", deadline=None)
settings.load_profile("kmq")

# For every JVM of Spark, ours and those of processes that tests start: within a test none earns back what the second
# compiler takes, on two cores least of all. Without it Java reserves a fifth of the room for compiled code, which
# Delta's tables fill within a minute; what then needs a new method handle takes the JVM down.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m")


@pytest.fixture(autouse=True)
def _logs_as_they_were() -> Iterator[None]:
    """Take off what a command that ran in this process logs with: its stderr ends with the test."""
    yield
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if type(handler) is logging.StreamHandler:
            root.removeHandler(handler)


@pytest.fixture(scope="session")
def broker() -> Iterator[EmbeddedBroker]:
    """
    One broker for the whole session, so tests name their queues apart.

    A test that stops, kills or pauses a broker makes its own.
    """
    # A killed consumer's session is waited for: it may ask for less than Kafka's least of six seconds.
    with EmbeddedBroker(extra={"group.min.session.timeout.ms": "1000"}) as running:
        yield running


@pytest.fixture(scope="session")
def bootstrap_servers(broker: EmbeddedBroker) -> str:
    """Where clients of the shared broker connect."""
    return broker.bootstrap_servers


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One Spark session for the whole session: local, two cores, UTC, no UI, with the locked connector jars."""
    from kmq_spark.local.jars import jar_paths  # noqa: PLC0415  # the unit tier runs without Spark
    from kmq_spark.spark.session import build_session, delta_settings, session_settings  # noqa: PLC0415

    settings = session_settings(jar_paths("spark")) | delta_settings()
    session = build_session("kmq-tests", master="local[2]", settings=settings)
    yield session
    session.stop()
