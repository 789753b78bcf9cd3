"""
Start the Spark session, with the settings that matter and the reason for each.

Rule 1: Settings that a checkpoint fixes (shuffle partitions, state store) are set in code. No cluster default can
change them.
Rule 2: This module knows no queue: one session runs the trackers of several queues.

Measured on two cores with 8 markers partitions; see docs/internals/design.md.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from kmq_spark.errors import SetupError
from kmq_spark.local.java import collector

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_LOCAL_FILES = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"

_HADOOP_FILES = "org.apache.hadoop.fs.LocalFileSystem"
_BARE_FILES = "com.globalmentor.apache.hadoop.fs.BareLocalFileSystem"
"""Like `_HADOOP_FILES`, but it sets file modes with Java's file API instead of a `chmod` process for each file."""

_MOUNTED_STORES = ("/Volumes/", "/Workspace/", "/dbfs/")
"""
Paths where Databricks mounts object stores as folders. A rename is not atomic there, so the checkpoint manager of
Databricks must stay in use.
"""

_QUICK_START = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
"""
Java's first compiler only. The second one takes half of two cores for minutes after a start, see docs/performance.md.
The room for compiled code is Java's default with both compilers. Delta fills the smaller default of one, and then the
JVM ends.
"""

_LOG_FLAG = f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties').as_uri()}"

# -Xss: otherwise `query.stop()` during foreachBatch overflows the stack in a regex of the log formatter.
DRIVER_OPTIONS = f"-Xss16m {_QUICK_START} {_LOG_FLAG}"
"""Options of the driver's Java in local mode, before those of the user."""

_started: list[SparkSession] = []
"""Sessions that run because `build_session` has started them."""


SOCKET_FOLDER = "/tmp"  # noqa: S108  # Spark gives each socket a name that nobody can guess

LOOK_MS, LONGEST_LOOK_MS = 10, 500
"""How long an idle query waits until it looks again, for each query of the process; and at most, milliseconds."""


def streaming_settings(state_partitions: int, queries: int = 1) -> dict[str, str]:
    """Return the SQL settings of every tracker query; of *queries* in this process."""
    return {
        "spark.sql.shuffle.partitions": str(state_partitions),
        # Spark disables adaptive execution for stateful queries anyway. The explicit setting guarantees that the number
        # of shuffle partitions does not change.
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.streaming.stateStore.providerClass": _ROCKSDB,
        # Without it every batch uploads full RocksDB snapshots.
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
        # Version 2 gives each commit of the state an id, which the commit log contains: a batch that runs again never
        # uses a file of its first run.
        "spark.sql.streaming.stateStore.checkpointFormatVersion": "2",
        # How often Spark uploads snapshots and removes older ones. With version 2 each commit contains the ids of all
        # commits since the last snapshot, in a string of at most 64 KiB: 863 batches, or 90 s of short batches.
        "spark.sql.streaming.stateStore.maintenanceInterval": "10s",
        "spark.sql.streaming.stateStore.minDeltasForSnapshot": "10",
        # A state row is the whole table of a markers partition, and Spark sends it again with each Arrow chunk. So all
        # rows of a batch must fit into one chunk.
        "spark.sql.execution.arrow.maxRecordsPerBatch": "1000000",
        "spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1),
        # No batch without new markers: an idle queue costs nothing.
        "spark.sql.streaming.noDataMicroBatches.enabled": "false",
        # Each look for new markers asks the broker. Up to 50 queries together look as often as one: 100 times a second.
        "spark.sql.streaming.pollingDelay": f"{min(LOOK_MS * max(1, queries), LONGEST_LOOK_MS)}ms",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.timestampType": "TIMESTAMP_LTZ",
        # A query that waits for an unreachable broker may not react to `stop()`, which by default waits without limit.
        "spark.sql.streaming.stopTimeout": "15s",
        # Batches whose checkpoint files are kept for a restart: the default of 100 keeps more files than are needed.
        "spark.sql.streaming.minBatchesToRetain": "10",
        # Progress reports kept in memory, 100 by default: the tracker reads only the newest one.
        "spark.sql.streaming.numRecentProgressUpdates": "20",
    }


def session_settings(jars: Sequence[Path] = (), driver_memory: str = "2g") -> dict[str, str]:
    """Return the settings that must be set before the JVM starts, for local mode; `spark-submit.sh` passes its own."""
    settings = {
        "spark.driver.memory": driver_memory,
        "spark.driver.defaultJavaOptions": " ".join([DRIVER_OPTIONS, *collector()]),
        "spark.ui.enabled": "false",
        # The progress bar is printed again in every batch and would fill the log.
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.submit.deployMode": "client",
        # Of all queues of a process together. Above 64, the default, Spark opens a new Kafka client for each markers
        # partition in each batch: the one that it closes to make room is the one that it needs next.
        "spark.kafka.consumer.cache.capacity": "4096",
        # Unix sockets between the JVM and the Python workers are faster than loopback TCP.
        "spark.python.unix.domain.socket.enabled": "true",
        # Their path has 107 characters at most, whatever `java.io.tmpdir` is; Spark's names have 42.
        "spark.python.unix.domain.socket.dir": SOCKET_FOLDER,
        # PySpark's daemon, without a traceback for each worker when a query stops.
        "spark.python.daemon.module": "kmq_spark.spark.python_daemon",
        # Keep secrets out of the UI, the event log and error messages.
        "spark.redaction.regex": "(?i)secret|password|token|access[.]?key|kafka[.](sasl|ssl)|jaas|private.?key",
    }
    if jars:
        settings["spark.jars"] = ",".join(str(jar) for jar in jars)
    return settings


def delta_settings(*, is_local: bool = True) -> dict[str, str]:
    """Return the settings for Delta's tables and SQL. Only the ledger needs them, before its session starts."""
    settings = {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        # The ledger's days and displayed times are UTC.
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.timestampType": "TIMESTAMP_LTZ",
    }
    if is_local:
        settings |= {
            # By default 50 tasks build the snapshot of a table; for a small table most of them are empty.
            "spark.databricks.delta.snapshotPartitions": "2",
            # VACUUM lists the folders of the days in this many tasks; the default is 200.
            "spark.sql.sources.parallelPartitionDiscovery.parallelism": "2",
            "spark.sql.shuffle.partitions": "4",
        }
    return settings


def local_checkpoint_settings(checkpoint_dir: str, session: SparkSession | None = None) -> dict[str, str]:
    """
    Return settings that make a checkpoint on a local disk correct and faster; empty for any other file system.

    A rename must replace an existing file, as in POSIX: a batch that runs again after a crash writes its files again.
    The local file system that PySpark finds first is Hive's. Its rename keeps the existing file, and Spark's checkpoint
    manager reports no error.

    The file system must also be a `LocalFileSystem`. Hadoop refuses any other one when Spark's maintenance task uploads
    a snapshot of the state, and only a log line at level WARN reports that.
    """
    url = urlparse(checkpoint_dir)
    scheme = url.scheme or (_default_scheme(session) if session is not None else "file")
    if scheme == "file" and (url.scheme or not url.path.startswith(_MOUNTED_STORES)):
        return {
            # Renames with Java's file API. Hadoop's FileContext starts two processes for each file.
            "spark.sql.streaming.checkpointFileManagerClass": _LOCAL_FILES,
            "fs.file.impl": _BARE_FILES if session is not None and _has_bare_files(session) else _HADOOP_FILES,
            # Otherwise the first request for `file:` fixes the class for the whole JVM.
            "fs.file.impl.disable.cache": "true",
        }
    return {}


def _default_scheme(session: SparkSession) -> str:
    """Return the scheme of the file system of a path without one, such as `hdfs` on a cluster of Hadoop."""
    jvm: Any = session.sparkContext._jvm  # noqa: SLF001  # no other way to Hadoop's file systems
    configuration = session._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001  # as above
    return str(jvm.org.apache.hadoop.fs.FileSystem.getDefaultUri(configuration).getScheme())


def _has_bare_files(session: SparkSession) -> bool:
    """Return whether Spark runs in one JVM, and that JVM has the file system that starts no `chmod` processes."""
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
    """Return the running session, or start one."""
    # Imported here: importing this module must not start loading Spark.
    from pyspark import SparkContext  # noqa: PLC0415
    from pyspark.errors import PySparkRuntimeError  # noqa: PLC0415
    from pyspark.java_gateway import ensure_callback_server_started  # noqa: PLC0415
    from pyspark.sql import SparkSession as Session  # noqa: PLC0415

    # The workers must use this interpreter: another `python3` on the PATH may not have pyarrow.
    if master is not None and master.startswith("local"):
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
        os.environ.pop("SPARK_HOME", None)  # PySpark has its own; another one may be of another version, or gone
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    is_own = SparkContext._active_spark_context is None  # noqa: SLF001  # no other way to it that starts none
    # A session of Spark Connect has no JVM that we can reach.
    builder = Session.builder.appName(app_name).config("spark.api.mode", "classic")
    if master is not None:
        builder = builder.master(master)
    for key, value in (settings or {}).items():
        builder = builder.config(key, value)
    try:
        session = builder.getOrCreate()
    except (OSError, PySparkRuntimeError) as error:
        message = f"cannot start Spark: {str(error).rstrip('.')}; the lines of Java above say why, or check SPARK_HOME"
        raise SetupError(message) from error
    if is_own:
        _started.append(session)
    session.sparkContext.setLogLevel(log_level)
    # Now, while few files are open: py4j waits for Spark's calls with `select`, which takes no number above 1,023, and
    # would never hear of a batch.
    ensure_callback_server_started(session.sparkContext._gateway)  # type: ignore[no-untyped-call]  # noqa: SLF001  # as `foreachBatch` does
    # The executors of a `local-cluster` inherit what the JVM ignores, and Spark ends them with SIGTERM.
    if master is not None and not master.startswith("local-cluster"):
        _ignore_sigterm(session)
    return session


def stop_session(session: SparkSession) -> None:
    """Stop a session that `build_session` has started; one that was there before, as on Databricks, goes on."""
    if session not in _started:
        return
    _started.remove(session)
    try:
        session.stop()
    except Exception:  # py4j errors have no common base class, and the JVM may have ended already
        logger.debug("Spark did not stop", exc_info=True)


def _ignore_sigterm(session: SparkSession) -> None:
    """
    Make the session's JVM ignore SIGTERM: this process handles it, and the JVM ends after this process.

    systemd sends SIGTERM to each process of a service. A JVM that ends at once interrupts the running batches, and a
    tracker can then neither finish them nor hand its queues over in order.
    """
    signals = session.sparkContext._jvm.sun.misc  # type: ignore[union-attr]  # noqa: SLF001  # no other way to the JVM
    signals.Signal.handle(signals.Signal("TERM"), signals.SignalHandler.SIG_IGN)
