"""
Load the classes that the tracker and the ledger load, in a local Spark whose JVM archives them as it ends.

Rule 1: no broker. A stateful query reads files in place of the markers topic; the connector's and the Kafka client's
classes are loaded by their names.
Rule 2: nothing is written outside a temporary folder.

`python -m kmq_spark.spark.class_loading ARCHIVE JAR …` is run by `kmq_spark.spark.class_archive`.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import functions as F  # noqa: N812  # the conventional name
from pyspark.sql.streaming.state import GroupStateTimeout

from kmq_spark.spark.session import (
    DRIVER_OPTIONS,
    build_session,
    delta_settings,
    local_checkpoint_settings,
    session_settings,
    streaming_settings,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.state import GroupState

_KAFKA_PACKAGES = (
    "org/apache/spark/sql/kafka010/",
    "org/apache/kafka/clients/",
    "org/apache/kafka/common/",
)

_JVM_END_S = 300


def load_classes(archive: Path, jars: Sequence[Path]) -> None:
    """
    Run a local Spark that does what tracker and ledger do, and end its JVM, which then writes the archive.

    Args:
        archive: File to write.
        jars: Connector jars.
    """
    option = shlex.quote(f"-XX:ArchiveClassesAtExit={archive}")
    settings = session_settings(jars) | delta_settings()
    settings["spark.driver.extraJavaOptions"] = f"{DRIVER_OPTIONS} {option}"
    spark = build_session("kmq-classes", master="local[2]", settings=settings)
    gateway: Any = spark.sparkContext._gateway  # noqa: SLF001  # no other way to the JVM's process
    with tempfile.TemporaryDirectory() as folder:
        _run_stateful_query(spark, Path(folder))
        _write_table(spark, Path(folder))
        _load_by_name(spark, jars)
        spark.stop()
        # As at the end of Python. Here we wait for the JVM, which archives while it ends.
        gateway.proc.stdin.close()
        gateway.proc.wait(_JVM_END_S)


def _run_stateful_query(spark: SparkSession, folder: Path) -> None:
    """Run one batch of a query like the tracker's: Arrow, RocksDB, foreachBatch."""
    for key, value in (streaming_settings(2) | local_checkpoint_settings(str(folder), spark)).items():
        spark.conf.set(key, value)
    (folder / "in").mkdir()
    (folder / "in" / "markers.json").write_text('{"partition": 0, "value": "a"}\n{"partition": 1, "value": "b"}\n')
    markers = spark.readStream.schema("partition int, value string").json(str(folder / "in"))
    rows = markers.select(
        "partition", F.unix_millis(F.current_timestamp()).alias("at_ms"), F.col("value").cast("binary").alias("value")
    )
    counted = rows.groupBy("partition").applyInPandasWithState(
        _count, "partition int, rows long", "state binary", "append", GroupStateTimeout.NoTimeout
    )
    query = (
        counted.writeStream.outputMode("append")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .foreachBatch(_read)
        .start()
    )
    query.awaitTermination()


def _count(key: tuple[Any, ...], chunks: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Count the rows of a partition, with a state."""
    import pandas as pd  # noqa: PLC0415  # in the worker

    rows = sum(len(chunk) for chunk in chunks)
    state.update((b"state",))
    yield pd.DataFrame({"partition": [key[0]], "rows": [rows]})


def _read(decisions: DataFrame, _batch_id: int) -> None:
    decisions.toArrow()


def _write_table(spark: SparkSession, folder: Path) -> None:
    """Write a Delta table as the ledger does, and read it."""
    table = str(folder / "table")
    rows = spark.range(4).withColumn("day", F.current_date())
    rows.write.format("delta").partitionBy("day").save(table)
    rows.write.format("delta").mode("append").save(table)
    spark.read.format("delta").load(table).groupBy("day").count().collect()


def _load_by_name(spark: SparkSession, jars: Sequence[Path]) -> None:
    """Load the connector's classes and those of the Kafka client."""
    configuration: Any = spark.sparkContext._jsc.hadoopConfiguration()  # noqa: SLF001  # no other way to the jars' loader
    for jar in jars:
        with zipfile.ZipFile(jar) as entries:
            for name in entries.namelist():
                if name.startswith(_KAFKA_PACKAGES) and name.endswith(".class"):
                    with suppress(Py4JJavaError):  # its optional dependency is not among the jars
                        configuration.getClassByNameOrNull(name.removesuffix(".class").replace("/", "."))


if __name__ == "__main__":
    load_classes(Path(sys.argv[1]), [Path(jar) for jar in sys.argv[2:]])
