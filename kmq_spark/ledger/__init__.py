"""
The ledger: the history of every message in Delta tables, with views that answer common questions.

    from kmq_spark import ledger

    ledger.open_ledger(spark, "ledger")
    ledger.story(spark, "orders", 3, 17).show()
    spark.sql("SELECT * FROM stuck_now").show()

    ledger.connect("ledger").sql("SELECT * FROM stuck_now").show()  # the same by DuckDB, without Spark

Rule 1: The ledger never affects the tracker: it reads the same topics in a separate application.
Rule 2: Importing this package loads neither Spark nor DuckDB. The first use of a name loads what the name needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kmq_spark.ledger.queries import VIEWS
from kmq_spark.ledger.schema import Location

if TYPE_CHECKING:
    from kmq_spark.ledger.maintenance import Maintained, maintain
    from kmq_spark.ledger.questions import (
        deliveries,
        hottest_poison,
        in_flight,
        of_queue,
        ownership,
        redeliveries_by_hour,
        slowest_handlers,
        story,
        stuck_now,
        totals,
    )
    from kmq_spark.ledger.reader import connect
    from kmq_spark.ledger.tables import create_tables, upgrade_tables
    from kmq_spark.ledger.views import open_ledger, read_view

_NAMES = {
    "maintenance": ("Maintained", "maintain"),
    "questions": (
        *("deliveries", "hottest_poison", "in_flight", "of_queue", "ownership", "redeliveries_by_hour"),
        *("slowest_handlers", "story", "stuck_now", "totals"),
    ),
    "reader": ("connect",),
    "tables": ("create_tables", "upgrade_tables"),
    "views": ("open_ledger", "read_view"),
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}

__all__ = [
    "VIEWS",
    "Location",
    "Maintained",
    "connect",
    "create_tables",
    "deliveries",
    "hottest_poison",
    "in_flight",
    "maintain",
    "of_queue",
    "open_ledger",
    "ownership",
    "read_view",
    "redeliveries_by_hour",
    "slowest_handlers",
    "story",
    "stuck_now",
    "totals",
    "upgrade_tables",
]


def __getattr__(name: str) -> object:
    """Import a name that needs Spark or DuckDB (PEP 562)."""
    home = _HOMES.get(name)
    if home is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
