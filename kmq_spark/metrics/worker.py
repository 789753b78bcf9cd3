"""The metrics of one worker process: messages handed to its handlers, and messages acknowledged."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kmq_spark.metrics.exposition import LOOPBACK, MetricsServer
from kmq_spark.metrics.samples import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)


@contextmanager
def serving_worker(
    queue: str, port: int | None, host: str | None, delivered: Callable[[], int], acked: Callable[[], int]
) -> Iterator[MetricsServer | None]:
    """
    Serve the metrics of a worker for the duration of a `with` block; serve nothing if *port* is None.

    Args:
        queue: Name of the queue.
        port: TCP port; 0 selects a free one, which is logged.
        host: Address to listen on; None for loopback.
        delivered: Returns the number of messages handed out so far.
        acked: Returns how many of them were acknowledged.

    Raises:
        ConfigError: `prometheus-client` is not installed, or the server cannot listen on the port.
    """
    if port is None:
        yield None
        return

    def read() -> list[Sample]:
        return [
            Sample("kmq_deliveries_total", (queue, "worker"), delivered()),
            Sample("kmq_acks_total", (queue, "worker"), acked()),
        ]

    with MetricsServer(port, host or LOOPBACK, read) as server:
        logger.info("metrics on http://%s:%d/metrics", host or LOOPBACK, server.port, extra={"action": "metrics"})
        yield server
