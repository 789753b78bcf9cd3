"""
Test what sends and handles messages without Kafka, Java or Spark.

    from kmq_spark.testing import InMemoryQueue

    queue = InMemoryQueue("orders")
    queue.producer().send("order 1")
    queue.work(handle)

docs/testing.md shows how.
"""

from __future__ import annotations

from kmq_spark.testing.message import make_message
from kmq_spark.testing.queue import InMemoryQueue

__all__ = ["InMemoryQueue", "make_message"]
