"""
The ledger: what happened to every message, in Delta tables, and the questions that people ask of it.

    from kmq_spark import ledger

    ledger.open_ledger(spark, "ledger")
    ledger.story(spark, "orders", 3, 17).show()
    spark.sql("SELECT * FROM stuck_now").show()

Rule 1: nothing of it is in the tracker's way: it reads the same topics, in an application of its own.
"""

from __future__ import annotations

from kmq_spark.ledger.maintenance import Maintained, maintain
from kmq_spark.ledger.questions import (
    deliveries,
    hottest_poison,
    in_flight,
    of_queue,
    redeliveries_by_hour,
    slowest_handlers,
    story,
    stuck_now,
    totals,
)
from kmq_spark.ledger.tables import Location, create_tables, upgrade_tables
from kmq_spark.ledger.views import VIEWS, ask, open_ledger

__all__ = [
    "VIEWS",
    "Location",
    "Maintained",
    "ask",
    "create_tables",
    "deliveries",
    "hottest_poison",
    "in_flight",
    "maintain",
    "of_queue",
    "open_ledger",
    "redeliveries_by_hour",
    "slowest_handlers",
    "story",
    "stuck_now",
    "totals",
    "upgrade_tables",
]
