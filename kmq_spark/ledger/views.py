"""
The questions that a ledger answers, as views: their SQL stands in `sql/`, a file each.

Rule 1: plain SQL, the same on a laptop and on Databricks; what a view means is said at the head of its file.
Rule 2: opening a ledger reads nothing but its schema: views cost when they are asked.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import TYPE_CHECKING

from kmq_spark.errors import ConfigError
from kmq_spark.ledger.tables import TABLES, Location, check_tables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame, SparkSession

VIEWS = (
    "marker_events",
    "deliveries",
    "in_flight",
    "stuck_now",
    "message_story",
    "slowest_handlers",
    "hottest_poison",
    "redeliveries_by_hour",
    "totals",
)
"""Every view, in an order in which each finds those that it is made of."""

# Not by a path: spark-submit runs this package out of an archive.
_SQL = files("kmq_spark.ledger") / "sql"
_VIEW_NAMES = re.compile(rf"\b(FROM|JOIN) ({'|'.join(VIEWS)})\b")


def view_sql(view: str, names: Mapping[str, str] | None = None) -> str:
    """
    Return the query of a view.

    Args:
        view: One of `VIEWS`.
        names: SQL names of tables and of other views; by default their own, as temporary views have them.
    """
    names = names or {}
    text = (_SQL / f"{view}.sql").read_text(encoding="utf-8")
    for table in TABLES:
        text = text.replace(f"{{{table}}}", names.get(table, table))
    return _VIEW_NAMES.sub(lambda found: f"{found[1]} {names.get(found[2], found[2])}", text)


def open_ledger(spark: SparkSession, folder: str = "", *, catalog: str = "") -> Location:
    """
    Make the tables and the views of a ledger known to a session, as temporary views: `SELECT * FROM deliveries`.

    Args:
        spark: Session with Delta's extension (`spark.session.delta_settings`).
        folder: Path of the ledger.
        catalog: `catalog.schema` that holds it, in place of a folder.

    Returns:
        The place of the ledger.

    Raises:
        LedgerError: No ledger of this version lies there.
        ConfigError: The place is not allowed.
    """
    location = Location(folder, catalog)
    check_tables(spark, location)
    for table in TABLES:
        spark.table(location.sql_name(table)).createOrReplaceTempView(table)
    for view in VIEWS:
        spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW {view} AS {view_sql(view)}")
    return location


def create_catalog_views(spark: SparkSession, location: Location) -> None:
    """Make the views of a ledger in a catalog lasting ones, for everybody who may read the schema."""
    names = {name: location.sql_name(name) for name in (*TABLES, *VIEWS)}
    for view in VIEWS:
        spark.sql(f"CREATE OR REPLACE VIEW {names[view]} AS {view_sql(view, names)}")


def known_view(view: str) -> str:
    """
    Return the name of a view or table.

    Raises:
        ConfigError: There is no such view.
    """
    if view not in (*VIEWS, *TABLES):
        message = f"unknown view: got {view!r}, one of {', '.join((*VIEWS, *TABLES))}; correct the name"
        raise ConfigError(message)
    return view


def ask(spark: SparkSession, view: str) -> DataFrame:
    """
    Return a view, or a table, of the ledger that was opened last.

    Raises:
        ConfigError: There is no such view.
    """
    return spark.table(known_view(view))
