"""
Send messages and the source position in Kafka transactions, and go on where the last life stopped.

Rule 1: `send` only collects. One thread writes what was collected: messages, then the position record, then the commit.
So a transaction is open for as short as possible, and a transaction that was aborted can be written again.
Rule 2: the sequence is given when a transaction is written, in the order of the calls.
Rule 3: an outcome that is not known is looked up: a new Kafka producer of the same transactional id ends what is open,
and then the position record tells (`core/producing.py`).
Rule 4: a life that a newer one has replaced writes nothing more: every call raises FencedError.
Rule 5: once positions are in use, a commit never falls between a message without a position and the next one with a
position: the messages of one source record stay together.

Source: KIP-98 for fencing by transactional id; KIP-618 (Kafka Connect's exactly-once sources) for positions in the
transaction of the messages.
"""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from kmq_spark.core.markers import MessageId
from kmq_spark.core.producing import Outcome, ProducerState, SourcePosition, next_life, outcome_of
from kmq_spark.errors import ConfigError, FencedError, KafkaClientError, KmqError, TopicError, UsageError
from kmq_spark.failpoints import failpoint
from kmq_spark.kafka.records import OutgoingRecord
from kmq_spark.kafka.settings import new_client_id, transactional_producer_config
from kmq_spark.kafka.topics import partition_count
from kmq_spark.kafka.transaction import TransactionalProducer
from kmq_spark.producer.position_log import PositionLog
from kmq_spark.wire.headers import GENERATION, PRODUCER, SEQUENCE
from kmq_spark.wire.position import NO_POSITION, EncodedPosition, decode_position, encode_position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from confluent_kafka import KafkaError
    from confluent_kafka import Message as KafkaMessage

    from kmq_spark.kafka.queue_topics import QueueTopics
    from kmq_spark.wire.headers import Headers

    OnDelivery = Callable[[MessageId | None, KmqError | None], object]

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

CLAIM_WAIT_S = 2.0
"""How long a fenced producer looks for the record of the life that fenced it."""

LOOK_EVERY_S = 0.2
RETRY_PAUSE_S = 0.5
STOP_WAIT_S = 5.0

_RECORD_BYTES = 64
"""What a record takes beside key, value and headers, at most."""

_PERMANENT = frozenset(
    {
        *("MSG_SIZE_TOO_LARGE", "INVALID_MSG", "INVALID_MSG_SIZE", "INVALID_RECORD", "INVALID_TIMESTAMP"),
        *("POLICY_VIOLATION", "RECORD_LIST_TOO_LARGE", "UNSUPPORTED_FOR_MESSAGE_FORMAT"),
        *("TOPIC_AUTHORIZATION_FAILED", "CLUSTER_AUTHORIZATION_FAILED"),
        *("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION"),
    }
)
"""Refusals of a message that writing it again does not change."""


class _Item(NamedTuple):
    """What was collected: a message, or a position alone."""

    value: bytes | None
    key: bytes | None
    partition: int
    headers: Headers | None
    on_delivery: OnDelivery | None
    position: EncodedPosition | int | None
    is_message: bool = True


class _RefusedError(Exception):
    """The broker refuses a message for good; the transaction is aborted."""

    def __init__(self, index: int, code: str, text: str) -> None:
        super().__init__(text)
        self.index = index
        self.code = code


class ResumingSender:
    """
    The sending half of `QueueProducer(producer_id=…)`; safe for many threads.

    Args:
        topics: Names of the queue.
        producer_id: Checked.
        client_id: Name in the broker's log, and `by` of the position records.
        max_message_bytes: Largest message, key, value and headers together.
        delivery_timeout_ms: How long a transaction is tried again before it has failed.
        timeout_ms: Bound on each call to the broker.
        transaction_timeout_ms: See `TRANSACTION_TIMEOUT_MS`.
        commit_every_ms: How long a message waits for its commit.
        commit_every: Messages of a transaction, at most.
        bootstrap_servers: Comma-separated `host:port`.
        extra: librdkafka settings.

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
        timeout_ms: int,
        transaction_timeout_ms: int,
        commit_every_ms: int,
        commit_every: int,
        bootstrap_servers: str,
        extra: Mapping[str, str] | None,
    ) -> None:
        """Fence the older life, read what it has committed, and write the new generation."""
        _check("commit_every_ms", commit_every_ms, MAX_COMMIT_EVERY_MS)
        _check("commit_every", commit_every, MAX_COMMIT_EVERY)
        _check("transaction_timeout_ms", transaction_timeout_ms, 900_000, least=1_000)
        self._topics = topics
        self._topic = topics.queue_topic
        self._producer_id = producer_id
        self._bootstrap_servers = bootstrap_servers
        self._timeout_ms = timeout_ms
        self._delivery_timeout_s = delivery_timeout_ms / 1000
        self._max_message_bytes = max_message_bytes
        self._commit_every_s = commit_every_ms / 1000
        self._commit_every = commit_every
        self._by = client_id or new_client_id("producer")
        self._config = transactional_producer_config(
            bootstrap_servers,
            topics.producer_transactional_id(producer_id),
            self._by,
            extra,
            max_message_bytes=max_message_bytes + HEADER_ROOM_BYTES,
            transaction_timeout_ms=transaction_timeout_ms,
        )
        self._log = PositionLog(topics, bootstrap_servers, timeout_ms, extra)
        self._log.ensure()
        self._partition_count = partition_count(self._log.admin, self._topic, bootstrap_servers, timeout_ms)
        self._transactions, self._state = self._begin_life()
        self._has_positions = self._state.position is not None
        # Messages of earlier lives without a position: no position of the source can say that they are sent.
        self._is_unplaced = self._state.sequence > 0 and not self._has_positions

        self._changed = threading.Condition()
        self._items: list[_Item] = []
        self._bytes = 0
        self._began_s = 0.0
        self._taken = 0
        self._done = 0
        self._asked = 0
        self._is_closing = False
        self._failure: KmqError | None = None
        self._thread = threading.Thread(target=self._run, name=f"kmq-producer-{self._topic}-{producer_id}", daemon=True)
        self._thread.start()

    @property
    def state(self) -> ProducerState:
        """What is committed."""
        return self._state

    @property
    def clients(self) -> tuple[object, ...]:
        """The clients, to be left alone in a child process."""
        return (self._transactions.client, self._log.admin)

    def send(
        self,
        value: bytes | str | None,
        *,
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
            KafkaClientError: The message is too large, or what was collected could not be written for `timeout_ms`.
            KmqError: Sending has failed; what is not committed is not sent.
            UsageError: Too many messages without a position, or the first position of an id that has sent without.
        """
        value_bytes = value.encode() if isinstance(value, str) else value
        key_bytes = key.encode() if isinstance(key, str) else key
        size = _RECORD_BYTES + len(value_bytes or b"") + len(key_bytes or b"")
        pairs: Headers | None = None
        if headers:
            pairs = [(name, text.encode() if isinstance(text, str) else text) for name, text in headers]
            size += sum(len(name) + len(text or b"") for name, text in pairs)
        if size > self._max_message_bytes:
            raise self._too_large(value_bytes, size)
        if partition is not None and not 0 <= partition < self._partition_count:
            self._check_partition(partition)
        encoded = position if type(position) is int and abs(position) < 2**63 else _encoded(position)
        item = _Item(value_bytes, key_bytes, -1 if partition is None else partition, pairs, on_delivery, encoded)
        with self._changed:
            self._wait_for_room()
            if encoded is not None:
                self._check_placed()
            self._collect(item, size)

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
            if encoded is not None:
                self._is_unplaced = False
                self._collect(_Item(None, None, -1, None, None, encoded, is_message=False), 0)
            target = self._asked = self._taken + len(self._items)
            self._changed.notify_all()
            is_done = self._changed.wait_for(lambda: self._done >= target or self._failure is not None, timeout_s)
            self._raise_failure()
        if not is_done:
            message = (
                f"cannot commit to {self._topic}: not done after {timeout_s:g} s; check the broker, it is still tried"
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
                dropped, self._items = self._items, []
                self._changed.notify_all()
            # A transaction that is being written ends by itself; a broker that is away must not hold up the caller.
            self._thread.join(STOP_WAIT_S)
            self._tell(dropped, UsageError("message is not sent: the producer was closed before its commit"))
            self._transactions.close()

    # What follows under "the lock" is called with `_changed` held.

    def _collect(self, item: _Item, size: int) -> None:
        """Under the lock: add an item, and wake the writer where it has to know."""
        is_first = not self._items
        if is_first:
            self._began_s = time.monotonic()
        self._items.append(item)
        self._bytes += size
        if item.position is not None and not self._has_positions:
            self._has_positions = True
        if is_first or self._is_full():
            self._changed.notify_all()

    def _is_full(self) -> bool:
        return len(self._items) >= self._commit_every or self._bytes >= MAX_COLLECTED_BYTES

    def _wait_for_room(self) -> None:
        """Under the lock: wait while as much is collected as a transaction takes."""
        self._raise_failure()
        if not self._is_full():
            return
        if self._cut() == 0:
            message = (
                f"messages without a position are too many: got {len(self._items)}, {self._bytes} bytes, since the "
                f"last position, at most {self._commit_every} and {MAX_COLLECTED_BYTES}; give send() a position, or "
                "call commit()"
            )
            raise UsageError(message)
        timeout_s = self._timeout_ms / 1000
        if not self._changed.wait_for(lambda: self._failure is not None or not self._is_full(), timeout_s):
            message = (
                f"cannot send to {self._topic}: a transaction takes longer than {timeout_s:g} s and the next one is "
                "full; check the broker, or send more slowly"
            )
            raise KafkaClientError(message, code="_QUEUE_FULL", retriable=True)
        self._raise_failure()

    def _check_placed(self) -> None:
        """Under the lock: refuse the first position of an id whose earlier lives gave none."""
        if self._is_unplaced:
            message = (
                f"producer {self._producer_id} has sent {self._state.sequence} message(s) without a position in "
                "earlier lives: got a position now, which cannot say what they were; call commit(position=…) with "
                "where the source stands behind them, or use another producer_id"
            )
            raise UsageError(message)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _cut(self) -> int:
        """Under the lock: return how many of the collected items may be committed together."""
        if self._asked > self._taken:
            return self._asked - self._taken
        if not self._has_positions:
            return len(self._items)
        for number in range(len(self._items), 0, -1):
            if self._items[number - 1].position is not None:
                return number
        return 0

    def _run(self) -> None:
        """Write transactions until the end; any failure is the end."""
        while (items := self._next_items()) is not None:
            try:
                state = self._write(items)
            except KmqError as error:
                self._fail(error, items)
                return
            except Exception as error:
                logger.exception("producer %s stops", self._producer_id, extra={"action": "producer_failed"})
                message = f"producer {self._producer_id} of {self._topic} failed: {error!r}; make a new one"
                self._fail(KmqError(message), items)
                return
            with self._changed:
                self._state = state
                self._done = self._taken
                self._changed.notify_all()

    def _fail(self, error: KmqError, items: list[_Item]) -> None:
        with self._changed:
            self._failure = error
            items, self._items = [*items, *self._items], []
            self._changed.notify_all()
        self._tell(items, error)

    def _next_items(self) -> list[_Item] | None:
        """Wait for what is due; None when the producer is closed."""
        with self._changed:
            while True:
                if self._is_closing:
                    return None
                is_asked = self._asked > self._taken
                due_s = self._began_s + self._commit_every_s - time.monotonic() if self._items else None
                if is_asked or (due_s is not None and (due_s <= 0 or self._is_full())):
                    cut = self._cut()
                    if cut:
                        return self._take(cut)
                    # Only messages without a position: the next position makes them due.
                    due_s = self._commit_every_s
                self._changed.wait(due_s)

    def _take(self, cut: int) -> list[_Item]:
        items, self._items = self._items[:cut], self._items[cut:]
        self._taken += len(items)
        self._bytes = sum(map(_size_of, self._items))
        self._began_s = time.monotonic()
        self._changed.notify_all()
        return items

    def _write(self, items: list[_Item]) -> ProducerState:
        """Write one transaction, and again until it is committed or cannot be."""
        before, after = self._state, self._state_after(items)
        work = _Work(self, items, before, after)
        until_s = time.monotonic() + self._delivery_timeout_s
        while True:
            try:
                self._transactions.run(work, [], None)
                break
            except _RefusedError as error:
                raise self._refused(error, items, before) from error
            except FencedError as error:
                self._look_for_newer_life(before, error)
            except KafkaClientError as error:
                if not error.retriable or time.monotonic() > until_s or self._is_closing:
                    raise
                logger.warning(
                    "a transaction of %s got no clear answer, it is looked up: %s",
                    self._producer_id, error, extra={"action": "producer_replaced", "queue": self._topic},
                )  # fmt: skip
            if self._look_up(before, after, until_s) is Outcome.COMMITTED:
                break
        failpoint("producer.committed")
        work.tell_places()
        return after

    def _state_after(self, items: list[_Item]) -> ProducerState:
        count = sum(item.is_message for item in items)
        given = next((item.position for item in reversed(items) if item.position is not None), None)
        position = self._state.position
        if given is not None:
            position = given if isinstance(given, int) else decode_position(given)
        return ProducerState(
            self._state.generation, self._state.sequence + count, position, int(time.time() * 1000), self._by
        )

    def _begin_life(self) -> tuple[TransactionalProducer, ProducerState]:
        """Fence, read, write the next generation; again where the broker went away meanwhile."""
        until_s = time.monotonic() + self._timeout_ms / 1000
        while True:
            try:
                transactions = TransactionalProducer(self._config, self._timeout_ms, role="producer")
                found = self._log.newest(self._producer_id)
                state = next_life(found, at_ms=int(time.time() * 1000), by=self._by)
                record = self._log.record_of(self._producer_id, state)
                transactions.run(partial(transactions.send, record), [], None)
            except KafkaClientError as error:
                if not error.retriable or time.monotonic() > until_s:
                    raise
                time.sleep(RETRY_PAUSE_S)
            else:
                logger.info(
                    "producer %s of %s begins generation %d behind sequence %d",
                    self._producer_id, self._topic, state.generation, state.sequence,
                    extra={"action": "producer_began", "queue": self._topic},
                )  # fmt: skip
                return transactions, state

    def _look_up(self, before: ProducerState, after: ProducerState, until_s: float) -> Outcome:
        """
        End what is open by a new Kafka producer, and find out what was committed.

        Raises:
            FencedError: A newer life has taken over.
            KafkaClientError: The broker did not answer in time.
        """
        while True:
            try:
                self._transactions.close()
                self._transactions = TransactionalProducer(self._config, self._timeout_ms, role="producer")
                found = self._log.newest(self._producer_id)
            except KafkaClientError as error:
                if not error.retriable or time.monotonic() > until_s or self._is_closing:
                    raise
                time.sleep(RETRY_PAUSE_S)
                continue
            outcome = outcome_of(found, before, after)
            if outcome is Outcome.NEWER_LIFE:
                raise self._fenced_by(found)
            return outcome

    def _look_for_newer_life(self, before: ProducerState, cause: FencedError) -> None:
        """
        Find out who fenced this producer; return where it was the broker.

        After `transaction.timeout.ms` of silence (a suspended process), or where it has forgotten an idle transactional
        id, the broker answers as if there were a newer producer. A newer life writes its generation first. Looking must
        not fence it, so this looks before a new Kafka producer is made.
        """
        until_s = None
        while until_s is None or time.monotonic() < until_s:
            try:
                found = self._log.newest(self._producer_id)
            except KafkaClientError:
                return
            if found is None or found.generation != before.generation:
                raise self._fenced_by(found) from cause
            until_s = time.monotonic() + CLAIM_WAIT_S if until_s is None else until_s
            time.sleep(LOOK_EVERY_S)

    def _fenced_by(self, found: ProducerState | None) -> FencedError:
        what = f"producer {self._producer_id} of {self._topic} was fenced"
        if found is None or found.generation < self._state.generation:
            return FencedError(f"{what}: its position was forgotten; stop this one")
        return FencedError(
            f"{what}: generation {found.generation} by {found.by} has taken over from generation "
            f"{self._state.generation}; stop this one"
        )

    def _too_large(self, value: bytes | None, size: int) -> KafkaClientError:
        return KafkaClientError(
            f"message is too large: got a value of {len(value or b'')} bytes, {size} with key and headers, at most "
            f"{self._max_message_bytes}; send a reference to where the content is kept, or raise max_message_bytes of "
            "queue and producer",
            code="MSG_SIZE_TOO_LARGE",
        )

    def _check_partition(self, partition: int) -> None:
        self._partition_count = partition_count(
            self._log.admin, self._topic, self._bootstrap_servers, self._timeout_ms
        )  # fmt: skip
        if not 0 <= partition < self._partition_count:
            message = (
                f"cannot send to {self._topic}: got partition {partition}, 0 to {self._partition_count - 1} "
                "(_UNKNOWN_PARTITION); leave it to the key"
            )
            raise TopicError(message)

    def _refused(self, error: _RefusedError, items: list[_Item], before: ProducerState) -> KafkaClientError:
        sequence = before.sequence + sum(item.is_message for item in items[: error.index + 1])
        return KafkaClientError(
            f"cannot send to {self._topic}: the broker refuses the message of sequence {sequence}, "
            f"{_size_of(items[error.index])} bytes: {error} ({error.code}); nothing behind sequence {before.sequence} "
            "is sent, correct the message or the topic and make a new producer, which goes on there",
            code=error.code,
        )

    def _tell(self, items: list[_Item], error: KmqError) -> None:
        for item in items:
            if item.on_delivery is not None:
                call_back(item.on_delivery, None, error)


class _Work:
    """
    Writes one transaction, each time anew.

    The first attempt has no reports of single messages. Where it fails, the next one has them, to name what is refused.
    """

    def __init__(self, sender: ResumingSender, items: list[_Item], before: ProducerState, after: ProducerState) -> None:
        self._sender = sender
        self._items = items
        self._before = before
        self._record = sender._log.record_of(sender._producer_id, after)  # noqa: SLF001  # its other half
        self._has_callbacks = any(item.on_delivery is not None for item in items)
        self._places: dict[int, MessageId] = {}
        self._attempts = 0
        self._refused: _RefusedError | None = None

    def __call__(self) -> None:
        if self._refused is not None:
            raise self._refused
        transactions = self._sender._transactions  # noqa: SLF001  # as above; a new one after a failure
        self._places.clear()
        self._attempts += 1
        if self._attempts > 1 or self._has_callbacks:
            transactions.send_all(self._records(), self._on_report)
        else:
            transactions.send_unreported(record for record in self._records() if record is not None)
        failpoint("producer.sent")
        transactions.send(self._record)
        failpoint("producer.position-sent")

    def tell_places(self) -> None:
        """Call back for what is committed."""
        for number, item in enumerate(self._items):
            if item.on_delivery is not None:
                call_back(item.on_delivery, self._places.get(number), None)

    def _records(self) -> Iterator[OutgoingRecord | None]:
        topic = self._sender._topic  # noqa: SLF001  # as above
        sequence = self._before.sequence
        ours: Headers = [
            (PRODUCER, self._sender._producer_id.encode()),  # noqa: SLF001  # as above
            (GENERATION, b"%d" % self._before.generation),
        ]
        for value, key, partition, headers, _, _, is_message in self._items:
            if not is_message:
                yield None
                continue
            sequence += 1
            number = (SEQUENCE, b"%d" % sequence)
            all_headers = [*ours, number] if headers is None else [*headers, *ours, number]
            yield OutgoingRecord(topic, partition, key, value, all_headers)

    def _on_report(self, number: int, error: KafkaError | None, record: KafkaMessage) -> None:
        if error is None:
            self._places[number] = MessageId(record.partition() or 0, record.offset() or 0)
        elif self._refused is None and error.name() in _PERMANENT:
            self._refused = _RefusedError(number, error.name(), error.str())


def call_back(on_delivery: OnDelivery, place: MessageId | None, error: KmqError | None) -> None:
    """Call a sender's callback; what it raises is logged."""
    try:
        on_delivery(place, error)
    except Exception:
        logger.exception("delivery callback raised", extra={"action": "callback_failed"})


def _encoded(position: SourcePosition) -> EncodedPosition | None:
    encoded = encode_position(position)
    return None if encoded is NO_POSITION else encoded


def _size_of(item: _Item) -> int:
    headers = sum(len(name) + len(text or b"") for name, text in item.headers or ())
    return _RECORD_BYTES + len(item.value or b"") + len(item.key or b"") + headers


def _check(name: str, value: Any, most: int, *, least: int = 1) -> None:  # noqa: ANN401  # checked here
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        message = f"{name} is out of bounds: got {value!r}, {least} to {most}; correct the call"
        raise ConfigError(message)
