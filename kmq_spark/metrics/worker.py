"""The numbers of one worker process: what it has handed to its handlers, and what those have acknowledged."""

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
    Serve a worker's numbers for the time of a block; nothing where *port* is None.

    Args:
        queue: Name of the queue.
        port: TCP port; 0 takes a free one, which the log names.
        host: Address to listen on; loopback where None.
        delivered: Returns how many messages were handed out so far.
        acked: Returns how many of them were acknowledged.

    Raises:
        ConfigError: `prometheus-client` is not installed, or the port cannot be listened on.
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
