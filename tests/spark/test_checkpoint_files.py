"""The files of a local checkpoint: what a batch that is run again writes replaces what it wrote at first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kmq_spark.spark.session import local_checkpoint_settings

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def test_file_of_a_checkpoint_is_replaced_when_it_is_written_again(spark: SparkSession, tmp_path: Path) -> None:
    """
    Else the state of a batch that died before its commit outlives it, and what it had decided is lost.

    Sequence: batch 7 decides, its state says so, the tracker dies before its transaction; batch 7 is run again and
    decides nothing, as it must; its state is the one that the next restart has to find.
    """
    for key, value in local_checkpoint_settings(str(tmp_path)).items():
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
    assert (tmp_path / "7.changelog").read_bytes() == b"again"
    assert [file.name for file in tmp_path.iterdir()] == ["7.changelog"]
