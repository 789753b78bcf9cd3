"""Decisions are a function of the log: a recorded markers topic gives the same ones, however it is read."""

from __future__ import annotations

import random
import shutil
import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from faults.product_log import read_marker_logs
from kmq_spark.core.backoff import Backoff, BackoffKind
from kmq_spark.core.markers import Marker, MarkerType, OffsetRange, Outcome, Release
from kmq_spark.core.policy import Rules
from kmq_spark.kafka.topics import create_queue
from kmq_spark.spark.session import local_checkpoint_settings, streaming_settings
from kmq_spark.testing import ModelTracker
from kmq_spark.tracker.fold_rows import FoldSettings
from kmq_spark.tracker.query import MarkersSource, build_query, read_markers
from kmq_spark.wire.codec import encode_marker

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from kmq_spark.core.decisions import Decision
    from kmq_spark.core.outcome import PartitionOutcome

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.kafka]

PARTITIONS = 2
MARKERS = 800
RULES = Rules(max_deliveries=3, backoff=Backoff(BackoffKind.LINEAR, 40, 200, 0.5), dead_letters_expired=True)


class Recording:
    """A markers topic that was written once, and is read in many ways."""

    def __init__(self, spark: SparkSession, bootstrap_servers: str, folder: Path) -> None:
        """Write it: a seeded mix of markers, over some seconds, so that leases of 0 to 900 ms expire in between."""
        self._spark, self._bootstrap_servers, self._folder = spark, bootstrap_servers, folder
        self.queue = f"recording.{time.time_ns()}"
        self.topic = create_queue(
            self.queue, bootstrap_servers=bootstrap_servers, partitions=PARTITIONS
        ).topics.markers_topic
        producer, generator = Producer({"bootstrap.servers": bootstrap_servers}), random.Random(11)
        for number in range(MARKERS):
            marker = _marker(generator)
            partition = number % PARTITIONS
            producer.produce(self.topic, encode_marker(marker), partition=partition)
            if number % 20 == 0:
                producer.flush()
                time.sleep(0.05)
        producer.flush()

    def expected(self) -> dict[int, list[Decision]]:
        """Return what the model decides, by markers partition."""
        logs = read_marker_logs(self.queue, self._bootstrap_servers)
        return {partition: ModelTracker(RULES).fold(log)[0] for partition, log in logs.items()}

    def replay(
        self, checkpoint: str, *, batch: int, state_partitions: int, batches: int = 1_000_000
    ) -> dict[int, list[Decision]]:
        """Read the topic with a query; with *batches* it breaks off after so many."""
        decided: dict[int, list[Decision]] = {partition: [] for partition in range(PARTITIONS)}
        done: list[int] = []

        def deliver(batch_id: int, outcomes: list[PartitionOutcome]) -> None:
            if len(done) == batches:
                raise InterruptedError
            done.append(batch_id)
            for outcome in outcomes:
                decided[outcome.marker_partition] += outcome.decisions.messages()

        settings = streaming_settings(state_partitions) | local_checkpoint_settings(str(self._folder), self._spark)
        for key, value in settings.items():
            self._spark.conf.set(key, value)
        source = MarkersSource(
            self._bootstrap_servers, self.topic, dict.fromkeys(range(PARTITIONS), 0), "recording", batch, {}
        )
        query = build_query(
            read_markers(self._spark, source),
            FoldSettings(self.topic, RULES),
            deliver,
            query_name=f"replay-{checkpoint}",
            checkpoint=str(self._folder / checkpoint),
            trigger={"availableNow": True},
        ).start()
        try:
            query.awaitTermination(100)
        except Exception:
            if len(done) < batches:
                raise
        return decided

    def lose(self, checkpoint: str) -> None:
        """Remove a checkpoint."""
        shutil.rmtree(self._folder / checkpoint)


def _marker(generator: random.Random) -> Marker:
    kind = generator.choices(
        (MarkerType.START, MarkerType.END, MarkerType.KEEPALIVE, MarkerType.TICK), weights=(5, 4, 2, 3)
    )[0]
    if kind is MarkerType.TICK:
        return Marker(kind)
    covered = (OffsetRange(generator.randrange(200), generator.randint(1, 5)),)
    lease_ms = 0 if kind is MarkerType.END else generator.randrange(900)
    return Marker(
        kind, 0, covered, redeliver_after_ms=lease_ms, delivery_count=generator.randint(1, 4),
        outcome=generator.choice(list(Outcome)[:3]), release=generator.choice(list(Release)),
        never_handed_out=kind is not MarkerType.END and generator.random() < 0.3,  # three in ten
    )  # fmt: skip


def test_recorded_log_gives_the_same_decisions_however_it_is_read(
    spark: SparkSession, bootstrap_servers: str, tmp_path: Path
) -> None:
    """Other batch sizes, other state partitions, a checkpoint lost half-way: record for record the same."""
    recording = Recording(spark, bootstrap_servers, tmp_path)
    expected = recording.expected()
    assert sum(map(len, expected.values())) > 100  # else it proves nothing
    assert recording.replay("whole", batch=1_000_000, state_partitions=2) == expected
    assert recording.replay("in pieces", batch=90, state_partitions=2) == expected
    assert recording.replay("one state partition", batch=300, state_partitions=1) == expected
    recording.replay("lost", batch=150, state_partitions=3, batches=3)
    recording.lose("lost")
    assert recording.replay("lost", batch=200, state_partitions=3) == expected
