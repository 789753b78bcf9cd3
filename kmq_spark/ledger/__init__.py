"""
The ledger: the history of every message in Delta tables, written by Spark, read by DuckDB.

    from kmq_spark import ledger

    ledger.connect("ledger").sql("SELECT * FROM stuck_now").show()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import duckdb


def connect(folder: str) -> duckdb.DuckDBPyConnection:
    """Open a ledger in DuckDB, with its tables and views by name; see `reader.connect`."""
    # Loaded here: the one who writes a ledger needs no DuckDB.
    from kmq_spark.ledger import reader  # noqa: PLC0415

    return reader.connect(folder)
