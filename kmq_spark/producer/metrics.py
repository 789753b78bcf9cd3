"""The numbers of one producer with an id: what it has committed, and what waits for its commit."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from kmq_spark.metrics.exposition import LOOPBACK, MetricsServer
from kmq_spark.metrics.samples import Sample

if TYPE_CHECKING:
    from kmq_spark.core.producing import ProducerState

logger = logging.getLogger(__name__)


class Counted(Protocol):
    """What the numbers are taken from."""

    @property
    def committed(self) -> int:
        """Messages that this process has committed."""

    @property
    def uncommitted(self) -> int:
        """Messages that wait for their commit."""

    @property
    def state(self) -> ProducerState:
        """What is committed."""


def serve_producer(queue: str, port: int | None, host: str | None, producer: Counted) -> MetricsServer | None:
    """
    Serve a producer's numbers until the server is closed; None where *port* is None.

    Args:
        queue: Name of the queue.
        port: TCP port; 0 takes a free one, which the log names.
        host: Address to listen on; loopback where None.
        producer: The producer.

    Raises:
        ConfigError: `prometheus-client` is not installed, or the port cannot be listened on.
    """
    if port is None:
        return None

    def read() -> list[Sample]:
        return [
            Sample("kmq_producer_messages_total", (queue,), producer.committed),
            Sample("kmq_producer_uncommitted", (queue,), producer.uncommitted),
            Sample("kmq_producer_last_commit_timestamp_seconds", (queue,), producer.state.at_ms / 1000),
        ]

    server = MetricsServer(port, host or LOOPBACK, read)
    logger.info("metrics on http://%s:%d/metrics", host or LOOPBACK, server.port, extra={"action": "metrics"})
    return server
