"""
The Spark session of the tracker: settings that matter, each with its reason.

Rule 1: what a checkpoint pins (shuffle partitions, state store) is set in code: no cluster default can change it.
Rule 2: nothing here knows a queue; one session runs several.

Measured on two cores with 8 markers partitions; see docs/design.md.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlparse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import SparkSession

_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_LOCAL_FILES = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"

_HADOOP_FILES = "org.apache.hadoop.fs.LocalFileSystem"
_BARE_FILES = "com.globalmentor.apache.hadoop.fs.BareLocalFileSystem"
"""The same, but that a file's mode is set by Java's file API instead of a `chmod` process for each."""

_MOUNTED_STORES = ("/Volumes/", "/Workspace/", "/dbfs/")
"""Where Databricks shows object stores as folders: a rename there is none, so its own checkpoint manager must stay."""

_LOG_FLAG = f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties').as_uri()}"


def streaming_settings(state_partitions: int) -> dict[str, str]:
    """
    Return the SQL settings that every tracker query runs with.

    Args:
        state_partitions: Tasks and state stores of one query; pinned by the first run of its checkpoint.
    """
    return {
        "spark.sql.shuffle.partitions": str(state_partitions),
        # Adaptive execution is off for stateful queries anyway; saying so keeps the partition count what it says.
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.streaming.stateStore.providerClass": _ROCKSDB,
        # Without it every batch uploads whole RocksDB snapshots.
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
        # A batch that is run again decides otherwise than at first (`decide_from`), so no file of the first run may
        # ever be taken for one of the second. Version 2 names each commit of state by an id that the commit log holds;
        # with version 1 a snapshot that was uploaded while a batch waited for its broker would outlive that batch.
        "spark.sql.streaming.stateStore.checkpointFormatVersion": "2",
        # When snapshots are uploaded and what is older is removed. A commit of version 2 names all commits since the
        # last snapshot, in a string of at most 64 KiB: of 863 batches, which is a minute and a half of short ones.
        "spark.sql.streaming.stateStore.maintenanceInterval": "10s",
        # One state row is one whole partition's table: a state that is sent again with each Arrow chunk must not be.
        "spark.sql.execution.arrow.maxRecordsPerBatch": "1000000",
        # No batch without new markers: an idle queue costs nothing.
        "spark.sql.streaming.noDataMicroBatches.enabled": "false",
        "spark.sql.session.timeZone": "UTC",
        # A query that waits for a lost broker may not hear that it is to stop; by default that is waited for, for ever.
        "spark.sql.streaming.stopTimeout": "15s",
        # Batches to keep for a restart; 100 by default, and each costs files.
        "spark.sql.streaming.minBatchesToRetain": "10",
        # The trigger is as short as possible, so "falling behind" is the normal state, not worth a warning a batch.
        "spark.sql.streaming.numRecentProgressUpdates": "20",
    }


def session_settings(jars: Sequence[Path] = (), driver_memory: str = "2g") -> dict[str, str]:
    """
    Return the settings that must stand before the JVM starts (local mode; `spark-submit.sh` passes its own).

    Args:
        jars: Connector jars from the lock file; empty where the cluster has them.
        driver_memory: Heap of the driver, which in local mode also runs the tasks.
    """
    settings = {
        "spark.driver.memory": driver_memory,
        # `query.stop()` during foreachBatch otherwise overflows the stack of a regex in the log formatter.
        "spark.driver.extraJavaOptions": f"-Xss16m -XX:+UseSerialGC {_LOG_FLAG}",
        "spark.ui.enabled": "false",
        # A bar that is drawn anew in every batch would be most of the log.
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        # Unix sockets instead of loopback TCP between the JVM and the Python workers: less time in each batch.
        "spark.python.unix.domain.socket.enabled": "true",
        # PySpark's own, but without a traceback for each worker whose query has stopped.
        "spark.python.daemon.module": "kmq_spark.spark.python_daemon",
        # Secrets must not reach the UI, the event log or error messages.
        "spark.redaction.regex": "(?i)secret|password|token|access[.]?key|kafka[.](sasl|ssl)|jaas|private.?key",
    }
    if jars:
        settings["spark.jars"] = ",".join(str(jar) for jar in jars)
    return settings


def delta_settings(*, is_local: bool = True) -> dict[str, str]:
    """
    Return the settings that make Delta's tables and SQL known: before the session starts, and for the ledger's alone.

    Args:
        is_local: Whether the machine is one of two or four cores, and not a cluster whose defaults fit it.
    """
    settings = {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        # Days are UTC days, and what is shown is UTC.
        "spark.sql.session.timeZone": "UTC",
    }
    if is_local:
        settings |= {
            # The snapshot of a small table is otherwise put together by 50 tasks, most of them empty.
            "spark.databricks.delta.snapshotPartitions": "2",
            # VACUUM lists the folders of the days in as many tasks as this, or in 200.
            "spark.sql.sources.parallelPartitionDiscovery.parallelism": "2",
            "spark.sql.shuffle.partitions": "4",
        }
    return settings


def local_checkpoint_settings(checkpoint_dir: str, session: SparkSession | None = None) -> dict[str, str]:
    """
    Return settings that make a checkpoint on a local disk right, and faster; empty for any other file system.

    The file system must replace a file by a rename, as POSIX does: a batch that is run again after a crash decides
    otherwise than at first (`decide_from`). What PySpark finds first, Hive's, does not: it leaves the first file, and
    Spark's manager says nothing. And it must be a `LocalFileSystem`: anything else Hadoop refuses where Spark's
    maintenance uploads a snapshot of the state, which then only a line at level WARN tells.

    Args:
        checkpoint_dir: A path without scheme is local, but for Databricks' own, which are object stores below.
        session: Where the settings go; it may have a file system that is faster still.
    """
    url = urlparse(checkpoint_dir)
    if url.scheme == "file" or (not url.scheme and not url.path.startswith(_MOUNTED_STORES)):
        return {
            # Renames through Java's own file API instead of Hadoop's FileContext, which forks twice for each file.
            "spark.sql.streaming.checkpointFileManagerClass": _LOCAL_FILES,
            "fs.file.impl": _BARE_FILES if session is not None and _has_bare_files(session) else _HADOOP_FILES,
            # Else whoever asked for the local file system first has chosen for everybody.
            "fs.file.impl.disable.cache": "true",
        }
    return {}


def _has_bare_files(session: SparkSession) -> bool:
    """Return whether the one JVM that reads and writes checkpoints has the file system that forks nothing."""
    context = session.sparkContext
    master = context.master or ""
    if master != "local" and not master.startswith("local["):
        return False
    found = context._jsc.hadoopConfiguration().getClassByNameOrNull(_BARE_FILES)  # noqa: SLF001  # no other way to it
    return found is not None


def build_session(
    app_name: str,
    *,
    master: str | None = None,
    settings: Mapping[str, str] | None = None,
    log_level: str = "ERROR",
) -> SparkSession:
    """
    Return the running session, or start one.

    Args:
        app_name: Shown by Spark; never holds settings or secrets.
        master: Spark master such as `local[2]`; None leaves it to `spark-submit`.
        settings: More Spark settings, over none of ours by default.
        log_level: Level of the JVM's log.
    """
    from pyspark.sql import SparkSession as Session  # noqa: PLC0415  # importing this module must not start loading Spark

    # The workers must run this interpreter: another one on the PATH may lack pyarrow.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = Session.builder.appName(app_name)
    if master is not None:
        builder = builder.master(master)
    for key, value in (settings or {}).items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel(log_level)
    return session
