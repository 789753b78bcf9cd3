"""
Create, check and maintain the tables of a ledger in Spark.

Rule 1: The tables are append-only. A row is written once and never changed; only `maintain` deletes rows, whole days.
Rule 2: A table of another version, or one of another program, is reported and never written to.
"""

from __future__ import annotations

import fcntl
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from delta.tables import DeltaTable
from pyspark.errors import PySparkException

from kmq_spark.errors import LedgerError
from kmq_spark.ledger.schema import (
    COLUMNS,
    DATE_COLUMNS,
    TABLES,
    VERSION,
    VERSION_PROPERTY,
    Location,
    check_version,
    missing_table_error,
)
from kmq_spark.spark.queries import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession


VACUUM_HOURS = 168
"""How long `maintain` leaves files that no row needs, for readers at work; Delta's own bound."""


class Maintained(NamedTuple):
    """The result for one table: number of deleted rows, of files that were merged, and of files after the merge."""

    table: str
    deleted_rows: int
    compacted_files: int
    into_files: int


@contextmanager
def exclusive(location: Location) -> Iterator[None]:
    """
    Lock a ledger on a local disk for writing: there the rename of a commit replaces another writer's.

    On object stores and on Databricks concurrent commits are safe: a commit whose file name exists fails.
    """
    folder = location.local_folder
    if folder is None:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / "_lock").open("w")
    except OSError as error:
        raise LedgerError(
            f"cannot write the ledger at {location}: got {error.strerror}; correct [ledger] dir or its access rights"
        ) from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LedgerError(
                f"the ledger at {location} is in use: another process writes or maintains it; stop that process first"
            ) from error
        yield


def create_tables(spark: SparkSession, location: Location) -> None:
    """Create the tables that do not exist, and check those that do."""
    for table in TABLES:
        if not _exists(spark, location, table):
            _create(spark, location, table)
    check_tables(spark, location)


def check_tables(spark: SparkSession, location: Location) -> None:
    """Check that the location contains a ledger of this version."""
    for table in TABLES:
        if not _exists(spark, location, table):
            raise missing_table_error(location, table)
        name = location.sql_name(table)
        # Not DESCRIBE DETAIL, which also counts the files: Spark jobs over the whole log of the table.
        described = {row["col_name"]: row["data_type"] for row in spark.sql(f"DESCRIBE EXTENDED {name}").collect()}
        properties = {row["key"]: row["value"] for row in spark.sql(f"SHOW TBLPROPERTIES {name}").collect()}
        is_delta = described.get("Provider", "").lower() == "delta"
        check_version(name, properties.get(VERSION_PROPERTY) if is_delta else None)


def maintain(spark: SparkSession, location: Location, *, keep_days: int) -> list[Maintained]:
    """Delete all but *keep_days* whole UTC days (0 = keep all), compact, and remove files that no reader needs."""
    with exclusive(location):
        check_tables(spark, location)
        try:
            return [_maintain(spark, location, table, keep_days) for table in TABLES]
        except PySparkException as error:
            raise LedgerError(
                f"cannot maintain the ledger at {location}: got {one_line(error)}; run it again, no row is lost"
            ) from error


def _create(spark: SparkSession, location: Location, table: str) -> None:
    columns = ", ".join(f"{name} {kind}" for name, kind in COLUMNS[table].items())
    try:
        spark.sql(
            f"CREATE TABLE IF NOT EXISTS {location.sql_name(table)} ({columns}) USING DELTA "
            f"PARTITIONED BY ({DATE_COLUMNS[table]}) TBLPROPERTIES ('{VERSION_PROPERTY}' = '{VERSION}', "
            # Delta collects statistics for these first columns, which let a query for one message skip files.
            "'delta.dataSkippingNumIndexedCols' = '13')"
        )
    except PySparkException as error:
        raise LedgerError(
            f"cannot write the ledger at {location}: got {one_line(error)}; correct the location or its access rights"
        ) from error


def _exists(spark: SparkSession, location: Location, table: str) -> bool:
    """Return whether the table exists; other files in its folder are an error."""
    if location.catalog:
        return bool(spark.catalog.tableExists(location.sql_name(table)))
    path = location.path(table)
    if DeltaTable.isDeltaTable(spark, path):
        return True
    if _has_files(spark, path):
        raise LedgerError(
            f"ledger path is not a Delta table: got other files in {path!r}; choose another [ledger] dir, these files "
            "are not changed"
        )
    return False


def _has_files(spark: SparkSession, path: str) -> bool:
    """Return whether a path contains something, on any file system."""
    jvm = spark._jvm  # noqa: SLF001  # the only way to Hadoop's file systems
    assert jvm is not None
    hadoop_path = jvm.org.apache.hadoop.fs.Path(path)
    file_system = hadoop_path.getFileSystem(spark._jsc.hadoopConfiguration())  # noqa: SLF001  # as above
    return bool(file_system.exists(hadoop_path)) and (
        not file_system.getFileStatus(hadoop_path).isDirectory() or len(file_system.listStatus(hadoop_path)) > 0
    )


def _maintain(spark: SparkSession, location: Location, table: str, keep_days: int) -> Maintained:
    name, deleted_rows = location.sql_name(table), 0
    if keep_days:
        # Use the UTC day, independent of the session's time zone: the date column contains UTC days.
        today = "to_date(to_utc_timestamp(current_timestamp(), current_timezone()))"
        deleted = spark.sql(
            f"DELETE FROM {name} WHERE {DATE_COLUMNS[table]} < date_sub({today}, {keep_days})"  # noqa: S608  # ours
        ).collect()
        deleted_rows = max(int(deleted[0][0]), 0) if deleted and deleted[0][0] is not None else 0
    # The rows are already in log order, so the rows of one message are near each other. Z-order would rewrite all
    # files.
    (optimized,) = spark.sql(f"OPTIMIZE {name}").collect()
    metrics = optimized["metrics"]
    spark.sql(f"VACUUM {name} RETAIN {VACUUM_HOURS} HOURS").collect()
    return Maintained(table, deleted_rows, int(metrics["numFilesRemoved"]), int(metrics["numFilesAdded"]))
