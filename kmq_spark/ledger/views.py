"""
The views of a ledger in a Spark session.

Rule 1: Opening a ledger reads only its schema. The views read data only when they are queried.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kmq_spark.ledger.queries import VIEWS, known_view, view_sql
from kmq_spark.ledger.schema import TABLES, Location
from kmq_spark.ledger.tables import check_tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def open_ledger(spark: SparkSession, folder: str = "", *, catalog: str = "") -> Location:
    """
    Create temporary views in the session for the tables and views of a ledger, for example `SELECT * FROM deliveries`.

    Args:
        spark: Session with Delta's extension (`spark.session.delta_settings`).
        folder: Path of the ledger.
        catalog: `catalog.schema` of the ledger, instead of a folder.

    Returns:
        The location of the ledger.

    Raises:
        LedgerError: The location contains no ledger of this version.
        ConfigError: The location is not allowed.
    """
    location = Location(folder, catalog)
    check_tables(spark, location)
    for table in TABLES:
        spark.table(location.sql_name(table)).createOrReplaceTempView(table)
    for view in VIEWS:
        spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW {view} AS {view_sql(view)}")
    return location


def create_catalog_views(spark: SparkSession, location: Location) -> None:
    """Create permanent views of a ledger in a catalog, for all users who may read the schema."""
    names = {name: location.sql_name(name) for name in (*TABLES, *VIEWS)}
    for view in VIEWS:
        spark.sql(f"CREATE OR REPLACE VIEW {names[view]} AS {view_sql(view, names)}")


def read_view(spark: SparkSession, view: str) -> DataFrame:
    """
    Return a view or a table of the ledger that was opened last.

    Raises:
        ConfigError: There is no such view.
    """
    return spark.table(known_view(view))
