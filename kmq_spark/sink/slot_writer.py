"""
Write the rows of one slot of a batch, on an executor.

Rule 1: fence first, then read the position, then decide: an attempt of the same task that is still alive can commit
nothing more, and what it has committed is seen.
Rule 2: rows come in an order that depends on nothing but their content, so a repeated batch is cut in the same way.
Rule 3: no pyspark here: rows in, counts out.

Source: KIP-98; Spark's speculation and task retries run the same task twice.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kmq_spark.core.producing import check_own_id, check_producer_id, slot_id
from kmq_spark.core.sinking import MAX_SLOTS, SlotPosition, check_repeated, rows_to_skip
from kmq_spark.errors import ConfigError
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.settings import (
    BULK_TRANSACTION_TIMEOUT_MS,
    MAX_MESSAGE_BYTES,
    new_client_id,
    transactional_producer_config,
)
from kmq_spark.producer.life import SENDER_HEADER_BYTES, Life, size_of_item
from kmq_spark.producer.options import option_headers
from kmq_spark.producer.position_log import PositionLog

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kmq_spark.core.sinking import Batch
    from kmq_spark.producer.life import Item

BYTES_PER_TRANSACTION = 8 * 1024 * 1024
DELIVERY_TIMEOUT_S = 120.0
"""How long a transaction is tried again while the broker is away."""

MAX_ROWS_PER_TRANSACTION = 100_000


@dataclass(frozen=True, slots=True)
class SinkSettings:
    """Where a sink writes, and its limits: the same values on the driver and in its tasks."""

    queue: str
    sink_id: str
    bootstrap_servers: str
    slots: int = 8
    max_message_bytes: int = MAX_MESSAGE_BYTES
    rows_per_transaction: int = 10_000
    timeout: float = 15.0
    extra: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        """
        Check the values before any batch comes.

        Raises:
            ConfigError: A value is not allowed.
        """
        QueueTopics(self.queue)
        check_own_id(self.sink_id)
        check_producer_id(slot_id(self.sink_id, MAX_SLOTS - 1))
        for name, most in (("slots", MAX_SLOTS), ("rows_per_transaction", MAX_ROWS_PER_TRANSACTION)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                message = f"{name} is out of bounds: got {value!r}; expected 1 to {most}; correct the call"
                raise ConfigError(message)

    def log(self) -> PositionLog:
        """Return the log of the slots' positions."""
        return PositionLog(QueueTopics(self.queue), self.bootstrap_servers, self.timeout, self.extra)


class Row(NamedTuple):
    """One row of a batch, as a message: header names and values as pairs, times in seconds."""

    value: bytes
    key: bytes | None
    headers: list[tuple[str, bytes | None]] | None
    logical_queue: str | None
    delay: float | None
    ttl: float | None


class SlotResult(NamedTuple):
    """The rows of a slot: how many were written now, and how many an earlier attempt has written."""

    slot: int
    written: int
    skipped: int


def write_slot(settings: SinkSettings, batch: Batch, slot: int, rows: Iterable[Row]) -> SlotResult:
    """
    Write what a slot has not committed of its rows, which come in the order of their content.

    Raises:
        SinkError: The rows, the query or the slots do not fit what is committed.
        FencedError: Another attempt of this task has taken over.
        KmqError: The broker cannot be reached, or refuses a row.
    """
    by = new_client_id("sink")
    config = transactional_producer_config(
        settings.bootstrap_servers,
        QueueTopics(settings.queue).sink_transactional_id(settings.sink_id, slot),
        by,
        settings.extra,
        max_message_bytes=settings.max_message_bytes + SENDER_HEADER_BYTES,
        transaction_timeout_ms=BULK_TRANSACTION_TIMEOUT_MS,
    )
    # Not kept for the next batch: that one may run in another worker, whose life fences this one.
    life = Life(
        settings.log(), slot_id(settings.sink_id, slot), config, by=by, timeout=settings.timeout, is_sink=True
    )  # fmt: skip
    try:
        return _write(settings, batch, slot, life, rows)
    finally:
        life.close()


def _write(settings: SinkSettings, batch: Batch, slot: int, life: Life, rows: Iterable[Row]) -> SlotResult:
    where = f"slot {slot} of sink {settings.sink_id}"
    position = life.state.position
    found = None if position is None else SlotPosition.parse(position, where)
    skip = rows_to_skip(found, batch, where)
    if skip < 0:
        return SlotResult(slot, 0, sum(1 for _ in rows))
    repeated = found if skip else None
    digest, number = hashlib.blake2b(digest_size=16), 0
    items: list[Item] = []
    size = 0

    def commit(*, is_whole: bool) -> None:
        behind = SlotPosition(batch.query, batch.number, batch.slots, number, digest.hexdigest(), is_whole)
        life.write(items, life.after(len(items), behind.to_dict()), DELIVERY_TIMEOUT_S)

    for row in rows:
        if number == skip and repeated is not None:
            check_repeated(repeated, digest.hexdigest(), number, where, is_end=False)
        if len(items) >= settings.rows_per_transaction or size >= BYTES_PER_TRANSACTION:
            # Only where a row follows: the last transaction says that it is the last.
            commit(is_whole=False)
            items, size = [], 0
        number += 1
        _add(digest, row)
        if number > skip:
            items.append(_item(row))
            size += size_of_item(items[-1])
    if number <= skip and repeated is not None:
        check_repeated(repeated, digest.hexdigest(), number, where, is_end=True)
    if items:
        commit(is_whole=True)
    return SlotResult(slot, max(0, number - skip), min(skip, number))


def _item(row: Row) -> Item:
    headers = [*(row.headers or ()), *option_headers(row.logical_queue, row.delay, None, row.ttl)]
    return (row.value, row.key, -1, headers)


def _add(digest: hashlib.blake2b, row: Row) -> None:
    """Add a row to a digest, each part with its length."""
    for part in (row.value, row.key):
        digest.update(b"-" if part is None else b"%d:" % len(part))
        digest.update(part or b"")
    rest = (row.headers or None, row.logical_queue, row.delay, row.ttl)
    if rest != (None, None, None, None):
        digest.update(repr(rest).encode())
