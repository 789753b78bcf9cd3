"""Files of a local checkpoint: a batch that runs again replaces the files of its first run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kmq_spark.spark.session import local_checkpoint_settings
from kmq_spark.tracker.checkpoint_folder import TOPIC_ID_FILE, CheckpointFolder

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def test_session_of_our_own_jars_writes_checkpoints_without_a_process_a_file(spark: SparkSession) -> None:
    """A session without our jars uses Hadoop's own file system."""
    assert "BareLocalFileSystem" in local_checkpoint_settings("/somewhere", spark)["fs.file.impl"]
    assert ".LocalFileSystem" in local_checkpoint_settings("/somewhere")["fs.file.impl"]


def test_snapshot_that_could_not_be_uploaded_is_reported(spark: SparkSession) -> None:
    """Spark logs it at level WARN only, and fails much later; the loggers around it are off."""
    jvm = spark._jvm
    assert jvm is not None
    package = "org.apache.spark.sql.execution.streaming"
    loggers = jvm.org.apache.logging.log4j.LogManager
    assert loggers.getLogger(f"{package}.state.RocksDBStateStoreProvider").isWarnEnabled()
    assert not loggers.getLogger(package).isErrorEnabled()


@pytest.mark.parametrize("has_bare_files", [False, True], ids=["hadoop", "bare"])
def test_file_of_a_checkpoint_is_replaced_when_it_is_written_again(
    spark: SparkSession, tmp_path: Path, *, has_bare_files: bool
) -> None:
    """
    Otherwise the state of a batch that failed before its commit would be kept, and its decisions would be lost.

    Sequence: batch 7 decides, its state says so, the tracker dies before its transaction; batch 7 runs again and
    decides nothing, as it must; the next restart has to find the state of that second run.
    """
    for key, value in local_checkpoint_settings(str(tmp_path), spark if has_bare_files else None).items():
        spark.conf.set(key, value)
    jvm = spark._jvm
    assert jvm is not None
    path = jvm.org.apache.hadoop.fs.Path
    managers = jvm.org.apache.spark.sql.execution.streaming.checkpointing.CheckpointFileManager
    hadoop = spark._jsparkSession.sessionState().newHadoopConf()
    manager = managers.create(path(str(tmp_path)), hadoop)
    for content in (b"at first", b"again"):
        stream = manager.createAtomic(path(str(tmp_path / "7.changelog")), True)  # noqa: FBT003  # Spark's: overwrite
        stream.write(bytearray(content))
        stream.close()
    read = manager.open(path(str(tmp_path / "7.changelog")))  # with its checksum
    assert bytes(read.readAllBytes()) == b"again"
    read.close()
    assert [file.name for file in tmp_path.iterdir() if not file.name.startswith(".")] == ["7.changelog"]
    assert (tmp_path / "7.changelog").stat().st_mode & 0o777 == 0o644


def test_checkpoint_is_named_and_renamed_on_a_file_system_of_hadoop(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a cluster's object store; a scheme that the JVM does not know is an error."""
    monkeypatch.setattr(CheckpointFolder, "_is_local", staticmethod(lambda _: False))
    folder = CheckpointFolder(f"file://{tmp_path}/orders", spark)
    assert folder.rename_damaged() is None
    folder.write_topic_id("first")
    folder.write_tracker_id("newest")
    assert (folder.topic_id(), folder.tracker_id()) == ("first", "newest")
    assert not folder.has_batches()
    (tmp_path / "orders" / "commits").mkdir()
    (tmp_path / "orders" / "commits" / "0").write_text("v1")
    assert folder.has_batches()
    for number in (1, 2):
        folder.write_topic_id("first")
        assert folder.rename_damaged() == f"file://{tmp_path}/orders.damaged-{number}"
        assert (tmp_path / f"orders.damaged-{number}" / TOPIC_ID_FILE).read_text() == "first"
        assert folder.topic_id() == ""
    assert CheckpointFolder("unheard-of://bucket/orders", spark).rename_damaged() is None
    assert "move it away" in caplog.text
