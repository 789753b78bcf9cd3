"""
What the runs of this process delivered and acknowledged, in the default registry of `prometheus_client`.

A program that wants to be scraped calls `prometheus_client.start_http_server`. Without the package nothing is counted
here; with it, a message costs nothing more: the counts are read at a scrape.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from kmq_spark.metrics.names import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Reading = Callable[[], tuple[int, int]]

COUNTED = ("kmq_deliveries_total", "kmq_acks_total")

_register = threading.Lock()


class _RunCollector:
    """Collector of the counts of all runs, those that have ended included: a counter never goes back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        self._running: dict[int, tuple[str, Reading]] = {}

    @contextmanager
    def counting(self, queue: str, read: Reading) -> Iterator[None]:
        """Count a run until it ends."""
        with self._lock:
            self._running[id(read)] = (queue, read)
        try:
            yield
        finally:
            with self._lock:
                del self._running[id(read)]
                for counter, count in zip(self._ended, read(), strict=True):
                    counter[queue] += count

    def describe(self) -> list[Any]:
        """Return nothing: otherwise the registry would collect at the registration."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield both counters, by queue."""
        from prometheus_client.core import CounterMetricFamily  # noqa: PLC0415  # optional

        with self._lock:
            totals = tuple(counter.copy() for counter in self._ended)
            for queue, read in self._running.values():
                for counter, count in zip(totals, read(), strict=True):
                    counter[queue] += count
        for name, counter in zip(COUNTED, totals, strict=True):
            family = CounterMetricFamily(name, METRICS[name].meaning, labels=METRICS[name].labels)
            for queue, count in counter.items():
                family.add_metric((queue, "worker"), count)
            yield family


@cache
def _collector() -> _RunCollector:
    from prometheus_client import REGISTRY  # noqa: PLC0415  # optional

    collector = _RunCollector()
    REGISTRY.register(collector)
    return collector


@contextmanager
def counting(queue: str, read: Reading) -> Iterator[None]:
    """Count a run in the default registry: *read* returns how many messages it has delivered and acknowledged."""
    try:
        with _register:
            collector = _collector()
    except ImportError:
        yield
        return
    with collector.counting(queue, read):
        yield
