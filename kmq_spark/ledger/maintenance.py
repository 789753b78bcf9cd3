"""
Limit the size of a ledger: delete old days, merge small files, and remove files that no reader needs.

Rule 1: Only whole days are deleted, by the partition column, so that a delete rewrites no file.
Rule 2: No row changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pyspark.errors import PySparkException

from kmq_spark.errors import LedgerError
from kmq_spark.ledger.lock import exclusive
from kmq_spark.ledger.schema import DATE_COLUMNS, TABLES, Location
from kmq_spark.ledger.tables import check_tables

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Maintained(NamedTuple):
    """The result for one table: number of deleted rows, of files that were merged, and of files after the merge."""

    table: str
    deleted_rows: int
    compacted_files: int
    into_files: int


def maintain(spark: SparkSession, location: Location, *, keep_days: int, vacuum_hours: int) -> list[Maintained]:
    """
    Delete old days, compact the tables, and remove files that no version of the last hours needs.

    Args:
        spark: Session with Delta's extension.
        location: Location of the ledger.
        keep_days: Number of whole UTC days to keep, without today; 0 keeps all days.
        vacuum_hours: How long files are kept after the last version that uses them, for running readers; at least 168,
            which is Delta's own minimum.

    Returns:
        The result for each table.

    Raises:
        LedgerError: The location contains no ledger of this version, another process uses it, or Delta reports an
            error.
    """
    with exclusive(location):
        check_tables(spark, location)
        try:
            return [_maintain(spark, location, table, keep_days, vacuum_hours) for table in TABLES]
        except PySparkException as error:
            first = str(error).strip().splitlines()[0]
            raise LedgerError(
                f"cannot maintain the ledger at {location}: got {first}; run it again, no row is lost"
            ) from error


def _maintain(spark: SparkSession, location: Location, table: str, keep_days: int, vacuum_hours: int) -> Maintained:
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
    spark.sql(f"VACUUM {name} RETAIN {vacuum_hours} HOURS").collect()
    return Maintained(table, deleted_rows, int(metrics["numFilesRemoved"]), int(metrics["numFilesAdded"]))
