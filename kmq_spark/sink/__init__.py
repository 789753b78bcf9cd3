"""
Spark to a queue, exactly once: `exactly_once_sink` for `foreachBatch`, `write_queue` for a batch job.

    from kmq_spark.sink import exactly_once_sink

Rule 1: importing this package loads neither pyspark nor Kafka's client.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kmq_spark.sink.frames import SinkSummary, exactly_once_sink, write_queue

__all__ = ["SinkSummary", "exactly_once_sink", "write_queue"]


def __getattr__(name: str) -> object:
    """Load a name that needs pyspark (PEP 562)."""
    if name not in __all__:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(import_module("kmq_spark.sink.frames"), name)
