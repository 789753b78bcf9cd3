"""
Entry points for Databricks wheel tasks: `kmq tracker run`, `kmq tracker once` and `kmq ledger run`.

Rule 1: a successful job returns normally, because Databricks treats any SystemExit as a failure, even with code 0.
"""

from __future__ import annotations

from importlib import import_module


def tracker() -> None:
    """Run the redelivery tracker: entry point `kmq-tracker`."""
    _run("kmq_spark.cli.tracker")


def tracker_once() -> None:
    """Redeliver overdue messages once and end, without Spark: entry point `kmq-tracker-once`."""
    _run("kmq_spark.cli.tracker_once")


def ledger() -> None:
    """Write the ledger: entry point `kmq-ledger`."""
    _run("kmq_spark.cli.ledger")


def _run(module: str) -> None:
    try:
        import_module(module).run_submitted()
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
