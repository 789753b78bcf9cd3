"""
What the runs of this process delivered, acknowledged, lost and hold, in the default registry of `prometheus_client`.

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

    Reading = Callable[[], tuple[int, int, int]]

COUNTED = ("kmq_deliveries_total", "kmq_acks_total", "kmq_leases_lost_total")
HELD = "kmq_messages_held"

_register = threading.Lock()


class _RunCollector:
    """Collector of the counts of all runs, those that have ended included: a counter never goes back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: tuple[Counter[str], ...] = tuple(Counter() for _ in COUNTED)
        self._running: dict[int, tuple[str, Reading, Callable[[], int]]] = {}

    @contextmanager
    def counting(self, queue: str, read: Reading, held: Callable[[], int]) -> Iterator[None]:
        """Count a run until it ends."""
        with self._lock:
            self._running[id(read)] = (queue, read, held)
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
        """Yield the counters and what is held, by queue."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415  # optional

        with self._lock:
            totals, held = tuple(counter.copy() for counter in self._ended), Counter[str]()
            for queue, read, read_held in self._running.values():
                held[queue] += read_held()
                for counter, count in zip(totals, read(), strict=True):
                    counter[queue] += count
        for name, counter in zip((*COUNTED, HELD), (*totals, held), strict=True):
            kind = GaugeMetricFamily if name == HELD else CounterMetricFamily
            family = kind(name, METRICS[name].meaning, labels=METRICS[name].labels)
            for queue, count in counter.items():
                family.add_metric((queue, "worker")[: len(METRICS[name].labels)], count)
            yield family


@cache
def _collector() -> _RunCollector:
    from prometheus_client import REGISTRY  # noqa: PLC0415  # optional

    collector = _RunCollector()
    REGISTRY.register(collector)
    return collector


@contextmanager
def counting(queue: str, read: Reading, held: Callable[[], int]) -> Iterator[None]:
    """Count a run in the default registry: *read* returns deliveries, acks and lost leases, *held* what it holds."""
    try:
        with _register:
            collector = _collector()
    except ImportError:
        yield
        return
    with collector.counting(queue, read, held):
        yield
