"""Where a sink writes, and its limits: the same values on the driver and in its tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kmq_spark.core.producing import check_own_id, check_producer_id, slot_id
from kmq_spark.core.sinking import MAX_SLOTS
from kmq_spark.errors import ConfigError
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.settings import BULK_TRANSACTION_TIMEOUT_MS, MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

SLOTS = 8
ROWS_PER_TRANSACTION = 10_000
BYTES_PER_TRANSACTION = 8 * 1024 * 1024
DELIVERY_TIMEOUT_MS = 120_000
TIMEOUT = 15.0
_MAX_ROWS_PER_TRANSACTION = 100_000

FAIL, DEAD_LETTER = "fail", "dead-letter"
OVERSIZE = (FAIL, DEAD_LETTER)
"""What becomes of a row that is larger than `max_message_bytes`."""


@dataclass(frozen=True, slots=True)
class SinkSettings:
    """
    Settings of a sink.

    Attributes:
        queue: Name of the queue.
        sink_id: Name of the sink, the same after a restart.
        bootstrap_servers: Comma-separated `host:port`.
        slots: Parts that a batch is cut into.
        max_message_bytes: Largest message.
        rows_per_transaction: Most rows of a transaction.
        bytes_per_transaction: Bytes after which a transaction ends.
        transaction_timeout_ms: When the broker aborts the transaction of an executor that died within it.
        delivery_timeout_ms: How long a transaction is tried again.
        timeout: Bound on each call to the broker.
        extra: librdkafka settings.
        oversize: One of `OVERSIZE`: the batch fails, or the row becomes a dead letter.

    Raises:
        ConfigError: A value is not allowed.
    """

    queue: str
    sink_id: str
    bootstrap_servers: str
    slots: int = SLOTS
    max_message_bytes: int = MAX_MESSAGE_BYTES
    rows_per_transaction: int = ROWS_PER_TRANSACTION
    bytes_per_transaction: int = BYTES_PER_TRANSACTION
    transaction_timeout_ms: int = BULK_TRANSACTION_TIMEOUT_MS
    delivery_timeout_ms: int = DELIVERY_TIMEOUT_MS
    timeout: float = TIMEOUT
    extra: Mapping[str, str] | None = None
    oversize: str = FAIL

    def __post_init__(self) -> None:
        """Check the values before any batch comes."""
        QueueTopics(self.queue)
        check_own_id(self.sink_id)
        check_producer_id(slot_id(self.sink_id, MAX_SLOTS - 1))
        for name, most in (("slots", MAX_SLOTS), ("rows_per_transaction", _MAX_ROWS_PER_TRANSACTION)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                message = f"{name} is out of bounds: got {value!r}, 1 to {most}; correct the call"
                raise ConfigError(message)
        if self.oversize not in OVERSIZE:
            message = f"oversize is not allowed: got {self.oversize!r}, {' or '.join(OVERSIZE)}; correct the call"
            raise ConfigError(message)
