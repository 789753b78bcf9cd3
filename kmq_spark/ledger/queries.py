"""
The questions that a ledger answers, as views: their SQL stands in `sql/`, a file each.

Rule 1: one text for every engine: Spark SQL, on a laptop and on Databricks, in words that DuckDB knows too or that
`reader` teaches it. What a view means is said at the head of its file.
Rule 2: what the engines understand differently is not used: `concat` of a null, `min_by` of a null, `struct`.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import TYPE_CHECKING

from kmq_spark.errors import ConfigError
from kmq_spark.ledger.schema import TABLES

if TYPE_CHECKING:
    from collections.abc import Mapping

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


def queue_and_group(queue: str) -> tuple[str, str | None]:
    """
    Return the parts of `queue@group`; None for the group where no group is named.

    Raises:
        ConfigError: Nothing stands behind the @.
    """
    name, at, group = queue.partition("@")
    if at and not group:
        message = f"group name is missing: got {queue!r}, queue@group or queue; name the group or leave out the @"
        raise ConfigError(message)
    return name, group if at else None
