"""
The tables of a ledger: what a row holds, where a ledger lies, and whether what lies there is one.

Rule 1: three Delta tables, append only; a row is written once and never changed, and only `maintain` removes any.
Rule 2: every table carries the version of its schema; one that is older, newer or not ours is told, never written to.
Rule 3: payloads are not stored: their sizes are, and the key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delta.tables import DeltaTable
from pyspark.errors import PySparkException

from kmq_spark.errors import ConfigError, LedgerError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VERSION = 1
"""Of the schema; in each table's property `kmq.ledger.version`."""

VERSION_PROPERTY = "kmq.ledger.version"

MARKERS, MESSAGES, DEAD_LETTERS = TABLES = ("markers", "messages", "dead_letters")

COLUMNS: dict[str, dict[str, str]] = {
    MARKERS: {
        "queue": "string",
        "group_name": "string",
        "marker_date": "date",
        "marker_partition": "int",
        "marker_offset": "bigint",
        "range_index": "int",
        "appended_at": "timestamp",
        "kind": "string",
        "queue_partition": "int",
        "first_offset": "bigint",
        "message_count": "bigint",
        "redeliver_after_ms": "bigint",
        "due_at": "timestamp",
        "delivery_count": "int",
        "outcome": "string",
        "reason": "string",
        "release": "string",
        "never_handed_out": "boolean",
        "consumer_id": "string",
        "error": "string",
    },
    MESSAGES: {
        "queue": "string",
        "sent_date": "date",
        "queue_partition": "int",
        "message_offset": "bigint",
        "sent_at": "timestamp",
        "origin_partition": "int",
        "origin_offset": "bigint",
        "previous_partition": "int",
        "previous_offset": "bigint",
        "first_sent_at": "timestamp",
        "is_first_copy": "boolean",
        "delivery_count": "int",
        "silent_count": "int",
        "logical_queue": "string",
        "for_group": "string",
        "delay_ms": "bigint",
        "not_before": "timestamp",
        "ttl_ms": "bigint",
        "expires_at": "timestamp",
        "key": "binary",
        "value_bytes": "bigint",
        "header_count": "int",
    },
    DEAD_LETTERS: {
        "queue": "string",
        "group_name": "string",
        "dead_date": "date",
        "dead_letter_partition": "int",
        "dead_letter_offset": "bigint",
        "dead_at": "timestamp",
        "is_marker": "boolean",
        "source_topic": "string",
        "source_partition": "int",
        "source_offset": "bigint",
        "origin_partition": "int",
        "origin_offset": "bigint",
        "reason": "string",
        "delivery_count": "int",
        "first_sent_at": "timestamp",
        "attempts_at": "array<timestamp>",
        "logical_queue": "string",
        "key": "binary",
        "value_bytes": "bigint",
    },
}
"""Columns of each table and their types in SQL, in order."""

DATE_COLUMNS = {MARKERS: "marker_date", MESSAGES: "sent_date", DEAD_LETTERS: "dead_date"}
"""What each table is partitioned by: the UTC day of the record's append time."""

_CATALOG_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)?")


@dataclass(frozen=True, slots=True)
class Location:
    """
    Where a ledger lies: in a folder, or in a schema of a catalog.

    Attributes:
        folder: Local path or URL of a file system that Spark knows; empty where a catalog has the tables.
        catalog: `catalog.schema`, or a schema of the session's catalog; empty where a folder has them.

    Raises:
        ConfigError: Both are given, or none, or a name is not allowed.
    """

    folder: str = ""
    catalog: str = ""

    def __post_init__(self) -> None:
        """Check the names: they become parts of SQL text."""
        if bool(self.folder) == bool(self.catalog):
            message = (
                f"the place of the ledger is not clear: got folder {self.folder!r} and catalog {self.catalog!r}, "
                "exactly one is needed; set [ledger] dir or catalog"
            )
            raise ConfigError(message)
        if "`" in self.folder:
            message = f"ledger folder is not allowed: got {self.folder!r}, a path without '`'; choose another"
            raise ConfigError(message)
        if self.catalog and not _CATALOG_NAME.fullmatch(self.catalog):
            message = (
                f"ledger catalog is not allowed: got {self.catalog!r}, catalog.schema of A-Z a-z 0-9 _ -; correct it"
            )
            raise ConfigError(message)

    def __str__(self) -> str:
        """Return the name that messages tell."""
        return self.folder or self.catalog

    def path(self, table: str) -> str:
        """Return the folder of a table; for a ledger in a folder only."""
        return f"{self.folder.rstrip('/')}/{table}"

    def sql_name(self, name: str) -> str:
        """Return a table's name as SQL takes it."""
        if self.folder:
            return f"delta.`{self.path(name)}`"
        return ".".join(f"`{part}`" for part in (*self.catalog.split("."), name))


def create_tables(spark: SparkSession, location: Location) -> None:
    """
    Make the tables that do not exist, and check those that do.

    Raises:
        LedgerError: What lies there is no ledger of this version.
    """
    for table in TABLES:
        columns = ", ".join(f"{name} {kind}" for name, kind in COLUMNS[table].items())
        if not _exists(spark, location, table):
            _run(
                spark,
                location,
                f"CREATE TABLE IF NOT EXISTS {location.sql_name(table)} ({columns}) USING DELTA "
                f"PARTITIONED BY ({DATE_COLUMNS[table]}) TBLPROPERTIES ('{VERSION_PROPERTY}' = '{VERSION}', "
                # What skips files when one message is asked for stands among the first columns of each table.
                "'delta.dataSkippingNumIndexedCols' = '13')",
            )
    check_tables(spark, location)


def check_tables(spark: SparkSession, location: Location) -> None:
    """
    Find out whether a ledger of this version lies there.

    Raises:
        LedgerError: It does not; the message says what does, and what to do.
    """
    for table in TABLES:
        if not _exists(spark, location, table):
            raise LedgerError(_nothing_there(location, table))
        _check_version(spark, location, table)
        missing = missing_columns(spark, location, table)
        if missing:
            raise LedgerError(
                f"ledger table is of an older schema: {location.sql_name(table)} has no column {', '.join(missing)}; "
                "run `kmq ledger maintain --upgrade`, rows that are there read as null in it"
            )


def missing_columns(spark: SparkSession, location: Location, table: str) -> list[str]:
    """
    Return the columns that a table lacks.

    Raises:
        LedgerError: A column has another type than this build writes.
    """
    found = {field.name: field.dataType.simpleString() for field in spark.table(location.sql_name(table)).schema}
    for name, kind in COLUMNS[table].items():
        if found.get(name, kind) != kind:
            raise LedgerError(
                f"ledger table does not fit: got column {name} {found[name]} in {location.sql_name(table)}, {kind} is "
                "written; use another ledger, this one is no table of ours"
            )
    return [name for name in COLUMNS[table] if name not in found]


def upgrade_tables(spark: SparkSession, location: Location) -> list[str]:
    """
    Add the columns that an older schema lacks; no row is written anew.

    Returns:
        What was added, `table.column` each.

    Raises:
        LedgerError: What lies there is no ledger, or one of a newer version.
    """
    added = []
    for table in TABLES:
        if not _exists(spark, location, table):
            raise LedgerError(_nothing_there(location, table))
        missing = missing_columns(spark, location, table)
        _check_version(spark, location, table, may_be_older=True)
        name = location.sql_name(table)
        if missing:
            columns = ", ".join(f"{column} {COLUMNS[table][column]}" for column in missing)
            _run(spark, location, f"ALTER TABLE {name} ADD COLUMNS ({columns})")
            added += [f"{table}.{column}" for column in missing]
        _run(spark, location, f"ALTER TABLE {name} SET TBLPROPERTIES ('{VERSION_PROPERTY}' = '{VERSION}')")
    return added


def _nothing_there(location: Location, table: str) -> str:
    return (
        f"no ledger at {location}: got no Delta table {location.sql_name(table)}; correct --ledger-dir or --catalog, "
        "or make one with `kmq ledger run QUEUE`"
    )


def _exists(spark: SparkSession, location: Location, table: str) -> bool:
    """Tell whether the table is there; other files in its place are an error."""
    if location.catalog:
        return bool(spark.catalog.tableExists(location.sql_name(table)))
    path = location.path(table)
    if DeltaTable.isDeltaTable(spark, path):
        return True
    if _has_files(spark, path):
        raise LedgerError(
            f"ledger path is no Delta table: got other files in {path!r}; choose another --ledger-dir, nothing there "
            "is touched"
        )
    return False


def _has_files(spark: SparkSession, path: str) -> bool:
    """Tell whether something lies at a path, on whatever file system it names."""
    jvm = spark._jvm  # noqa: SLF001  # the only way to Hadoop's file systems
    assert jvm is not None
    hadoop_path = jvm.org.apache.hadoop.fs.Path(path)
    file_system = hadoop_path.getFileSystem(spark._jsc.hadoopConfiguration())  # noqa: SLF001  # as above
    return bool(file_system.exists(hadoop_path)) and (
        not file_system.getFileStatus(hadoop_path).isDirectory() or len(file_system.listStatus(hadoop_path)) > 0
    )


def _check_version(spark: SparkSession, location: Location, table: str, *, may_be_older: bool = False) -> None:
    name = location.sql_name(table)
    detail = spark.sql(f"DESCRIBE DETAIL {name}").collect()[0]
    version = (detail["properties"] or {}).get(VERSION_PROPERTY)
    if detail["format"] != "delta" or version is None or not version.isdecimal():
        raise LedgerError(
            f"ledger table is not one of ours: {name} has no property {VERSION_PROPERTY}; use another --ledger-dir or "
            "--catalog, nothing there is touched"
        )
    if int(version) > VERSION:
        raise LedgerError(
            f"ledger table is of a newer schema: got version {version} of {name}, this build writes {VERSION}; "
            "upgrade kmq-spark"
        )
    if int(version) < VERSION and not may_be_older:
        raise LedgerError(
            f"ledger table is of an older schema: got version {version} of {name}, this build writes {VERSION}; "
            "run `kmq ledger maintain --upgrade`"
        )


def _run(spark: SparkSession, location: Location, statement: str) -> None:
    try:
        spark.sql(statement)
    except PySparkException as error:
        first = str(error).strip().splitlines()[0]
        raise LedgerError(
            f"cannot write the ledger at {location}: got {first}; correct the place or its rights"
        ) from error
