"""A tracker that starts says so if a transaction keeps it from reading the markers, and goes on when that has ended."""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from kmq_spark.tracker import queue_tracker
from kmq_spark.tracker.service import allow_open_files
from tests.kafka.conftest import receive_all, wait_until
from tests.kafka.stage import Stage
from tests.limits import COMES_S

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.kafka]


def test_tracker_behind_an_open_transaction_warns_until_it_ends(
    spark: SparkSession,
    bootstrap_servers: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queue_tracker, "BLOCKED_AFTER_S", 1.0)
    stage = Stage(spark, bootstrap_servers, tmp_path, f"blocked-{time.time_ns()}")
    settings: dict[str, str | int | float | bool] = {
        "bootstrap.servers": bootstrap_servers,
        "transactional.id": f"{stage.queue}-open",
        "transaction.timeout.ms": 900_000,  # a slow machine needs more than a minute until the tracker reads
    }
    other = Producer(settings)
    other.init_transactions(COMES_S)
    other.begin_transaction()
    other.produce(stage.layout.topics.markers_topic, b"aborted in the end", partition=0)
    assert other.flush(COMES_S) == 0
    warnings: list[str] = []

    def end_it_after_the_warning() -> None:
        wait_until(lambda: "decides nothing" in caplog.text)
        warnings.append(caplog.text)
        other.abort_transaction(COMES_S)

    ending = threading.Thread(target=end_it_after_the_warning)
    ending.start()
    with stage.tracking():
        ending.join(COMES_S)
    assert "it cannot read its TERM, and has read nothing for" in warnings[0]
    assert "is ready" not in warnings[0]


def test_tracker_whose_batch_does_not_end_is_in_trouble_until_it_ends(
    spark: SparkSession, bootstrap_servers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ticker and its heartbeats go on: they show that the process lives, not that it does its work."""
    monkeypatch.setattr(queue_tracker, "STUCK_AFTER_S", 1.0)
    stage = Stage(spark, bootstrap_servers, tmp_path, f"stuck-{time.time_ns()}")
    goes_on = threading.Event()
    stage.send("a")
    with stage.tracking() as tracker, stage.consumer() as consumer:

        def wait(*_: object) -> None:
            goes_on.wait(COMES_S)

        tracker.on_batch = wait
        assert receive_all(consumer, 1)
        assert wait_until(lambda: "has read no marker for" in tracker.trouble())
        goes_on.set()
        assert wait_until(lambda: tracker.trouble() == "")


def test_tracker_redelivers_beside_more_open_files_than_select_can_name(
    spark: SparkSession, bootstrap_servers: str, tmp_path: Path
) -> None:
    """As one of many queues has them: Spark's callbacks into Python died in silence above 1,023 open files."""
    allow_open_files(40)
    with ExitStack() as files:
        for _ in range(1_100):
            files.enter_context(Path(os.devnull).open())
        stage = Stage(spark, bootstrap_servers, tmp_path, f"files-{time.time_ns()}")
        stage.send("a")
        with stage.tracking(), stage.consumer() as consumer:
            receive_all(consumer, 1)
            assert receive_all(consumer, 1)[0].delivery_count == 2
