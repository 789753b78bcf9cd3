"""
What tests of code around kmq-spark need: builders of markers, and the rules of the tracker as a slow, readable model.

Rule 1: shipped, so that users test with the same values as we do; needs `core` and `wire`, no broker and no Spark.
"""

from __future__ import annotations

from kmq_spark.testing.builders import end, keep_alive, log, marker_record, rules, start, tick, unreadable
from kmq_spark.testing.model import ModelTracker

__all__ = ["ModelTracker", "end", "keep_alive", "log", "marker_record", "rules", "start", "tick", "unreadable"]
