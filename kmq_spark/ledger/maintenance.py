"""
What keeps a ledger small: old days go, small files become large ones, and what nobody reads any more is deleted.

Rule 1: whole days go, by the partition column: a delete that rewrites no file.
Rule 2: no row changes.
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
    """What was done to one table: rows of days that went, files put together, and into how many."""

    table: str
    deleted_rows: int
    compacted_files: int
    into_files: int


def maintain(spark: SparkSession, location: Location, *, keep_days: int, vacuum_hours: int) -> list[Maintained]:
    """
    Delete old days, compact, and remove files that no version of the last hours needs.

    Args:
        spark: Session with Delta's extension.
        location: Of the ledger.
        keep_days: Whole days, UTC, that stay, today not counted; 0 = all of them.
        vacuum_hours: How long files outlive the version that dropped them, for readers that are at work; at least 168,
            Delta's own bound.

    Raises:
        LedgerError: What lies there is no ledger of this version, another process has it, or Delta refuses.
    """
    with exclusive(location):
        check_tables(spark, location)
        try:
            return [_maintain(spark, location, table, keep_days, vacuum_hours) for table in TABLES]
        except PySparkException as error:
            first = str(error).strip().splitlines()[0]
            raise LedgerError(
                f"cannot maintain the ledger at {location}: got {first}; run it again, nothing is lost"
            ) from error


def _maintain(spark: SparkSession, location: Location, table: str, keep_days: int, vacuum_hours: int) -> Maintained:
    name, deleted_rows = location.sql_name(table), 0
    if keep_days:
        # The UTC day, whatever the session's time zone: the column was made from UTC days.
        today = "to_date(to_utc_timestamp(current_timestamp(), current_timezone()))"
        deleted = spark.sql(
            f"DELETE FROM {name} WHERE {DATE_COLUMNS[table]} < date_sub({today}, {keep_days})"  # noqa: S608  # ours
        ).collect()
        deleted_rows = max(int(deleted[0][0]), 0) if deleted and deleted[0][0] is not None else 0
    # Rows lie in the order of the log as it is, so that one message's are found; Z-order would write all of it anew.
    (optimized,) = spark.sql(f"OPTIMIZE {name}").collect()
    metrics = optimized["metrics"]
    spark.sql(f"VACUUM {name} RETAIN {vacuum_hours} HOURS").collect()
    return Maintained(table, deleted_rows, int(metrics["numFilesRemoved"]), int(metrics["numFilesAdded"]))
