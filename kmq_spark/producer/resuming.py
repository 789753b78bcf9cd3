"""
Send messages and the source position in Kafka transactions, and go on where the last life stopped.

Rule 1: `send` only collects. One thread writes what was collected: messages, then the position record, then the commit.
So a transaction is open for as short as possible, and a transaction that was aborted can be written again.
Rule 2: the sequence is given when a transaction is written, in the order of the calls.
Rule 3: a life that a newer one has replaced writes nothing more: every call raises FencedError.
Rule 4: once positions are in use, a commit never falls between a message without a position and the next one with a
position: the messages of one source record stay together.

Source: KIP-98 for fencing by transactional id; KIP-618 (Kafka Connect's exactly-once sources) for positions in the
transaction of the messages.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from kmq_spark.core.producing import MAX_COUNT, ProducerState, SourcePosition
from kmq_spark.errors import ConfigError, KafkaClientError, KmqError, TopicError, UsageError
from kmq_spark.kafka.settings import new_client_id, transactional_producer_config
from kmq_spark.kafka.topics import partition_count
from kmq_spark.producer.life import Life, call_back, size_of
from kmq_spark.producer.metrics import serve_producer
from kmq_spark.producer.position_log import PositionLog
from kmq_spark.wire.headers import RECORD_BYTES
from kmq_spark.wire.position import NO_POSITION, EncodedPosition, encode_position

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kmq_spark.kafka.queue_topics import QueueTopics
    from kmq_spark.producer.life import Item, OnDelivery, Position
    from kmq_spark.wire.headers import Headers


logger = logging.getLogger(__name__)

COMMIT_EVERY_MS, COMMIT_EVERY = 100, 50_000
"""Defaults: how long a message waits for its commit, and how many messages a transaction has at most."""

MAX_COMMIT_EVERY_MS, MAX_COMMIT_EVERY = 3_600_000, 100_000

TRANSACTION_TIMEOUT_MS = 10_000
"""When the broker aborts the transaction of a producer that died within it; until then consumers wait behind it."""

MAX_COLLECTED_BYTES = 32 * 1024 * 1024
"""Bytes that are collected before they are due: about as many as a broker takes within a second."""

HEADER_ROOM_BYTES = 1_024
"""What the three headers add to a message, at most: the queue topic has room for them beyond the largest message."""

STOP_WAIT_S = 5.0


class ResumingSender:
    """
    The sending half of `QueueProducer(producer_id=…)`; safe for many threads.

    Args:
        topics: Names of the queue.
        producer_id: Checked.
        client_id: Name in the broker's log, and `by` of the position records.
        max_message_bytes: Largest message, key, value and headers together.
        delivery_timeout_ms: How long a transaction is tried again before it has failed.
        timeout: Bound on each call to the broker.
        transaction_timeout_ms: See `TRANSACTION_TIMEOUT_MS`.
        commit_every_ms: How long a message waits for its commit.
        commit_every: Messages of a transaction, at most.
        bootstrap_servers: Comma-separated `host:port`.
        extra: librdkafka settings.
        metrics_port: Where metrics are served; None for nowhere.
        metrics_host: Address to listen on; loopback where None.

    Raises:
        ConfigError: A value is out of bounds.
        TopicError: A topic of the queue is missing or does not fit.
        FencedError: Another process with this id started at the same time.
        KafkaClientError: The broker cannot be reached in time, or refuses the transactional id.
        WireError: The position record of this id cannot be read.
    """

    def __init__(
        self,
        topics: QueueTopics,
        producer_id: str,
        *,
        client_id: str,
        max_message_bytes: int,
        delivery_timeout_ms: int,
        timeout: float,
        transaction_timeout_ms: int,
        commit_every_ms: int,
        commit_every: int,
        bootstrap_servers: str,
        extra: Mapping[str, str] | None,
        metrics_port: int | None = None,
        metrics_host: str | None = None,
    ) -> None:
        """Fence the older life, read what it has committed, and write the new generation."""
        _check("commit_every_ms", commit_every_ms, MAX_COMMIT_EVERY_MS)
        _check("commit_every", commit_every, MAX_COMMIT_EVERY)
        _check("transaction_timeout_ms", transaction_timeout_ms, 900_000, least=1_000)
        self._topics = topics
        self._topic = topics.queue_topic
        self._producer_id = producer_id
        self._bootstrap_servers = bootstrap_servers
        self._timeout = timeout
        self._delivery_timeout_s = delivery_timeout_ms / 1000
        self._max_message_bytes = max_message_bytes
        self._commit_every_s = commit_every_ms / 1000
        self._commit_every = commit_every
        by = client_id or new_client_id("producer")
        config = transactional_producer_config(
            bootstrap_servers,
            topics.producer_transactional_id(producer_id),
            by,
            extra,
            max_message_bytes=max_message_bytes + HEADER_ROOM_BYTES,
            transaction_timeout_ms=transaction_timeout_ms,
        )
        self._log = PositionLog(topics, bootstrap_servers, timeout, extra)
        self._log.ensure()
        self._partition_count = partition_count(self._log.admin, self._topic, bootstrap_servers, timeout)
        self._life = Life(self._log, producer_id, config, by=by, timeout=timeout)
        began = self._life.state
        self._has_positions = began.position is not None
        # Messages of earlier lives without a position: no position of the source can say that they are sent.
        self._is_unplaced = began.sequence > 0 and not self._has_positions

        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._items: list[Item] = []
        self._room_bytes = MAX_COLLECTED_BYTES
        # Whether the next message needs a check before it is collected: it is the first one, or there is no room.
        self._is_blocked = True
        # The newest position, and how many of the items are before it.
        self._position: Position = None
        self._placed = 0
        self._began_s = 0.0
        self._first_sequence = began.sequence
        self._writing = 0
        # Calls of `commit`: how many there were, how many are covered by what was taken, and by what is committed.
        self._asked, self._covered, self._answered = 0, 0, 0
        self._asked_items = 0
        self._is_closing = False
        self._failure: KmqError | None = None
        self._metrics = serve_producer(topics.queue, metrics_port, metrics_host, self)
        self._thread = threading.Thread(target=self._run, name=f"kmq-producer-{self._topic}-{producer_id}", daemon=True)
        self._thread.start()

    @property
    def state(self) -> ProducerState:
        """What is committed."""
        return self._life.state

    @property
    def uncommitted(self) -> int:
        """Messages that were given to `send` and are not committed."""
        with self._lock:
            return len(self._items) + self._writing

    @property
    def committed(self) -> int:
        """Messages that this life has committed."""
        return self.state.sequence - self._first_sequence

    @property
    def clients(self) -> tuple[object, ...]:
        """The clients, to be left alone in a child process."""
        return (self._life.client, self._log.admin)

    def send(  # noqa: C901, PLR0917  # most calls need none of the branches; there is one caller
        self,
        value: bytes | str | None,
        key: bytes | str | None,
        partition: int | None,
        headers: list[tuple[str, bytes | str | None]] | None,
        on_delivery: OnDelivery | None,
        position: SourcePosition,
    ) -> None:
        """
        Collect a message for the next transaction.

        Raises:
            ConfigError: The position is not allowed.
            TopicError: The partition does not exist.
            KafkaClientError: The message is too large, or what was collected could not be written for `timeout`.
            KmqError: Sending has failed; what is not committed is not sent.
            UsageError: Too many messages without a position, or the first position of an id that has sent without.
        """
        # These steps are a third of the cost of a message: nothing is called that most messages do not need.
        if isinstance(value, str):
            value = value.encode()
        size = RECORD_BYTES + len(value) if value else RECORD_BYTES
        if key is not None:
            key = key.encode() if isinstance(key, str) else key
            size += len(key)
        pairs: Headers | None = None
        if headers:
            pairs = _with_bytes(headers)
            size += sum([len(name) + len(text or b"") for name, text in pairs])
        if size > self._max_message_bytes:
            raise self._too_large(value, size)
        if partition is None:
            partition = -1
        elif not 0 <= partition < self._partition_count:
            self._check_partition(partition)
        encoded: Position
        if position is None or (type(position) is int and -MAX_COUNT <= position <= MAX_COUNT):
            encoded = position
        else:
            encoded = encode_position(position)
        with self._lock:
            if self._is_blocked:
                self._make_room()
            if encoded is not None and not self._has_positions:
                self._note_first_position()
            items = self._items
            items.append((value, key, partition, pairs, on_delivery))
            count = len(items)
            if encoded is not None:
                self._position, self._placed = encoded, count
            self._room_bytes = room_bytes = self._room_bytes - size
            if room_bytes <= 0 or count >= self._commit_every:
                self._is_blocked = True
                self._changed.notify_all()

    def commit(self, timeout_s: float, position: SourcePosition = None) -> None:
        """
        Wait until every message sent so far is committed.

        Args:
            timeout_s: Seconds.
            position: Moves the position without a message: what the source has up to here needs none.

        Raises:
            ConfigError: The position is not allowed.
            KmqError: Sending has failed.
            KafkaClientError: It took longer; it is still being tried.
        """
        encoded = _encoded(position)
        with self._changed:
            self._raise_failure()
            self._asked_items = len(self._items)
            if encoded is not None:
                self._is_unplaced, self._has_positions = False, True
                self._position, self._placed = encoded, self._asked_items
            self._asked = number = self._asked + 1
            self._changed.notify_all()
            is_done = self._changed.wait_for(
                lambda: self._answered >= number or self._failure is not None, timeout_s
            )  # fmt: skip
            self._raise_failure()
        if not is_done:
            message = (
                f"cannot commit to {self._topic}: no commit within {timeout_s:g} s; check the broker; "
                "the producer keeps trying"
            )
            raise KafkaClientError(message, code="_TIMED_OUT", retriable=True)

    def close(self, timeout_s: float, *, is_aborting: bool = False) -> None:
        """
        Commit what was collected, or drop it, and disconnect.

        Args:
            timeout_s: Seconds.
            is_aborting: Whether what is not committed is dropped.

        Raises:
            KmqError: As `commit`; what is not committed is dropped.
        """
        try:
            if not is_aborting:
                self.commit(timeout_s)
        finally:
            with self._changed:
                self._is_closing = True
                self._life.stop()
                dropped, self._items = self._items, []
                self._changed.notify_all()
            # A transaction that is being written ends by itself; a broker that is away must not hold up the caller.
            self._thread.join(STOP_WAIT_S)
            self._report_failure(dropped, UsageError("message is not sent: the producer was closed before its commit"))
            self._life.close()
            if self._metrics is not None:
                self._metrics.close()

    # What follows under "the lock" is called with `_changed` held.

    def _make_room(self) -> None:
        """Under the lock: begin a transaction's items, or wait while as many are collected as a transaction takes."""
        self._raise_failure()
        if self._is_full():
            self._wait_for_room()
        if not self._items:
            self._begin_items()

    def _begin_items(self) -> None:
        """Under the lock: note when the first item comes."""
        self._began_s = time.monotonic()
        self._is_blocked, self._room_bytes = False, MAX_COLLECTED_BYTES
        # The writer waits for the first item, then for its time.
        self._changed.notify_all()

    def _is_full(self) -> bool:
        return len(self._items) >= self._commit_every or self._room_bytes <= 0

    def _wait_for_room(self) -> None:
        if self._cut() == 0:
            message = (
                f"messages without a position are too many: got {len(self._items)}, "
                f"{MAX_COLLECTED_BYTES - self._room_bytes} bytes, since the last position, at most "
                f"{self._commit_every} and {MAX_COLLECTED_BYTES}; give send() a position, or call commit()"
            )
            raise UsageError(message)
        if not self._changed.wait_for(lambda: self._failure is not None or not self._is_full(), self._timeout):
            message = (
                f"cannot send to {self._topic}: a transaction takes longer than {self._timeout:g} s and the next one "
                "is full; check the broker, or send more slowly"
            )
            raise KafkaClientError(message, code="_QUEUE_FULL", retriable=True)
        self._raise_failure()

    def _note_first_position(self) -> None:
        """Under the lock: refuse the first position of an id whose earlier lives gave none."""
        if self._is_unplaced:
            message = (
                f"producer {self._producer_id} has sent {self.state.sequence} message(s) without a position in "
                "earlier lives: got a position now, which cannot say what they were; call commit(position=…) with "
                "the position of the source after them, or use another producer_id"
            )
            raise UsageError(message)
        self._has_positions = True

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _cut(self) -> int:
        """Under the lock: return how many of the collected items may be committed together."""
        cut = self._placed if self._has_positions else len(self._items)
        return max(cut, self._asked_items) if self._asked > self._covered else cut

    def _run(self) -> None:
        """Write transactions until the end; any failure is the end."""
        while (taken := self._next_items()) is not None:
            items, position, covered = taken
            try:
                if items or position is not None:
                    self._life.write(items, position, self._delivery_timeout_s)
            except KmqError as error:
                self._fail(error, items)
                return
            except Exception as error:
                logger.exception("producer %s failed and stops", self._producer_id, extra={"action": "producer_failed"})
                message = f"producer {self._producer_id} of {self._topic} failed: {error!r}; make a new one"
                self._fail(KmqError(message), items)
                return
            with self._changed:
                self._answered, self._writing = covered, 0
                self._changed.notify_all()

    def _fail(self, error: KmqError, items: list[Item]) -> None:
        with self._changed:
            self._failure, self._is_blocked = error, True
            items, self._items = [*items, *self._items], []
            self._changed.notify_all()
        self._report_failure(items, error)

    def _next_items(self) -> tuple[list[Item], Position, int] | None:
        """
        Wait until a commit is due.

        Returns:
            Messages, their position, and the calls of `commit` that they cover; None if the producer is closed.
        """
        with self._changed:
            while True:
                if self._is_closing:
                    return None
                is_asked = self._asked > self._covered
                due_s = self._began_s + self._commit_every_s - time.monotonic() if self._items else None
                if is_asked or (due_s is not None and (due_s <= 0 or self._is_full())):
                    cut = self._cut()
                    if is_asked or cut:
                        return self._take(cut)
                    # Only messages without a position: the next position makes them due.
                    due_s = self._commit_every_s
                self._changed.wait(due_s)

    def _take(self, cut: int) -> tuple[list[Item], Position, int]:
        """Under the lock: take the first items and the position, which is never behind them."""
        items, self._items = self._items[:cut], self._items[cut:]
        position, self._position, self._placed = self._position, None, 0
        self._covered = self._asked
        self._writing = len(items)
        self._room_bytes = MAX_COLLECTED_BYTES - sum(map(size_of, self._items))
        self._is_blocked = not self._items or self._is_full()
        self._began_s = time.monotonic()
        self._changed.notify_all()
        return items, position, self._covered

    def _too_large(self, value: bytes | None, size: int) -> KafkaClientError:
        return KafkaClientError(
            f"message is too large: got a value of {len(value or b'')} bytes, {size} with key and headers, at most "
            f"{self._max_message_bytes}; send a reference to where the content is kept, or raise max_message_bytes of "
            "queue and producer",
            code="MSG_SIZE_TOO_LARGE",
        )

    def _check_partition(self, partition: int) -> None:
        self._partition_count = partition_count(
            self._log.admin, self._topic, self._bootstrap_servers, self._timeout
        )  # fmt: skip
        if not 0 <= partition < self._partition_count:
            message = (
                f"cannot send to {self._topic}: got partition {partition}, 0 to {self._partition_count - 1} "
                "(_UNKNOWN_PARTITION); leave it to the key"
            )
            raise TopicError(message)

    def _report_failure(self, items: list[Item], error: KmqError) -> None:
        for _, _, _, _, on_delivery in items:
            if on_delivery is not None:
                call_back(on_delivery, None, error)


def _encoded(position: SourcePosition) -> EncodedPosition | None:
    encoded = encode_position(position)
    return None if encoded is NO_POSITION else encoded


def _with_bytes(headers: list[tuple[str, bytes | str | None]]) -> Headers:
    return [(name, text.encode() if isinstance(text, str) else text) for name, text in headers]


def _check(name: str, value: Any, most: int, *, least: int = 1) -> None:  # noqa: ANN401  # checked here
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        message = f"{name} is out of bounds: got {value!r}, {least} to {most}; correct the call"
        raise ConfigError(message)
