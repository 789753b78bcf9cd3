"""
The views of a ledger. Their SQL is in `sql/`, one file per view.

Rule 1: All engines use the same text. It is Spark SQL, for a local machine and for Databricks, limited to functions
that DuckDB has too or that `reader` defines for it. The head of each file describes the view.
Rule 2: The views do not use what the engines treat differently: `concat` of a null, `min_by` of a null, `struct`.
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
    "ownership",
)
"""Every view, each after the views that it uses."""

# Do not use a file path: spark-submit runs this package from an archive.
_SQL = files("kmq_spark.ledger") / "sql"
_VIEW_NAMES = re.compile(rf"\b(FROM|JOIN) ({'|'.join(VIEWS)})\b")


def view_sql(view: str, names: Mapping[str, str] | None = None) -> str:
    """
    Return the query of a view.

    Args:
        view: One of `VIEWS`.
        names: SQL names of tables and of other views. By default each has its own name, as temporary views do.
    """
    names = names or {}
    text = (_SQL / f"{view}.sql").read_text(encoding="utf-8")
    for table in TABLES:
        text = text.replace(f"{{{table}}}", names.get(table, table))
    return _VIEW_NAMES.sub(lambda found: f"{found[1]} {names.get(found[2], found[2])}", text)


def known_view(view: str) -> str:
    """
    Return the name of a view or table, after a check that it exists.

    Raises:
        ConfigError: There is no such view.
    """
    if view not in (*VIEWS, *TABLES):
        message = f"unknown view: got {view!r}, one of {', '.join((*VIEWS, *TABLES))}; correct the name"
        raise ConfigError(message)
    return view


def queue_and_group(queue: str) -> tuple[str, str | None]:
    """
    Return the queue and the group of `queue@subscription`; the group is None if there is no `@`.

    Raises:
        ConfigError: The group after the `@` is empty.
    """
    name, at, group = queue.partition("@")
    if at and not group:
        message = f"subscription is missing: got {queue!r}; expected queue@subscription; name it or leave out the @"
        raise ConfigError(message)
    return name, group if at else None
