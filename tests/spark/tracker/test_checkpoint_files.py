"""The checkpoint of a tracker: what it is written with, and when it is not used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kmq_spark.kafka.positions import Position, ResumePoint
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.spark.session import local_checkpoint_settings
from kmq_spark.tracker.checkpoint import TOPIC_ID_FILE, Checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def test_session_of_our_own_jars_writes_checkpoints_without_a_process_a_file(spark: SparkSession) -> None:
    """A session without our jars uses Hadoop's own file system."""
    assert "BareLocalFileSystem" in local_checkpoint_settings("/somewhere", spark)["fs.file.impl"]
    assert ".LocalFileSystem" in local_checkpoint_settings("/somewhere")["fs.file.impl"]


def test_path_without_a_scheme_is_where_the_cluster_says(spark: SparkSession) -> None:
    """On Hadoop's clusters it is in HDFS, which has a checkpoint manager of its own."""
    (session := spark.newSession()).conf.set("fs.defaultFS", "hdfs://somewhere")
    assert local_checkpoint_settings("/checkpoints", session) == {}
    assert local_checkpoint_settings("file:///checkpoints", session) != {}


def test_snapshot_that_could_not_be_uploaded_is_reported(spark: SparkSession) -> None:
    """Spark logs it at level WARN only, and fails much later; the loggers around it are off."""
    jvm = spark._jvm
    assert jvm is not None
    package = "org.apache.spark.sql.execution.streaming"
    loggers = jvm.org.apache.logging.log4j.LogManager
    assert loggers.getLogger(f"{package}.state.RocksDBStateStoreProvider").isWarnEnabled()
    assert not loggers.getLogger(package).isErrorEnabled()


def resume_point(topic_id: str, *, read_to: int = 0, starts_at: int = 0, **options: Any) -> ResumePoint:
    """Return where a rebuild begins."""
    return ResumePoint({0: Position(read_to, starts_at)}, {0: starts_at}, topic_id=topic_id, **options)


def test_checkpoint_of_another_topic_is_renamed(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its offsets mean nothing in a topic that was deleted and created again."""
    topics, path = QueueTopics("orders"), f"file://{tmp_path}/orders"
    folder = Checkpoint(path, spark)
    folder.rename()  # there is none
    folder.prepare(resume_point("first"), topics, must_be_whole=True)
    folder.prepare(resume_point("first"), topics, must_be_whole=True)
    assert (tmp_path / "orders" / TOPIC_ID_FILE).read_text() == "first"
    for number, topic_id in ((1, "second"), (2, "third")):
        folder.prepare(resume_point(topic_id), topics, must_be_whole=True)
        assert (tmp_path / f"orders.damaged-{number}" / TOPIC_ID_FILE).exists()
        assert (tmp_path / "orders" / TOPIC_ID_FILE).read_text() == topic_id
    assert "cannot be used and was renamed" in caplog.text


def plan_batch(checkpoint: Path, number: int) -> Path:
    """Write down that a batch reads to offset 100, as Spark does before it begins; return the folder of such files."""
    offsets = checkpoint / "offsets"
    offsets.mkdir(exist_ok=True)
    (offsets / str(number)).write_text('v1\n{}\n{"orders.markers": {"0": 100}}')
    return offsets


def commit_batch(checkpoint: Path, number: int) -> None:
    """Write down that a batch is over."""
    commits = checkpoint / "commits"
    commits.mkdir(exist_ok=True)
    (commits / str(number)).write_text('v1\n{"nextBatchWatermarkMs":0}')


def test_checkpoint_without_a_batch_is_deleted(spark: SparkSession, tmp_path: Path) -> None:
    """
    Its planned batch begins where the tracker before began. With the rules and the clock of where this one begins, the
    state would differ: duel of the campaign, consumers' ENDs EXPIRED of before the rules became dead letters.
    """
    folder, topics = Checkpoint(f"file://{tmp_path}/orders", spark), QueueTopics("orders")
    folder.prepare(resume_point("id"), topics, must_be_whole=True)
    offsets = plan_batch(tmp_path / "orders", 0)
    folder.prepare(resume_point("id", read_to=90, starts_at=80), topics, must_be_whole=True)
    assert not offsets.exists()
    plan_batch(tmp_path / "orders", 0)
    commit_batch(tmp_path / "orders", 0)
    plan_batch(tmp_path / "orders", 1)
    folder.prepare(resume_point("id", read_to=90, starts_at=80), topics, must_be_whole=True)
    assert (offsets / "1").exists()


def test_checkpoint_that_is_slower_than_a_rebuild_is_deleted(spark: SparkSession, tmp_path: Path) -> None:
    """Not so where a marker that a rebuild needs was removed: only the checkpoint knows its message."""
    folder, topics = Checkpoint(f"file://{tmp_path}/orders", spark), QueueTopics("orders")
    folder.prepare(resume_point("id"), topics, must_be_whole=True)
    offsets = plan_batch(tmp_path / "orders", 7)
    commit_batch(tmp_path / "orders", 7)
    near, far = 100, 101
    for kept in (
        resume_point("id", read_to=far, starts_at=near),
        ResumePoint({0: Position(far, 5)}, {0: far}, topic_id="id"),
    ):
        folder.prepare(kept, topics, must_be_whole=True)
        assert (offsets / "7").exists()
    folder.prepare(resume_point("id", read_to=far, starts_at=far), topics, must_be_whole=True)
    assert not offsets.exists()
