"""
Helpers for tests of code that uses kmq-spark: builders of markers, and a simple model of the tracker's rules.

Rule 1: part of the package, so that users test with the same values as this project. Needs `core` and `wire`, no broker
and no Spark.
"""

from __future__ import annotations

from kmq_spark.testing.builders import end, keep_alive, log, marker_record, rules, start, tick, unreadable

__all__ = ["end", "keep_alive", "log", "marker_record", "rules", "start", "tick", "unreadable"]
