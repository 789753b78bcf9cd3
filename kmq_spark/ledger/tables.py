"""
Create, check and upgrade the tables of a ledger in Spark.

Rule 1: There are four append-only Delta tables. A row is written once and never changed, and only `maintain` deletes
rows.
Rule 2: Every table stores the version of its schema. An older or newer table, or one of another program, is reported
and never written to.
Rule 3: Payloads are not stored; their sizes and keys are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta.tables import DeltaTable
from pyspark.errors import PySparkException

from kmq_spark.errors import LedgerError
from kmq_spark.ledger.schema import (
    COLUMNS,
    COORDINATION,
    DATE_COLUMNS,
    TABLES,
    VERSION,
    VERSION_PROPERTY,
    Location,
    check_columns,
    check_version,
    missing_columns,
    missing_table_error,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def create_tables(spark: SparkSession, location: Location) -> None:
    """
    Create the tables that do not exist, and check those that do.

    Raises:
        LedgerError: The location contains no ledger of this version.
    """
    for table in TABLES:
        if not _exists(spark, location, table):
            _create(spark, location, table)
    check_tables(spark, location)


def _create(spark: SparkSession, location: Location, table: str) -> None:
    columns = ", ".join(f"{name} {kind}" for name, kind in COLUMNS[table].items())
    _run(
        spark,
        location,
        f"CREATE TABLE IF NOT EXISTS {location.sql_name(table)} ({columns}) USING DELTA "
        f"PARTITIONED BY ({DATE_COLUMNS[table]}) TBLPROPERTIES ('{VERSION_PROPERTY}' = '{VERSION}', "
        # Delta collects statistics for these first columns, which let a query for one message skip files.
        "'delta.dataSkippingNumIndexedCols' = '13')",
    )


def check_tables(spark: SparkSession, location: Location) -> None:
    """
    Check that the location contains a ledger of this version.

    Raises:
        LedgerError: It does not; the message states what was found and what to do.
    """
    for table in TABLES:
        if not _exists(spark, location, table):
            raise missing_table_error(location, table)
        _check_version(spark, location, table)
        check_columns(table, location.sql_name(table), _columns(spark, location, table))


def _columns(spark: SparkSession, location: Location, table: str) -> dict[str, str]:
    return {field.name: field.dataType.simpleString() for field in spark.table(location.sql_name(table)).schema}


def upgrade_tables(spark: SparkSession, location: Location) -> list[str]:
    """
    Add the columns and the table that an older schema lacks; no row is rewritten.

    Returns:
        The added columns, each as `table.column`, and the name of an added table.

    Raises:
        LedgerError: The location contains no ledger, or one of a newer version.
    """
    added = []
    for table in TABLES:
        if table == COORDINATION and not _exists(spark, location, table):
            _create(spark, location, table)
            added.append(table)
        if not _exists(spark, location, table):
            raise missing_table_error(location, table)
        missing = missing_columns(table, location.sql_name(table), _columns(spark, location, table))
        _check_version(spark, location, table, may_be_older=True)
        name = location.sql_name(table)
        if missing:
            columns = ", ".join(f"{column} {COLUMNS[table][column]}" for column in missing)
            _run(spark, location, f"ALTER TABLE {name} ADD COLUMNS ({columns})")
            added += [f"{table}.{column}" for column in missing]
        _run(spark, location, f"ALTER TABLE {name} SET TBLPROPERTIES ('{VERSION_PROPERTY}' = '{VERSION}')")
    return added


def _exists(spark: SparkSession, location: Location, table: str) -> bool:
    """Return whether the table exists; other files in its folder are an error."""
    if location.catalog:
        return bool(spark.catalog.tableExists(location.sql_name(table)))
    path = location.path(table)
    if DeltaTable.isDeltaTable(spark, path):
        return True
    if _has_files(spark, path):
        raise LedgerError(
            f"ledger path is not a Delta table: got other files in {path!r}; choose another --ledger-dir, these files "
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


def _check_version(spark: SparkSession, location: Location, table: str, *, may_be_older: bool = False) -> None:
    name = location.sql_name(table)
    # Not DESCRIBE DETAIL, which also counts the files: Spark jobs over the whole log of the table.
    described = {row["col_name"]: row["data_type"] for row in spark.sql(f"DESCRIBE EXTENDED {name}").collect()}
    properties = {row["key"]: row["value"] for row in spark.sql(f"SHOW TBLPROPERTIES {name}").collect()}
    version = properties.get(VERSION_PROPERTY) if described.get("Provider", "").lower() == "delta" else None
    check_version(name, version, may_be_older=may_be_older)


def _run(spark: SparkSession, location: Location, statement: str) -> None:
    try:
        spark.sql(statement)
    except PySparkException as error:
        first = str(error).strip().splitlines()[0]
        raise LedgerError(
            f"cannot write the ledger at {location}: got {first}; correct the location or its access rights"
        ) from error
