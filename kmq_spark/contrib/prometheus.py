"""
Prometheus: how long handlers take, and what they raise, in the default registry of `prometheus_client`.

    from kmq_spark.contrib.prometheus import measured

    consumer.run(measured(handle))

`kmq worker --metrics-port` measures its handler.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, TypeVar

from kmq_spark.consumer.hooks import around, topic_of
from kmq_spark.errors import needing
from kmq_spark.metrics.names import HANDLER_BUCKETS, METRICS

with needing("metrics", "measure handlers"):
    from prometheus_client import Counter, Histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kmq_spark.consumer.batch import Batch
    from kmq_spark.consumer.message import Message

Handler = TypeVar("Handler", bound="Callable[[Any], Any]")

_DURATION, _FAILURES = "kmq_handler_duration_seconds", "kmq_handler_failures_total"
_duration = Histogram(_DURATION, METRICS[_DURATION].meaning, METRICS[_DURATION].labels, buckets=HANDLER_BUCKETS)
_failures = Counter(_FAILURES, METRICS[_FAILURES].meaning, METRICS[_FAILURES].labels)


def measured(handler: Handler) -> Handler:
    """
    Return a handler for `run` whose calls are measured: `kmq_handler_duration_seconds`, `kmq_handler_failures_total`.

    Args:
        handler: Function or coroutine function of a message, or of a batch, whose calls are measured, not its messages.
    """
    return around(handler, _measuring)


@contextlib.contextmanager
def _measuring(given: Message | Batch) -> Iterator[None]:
    queue = topic_of(given)
    began_s = time.perf_counter()
    try:
        yield
    except Exception as error:
        _failures.labels(queue, type(error).__name__).inc()
        raise
    finally:
        _duration.labels(queue).observe(time.perf_counter() - began_s)
