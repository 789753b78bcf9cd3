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

from kmq_spark.core.producing import slot_id
from kmq_spark.core.sinking import SlotPosition, check_repeated, rows_to_skip
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.records import OutgoingRecord
from kmq_spark.kafka.settings import new_client_id, transactional_producer_config
from kmq_spark.producer.life import Life, size_of
from kmq_spark.producer.position_log import PositionLog
from kmq_spark.producer.send_options import option_headers
from kmq_spark.sink.settings import DEAD_LETTER
from kmq_spark.wire.headers import DLQ_MESSAGE, DLQ_TOPIC
from kmq_spark.wire.position import encode_position

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kmq_spark.core.sinking import Batch
    from kmq_spark.producer.life import Item
    from kmq_spark.sink.settings import SinkSettings
    from kmq_spark.wire.headers import Headers

HEADER_ROOM_BYTES = 1_024

LETTER_BYTES = 1_024
"""What the dead letter of a row that is too large keeps of its key and of its value."""


class Row(NamedTuple):
    """One row of a batch, as a message: header names and values as pairs, times in seconds."""

    value: bytes
    key: bytes | None
    headers: list[tuple[str, bytes | None]] | None
    queue: str | None
    delay: float | None
    ttl: float | None


class SlotResult(NamedTuple):
    """What became of the rows of a slot: written now, found committed, transactions, dead letters among the written."""

    slot: int
    written: int
    skipped: int
    transactions: int
    dead_lettered: int


@dataclass(frozen=True, slots=True)
class SinkPlan:
    """
    What every task of a batch gets.

    Attributes:
        settings: Settings of the sink.
        batch: What is written.
    """

    settings: SinkSettings
    batch: Batch

    def key(self, slot: int) -> str:
        """Return the producer id of a slot."""
        return slot_id(self.settings.sink_id, slot)


def write_slot(plan: SinkPlan, slot: int, rows: Iterable[Row]) -> SlotResult:
    """
    Write what a slot has not committed of its rows.

    Args:
        plan: Plan of the sink and its batch.
        slot: Number of the slot.
        rows: All of its rows of the batch, in the order of their content.

    Raises:
        SinkError: The rows, the query or the slots do not fit what is committed.
        FencedError: Another attempt of this task has taken over.
        KmqError: The broker cannot be reached, or refuses a row.
    """
    # Not kept for the next batch: that one may run in another worker, whose life fences this one.
    life = _begin(plan, slot)
    try:
        return _write(plan, slot, life, rows)
    finally:
        life.close()


def _begin(plan: SinkPlan, slot: int) -> Life:
    settings = plan.settings
    topics = QueueTopics(settings.queue)
    by = new_client_id("sink")
    config = transactional_producer_config(
        settings.bootstrap_servers,
        topics.sink_transactional_id(settings.sink_id, slot),
        by,
        settings.extra,
        max_message_bytes=settings.max_message_bytes + HEADER_ROOM_BYTES,
        transaction_timeout_ms=settings.transaction_timeout_ms,
    )
    log = PositionLog(topics, settings.bootstrap_servers, settings.timeout, settings.extra)
    return Life(log, plan.key(slot), config, by=by, timeout=settings.timeout, is_sink=True)


def _write(plan: SinkPlan, slot: int, life: Life, rows: Iterable[Row]) -> SlotResult:
    where = f"slot {slot} of sink {plan.settings.sink_id}"
    position = life.state.position
    found = None if position is None else SlotPosition.parse(position, where)
    skip = rows_to_skip(found, plan.batch, where)
    if skip < 0:
        return SlotResult(slot, 0, sum(1 for _ in rows), 0, 0)
    repeated = found if skip else None
    digest, number, transactions, dead_lettered = hashlib.blake2b(digest_size=16), 0, 0, 0
    part = _Part(plan)
    for row in rows:
        if number == skip and repeated is not None:
            check_repeated(repeated, digest.hexdigest(), number, where, is_end=False)
        if part.is_full:
            # Only where a row follows: the last transaction says that it is the last.
            part.commit(life, number, digest.hexdigest(), is_whole=False)
            transactions, dead_lettered, part = transactions + 1, dead_lettered + len(part.letters), _Part(plan)
        number += 1
        _add(digest, row)
        if number > skip:
            part.add(row)
    if number <= skip and repeated is not None:
        check_repeated(repeated, digest.hexdigest(), number, where, is_end=True)
    if part.rows:
        part.commit(life, number, digest.hexdigest(), is_whole=True)
        transactions, dead_lettered = transactions + 1, dead_lettered + len(part.letters)
    return SlotResult(slot, max(0, number - skip), min(skip, number), transactions, dead_lettered)


class _Part:
    """The rows of one transaction: messages, and dead letters of rows that are too large."""

    def __init__(self, plan: SinkPlan) -> None:
        self.items: list[Item] = []
        self.letters: list[OutgoingRecord] = []
        self._plan = plan
        self._size = 0

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return len(self.items) + len(self.letters)

    @property
    def is_full(self) -> bool:
        """Whether the next row belongs to the next transaction."""
        settings = self._plan.settings
        is_full = self.rows >= settings.rows_per_transaction or self._size >= settings.bytes_per_transaction
        return self.rows > 0 and is_full

    def add(self, row: Row) -> None:
        """Add a row."""
        settings = self._plan.settings
        size = size_of((row.value, row.key, -1, row.headers, None))
        if size > settings.max_message_bytes and settings.oversize == DEAD_LETTER:
            self.letters.append(oversize_letter(settings, row, size))
            return
        self.items.append(_item(row))
        self._size += size_of(self.items[-1])

    def commit(self, life: Life, rows: int, digest: str, *, is_whole: bool) -> None:
        """Write the transaction; *rows* and *digest* are those of the slot up to here."""
        batch = self._plan.batch
        position = SlotPosition(batch.query, batch.number, batch.slots, rows, digest, is_whole).to_dict()
        timeout_s = self._plan.settings.delivery_timeout_ms / 1000
        life.write(self.items, encode_position(position), timeout_s, self.letters)


def oversize_letter(settings: SinkSettings, row: Row, size: int) -> OutgoingRecord:
    """
    Return the dead letter of a row that is too large for the queue.

    It has the beginning of key and value and none of the row's headers. It names the sink in place of a topic, so that
    a redrive leaves it: there is no message to send again.

    Args:
        settings: Settings of the sink.
        row: The row.
        size: Size of the message that it would have been, bytes.
    """
    reason = (
        f"row is too large: got {size} bytes, at most {settings.max_message_bytes}; its value has {len(row.value)} "
        f"bytes, SHA-256 {hashlib.sha256(row.value).hexdigest()}, this record has the first {LETTER_BYTES} of them"
    )
    headers: Headers = [(DLQ_TOPIC, f"sink:{settings.sink_id}".encode()), (DLQ_MESSAGE, reason.encode())]
    key = None if row.key is None else row.key[:LETTER_BYTES]
    letters = QueueTopics(settings.queue).dead_letter_topic
    return OutgoingRecord(letters, -1, key, row.value[:LETTER_BYTES], headers)


def _item(row: Row) -> Item:
    headers: Headers = list(row.headers or ())
    if row.queue is not None or row.delay or row.ttl is not None:
        asked = option_headers(queue=row.queue, delay=row.delay, ttl=row.ttl)
        headers += [(name, text.encode() if isinstance(text, str) else text) for name, text in asked]
    return (row.value, row.key, -1, headers or None, None)


def _add(digest: hashlib.blake2b, row: Row) -> None:
    """Add a row to a digest, each part with its length."""
    for part in (row.value, row.key):
        digest.update(b"-" if part is None else b"%d:" % len(part))
        digest.update(part or b"")
    rest = (row.headers or None, row.queue, row.delay, row.ttl)
    if rest != (None, None, None, None):
        digest.update(repr(rest).encode())
