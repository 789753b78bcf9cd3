"""
One life of a producer id: fence the older one, then write transactions of messages and their position.

Rule 1: an outcome that is not known is looked up: a new Kafka producer of the same transactional id ends what is open,
and then the position record decides (`core/producing.py`).
Rule 2: one thread writes; it may be asked to stop by another one.

Source: KIP-98; KIP-588 for why a time-out looks like fencing.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException

from kmq_spark.core.markers import MessageId
from kmq_spark.core.producing import Outcome, ProducerState, next_life, outcome_of
from kmq_spark.errors import FencedError, KafkaClientError, KmqError
from kmq_spark.failpoints import failpoint
from kmq_spark.kafka.client_errors import REFUSED
from kmq_spark.kafka.transaction import TransactionalProducer
from kmq_spark.wire.headers import GENERATION, PRODUCER, RECORD_BYTES, SEQUENCE
from kmq_spark.wire.headers import size_of as bytes_of
from kmq_spark.wire.position import EncodedPosition, decode_position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from confluent_kafka import KafkaError, Producer
    from confluent_kafka import Message as KafkaMessage

    from kmq_spark.kafka.records import OutgoingRecord
    from kmq_spark.kafka.transaction import Record
    from kmq_spark.producer.position_log import PositionLog
    from kmq_spark.wire.headers import Headers

    OnDelivery = Callable[[MessageId | None, KmqError | None], object]

    Item = tuple[bytes | None, bytes | None, int, Headers | None, OnDelivery | None]
    """A message: value, key, partition, headers, callback."""

    Position = EncodedPosition | int | None
    """A source position as it is written; None if it does not change. Most positions are numbers: they need no text."""

logger = logging.getLogger(__name__)

CLAIM_WAIT_S = 2.0
"""How long a fenced producer looks for the record of the life that fenced it."""

LOOK_EVERY_S = 0.2
RETRY_PAUSE_S = 0.5


class _RefusedError(Exception):
    """The broker refuses a message for good; the transaction is aborted."""

    def __init__(self, index: int, code: str, text: str) -> None:
        super().__init__(text)
        self.index = index
        self.code = code


class Life:
    """
    One life of a producer id.

    Attributes:
        state: What is committed.
        key: The id.
        topic: Queue topic.
        log: Log of the position records.
        transactions: The Kafka producer; replaced where it is over.
        is_sink: Whether it is that of a slot of a Spark sink; names its crash points.

    Args:
        log: Log of the position records.
        key: The id.
        config: librdkafka settings, `transactional.id` among them.
        by: This process, for the position records.
        timeout: Bound on each call to the broker, and on beginning.
        is_sink: See above.

    Raises:
        FencedError: Another life began at the same time.
        KafkaClientError: The broker cannot be reached in time, or refuses the transactional id.
        WireError: The position record of this id cannot be read.
    """

    def __init__(
        self,
        log: PositionLog,
        key: str,
        config: Mapping[str, str | int | float | bool],
        *,
        by: str,
        timeout: float,
        is_sink: bool = False,
    ) -> None:
        """Fence the older life, read what it has committed, and write the new generation."""
        self.log = log
        self.key = key
        self.topic = log.queue_topic
        self.is_sink = is_sink
        self._config = config
        self._by = by
        self._timeout = timeout
        self._is_stopping = False
        self.transactions, self.state = self._begin()

    @property
    def client(self) -> Producer:
        """The Kafka client, to be left alone in a child process."""
        return self.transactions.client

    def stop(self) -> None:
        """Try nothing again from now on; may be called by another thread."""
        self._is_stopping = True

    def close(self) -> None:
        """Give up what is open."""
        self.transactions.close()

    def write(
        self, items: list[Item], position: Position, timeout_s: float, letters: Sequence[OutgoingRecord] = ()
    ) -> None:
        """
        Write one transaction. Write it again until it is committed or cannot be committed.

        Args:
            items: Messages; may be empty.
            position: Source position after these messages.
            timeout_s: How long it is tried, seconds.
            letters: Records of other topics in the same transaction; they have no sequence.

        Raises:
            FencedError: A newer life has taken over; nothing of the transaction is visible.
            KafkaClientError: The broker refuses a message, which is named; or it did not succeed in time.
        """
        before, after = self.state, self._state_after(len(items), position)
        work = _Work(self, items, before, after, letters)
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                self.transactions.run(work, [], None)
                break
            except _RefusedError as error:
                raise self._refused(error, items, before) from error
            except FencedError as error:
                self._look_for_newer_life(before, error)
            except KafkaClientError as error:
                if not error.retriable or time.monotonic() > until_s or self._is_stopping:
                    raise
                logger.warning(
                    "outcome of a transaction of producer %s is unknown; reading it from the log: %s",
                    self.key, error, extra={"action": "producer_replaced", "queue": self.topic},
                )  # fmt: skip
            if self._look_up(before, after, until_s) is Outcome.COMMITTED:
                break
        failpoint("sink.committed" if self.is_sink else "producer.committed")
        self.state = after
        work.call_back_all()

    def _state_after(self, count: int, given: Position) -> ProducerState:
        position = self.state.position
        if given is not None:
            position = given if isinstance(given, int) else decode_position(given)
        return ProducerState(
            self.state.generation, self.state.sequence + count, position, int(time.time() * 1000), self._by
        )

    def _begin(self) -> tuple[TransactionalProducer, ProducerState]:
        """Fence, read, write the next generation; again where the broker went away meanwhile."""
        until_s = time.monotonic() + self._timeout
        while True:
            try:
                transactions = TransactionalProducer(self._config, self._timeout, role="producer")
                found = self.log.newest(self.key)
                state = next_life(found, at_ms=int(time.time() * 1000), by=self._by)
                record = self.log.record_of(self.key, state)
                transactions.run(partial(transactions.send, record), [], None)
            except KafkaClientError as error:
                if not error.retriable or time.monotonic() > until_s:
                    raise
                time.sleep(RETRY_PAUSE_S)
            else:
                logger.info(
                    "producer %s of %s started generation %d after sequence %d",
                    self.key, self.topic, state.generation, state.sequence,
                    extra={"action": "producer_began", "queue": self.topic},
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
                self.transactions.close()
                self.transactions = TransactionalProducer(self._config, self._timeout, role="producer")
                found = self.log.newest(self.key)
            except KafkaClientError as error:
                if not error.retriable or time.monotonic() > until_s or self._is_stopping:
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
                found = self.log.newest(self.key)
            except KafkaClientError:
                return
            if found is None or found.generation != before.generation:
                raise self._fenced_by(found) from cause
            until_s = time.monotonic() + CLAIM_WAIT_S if until_s is None else until_s
            time.sleep(LOOK_EVERY_S)

    def _fenced_by(self, found: ProducerState | None) -> FencedError:
        what = f"producer {self.key} of {self.topic} was fenced"
        if found is None or found.generation < self.state.generation:
            return FencedError(f"{what}: its position was forgotten; stop this one")
        return FencedError(
            f"{what}: generation {found.generation} by {found.by} has taken over from generation "
            f"{self.state.generation}; stop this one"
        )

    def _refused(self, error: _RefusedError, items: list[Item], before: ProducerState) -> KafkaClientError:
        sequence = before.sequence + error.index + 1
        return KafkaClientError(
            f"cannot send to {self.topic}: the broker rejected the message of sequence {sequence}, "
            f"{size_of(items[error.index])} bytes: {error} ({error.code}); no message after sequence "
            f"{before.sequence} was committed; correct the message or the topic, "
            "then create a new producer, which continues there",
            code=error.code,
        )


class _Work:
    """
    Writes one transaction; after a failure, writes it anew.

    The first attempt requests no delivery reports: a report takes longer than a message. If it fails, the next attempt
    requests them, to find out which message the broker refuses.
    """

    def __init__(
        self,
        life: Life,
        items: list[Item],
        before: ProducerState,
        after: ProducerState,
        letters: Sequence[OutgoingRecord],
    ) -> None:
        self._life = life
        self._letters = letters
        self._items = items
        self._before = before
        self._record = life.log.record_of(life.key, after)
        self._has_callbacks = any(on_delivery is not None for _, _, _, _, on_delivery in items)
        self._places: dict[int, MessageId] = {}
        self._attempts = 0
        self._refused: _RefusedError | None = None

    def __call__(self) -> None:
        if self._refused is not None:
            raise self._refused
        transactions = self._life.transactions  # a new one after a failure
        self._places.clear()
        self._attempts += 1
        if self._attempts > 1 or self._has_callbacks:
            records = enumerate(self._records())
            transactions.send_all((record, partial(self._on_report, number)) for number, record in records)
        else:
            self._send_unreported(transactions)
        for letter in self._letters:
            transactions.send(letter)
        failpoint("sink.rows-sent" if self._life.is_sink else "producer.sent")
        transactions.send(self._record)
        failpoint("producer.position-sent")

    def call_back_all(self) -> None:
        """Call the callbacks of the committed messages."""
        if not self._has_callbacks:
            return
        for number, (_, _, _, _, on_delivery) in enumerate(self._items):
            if on_delivery is not None:
                call_back(on_delivery, self._places.get(number), None)

    def _send_unreported(self, transactions: TransactionalProducer) -> None:
        # This loop is half of the cost of a message: it calls only the client, and the client reads the headers within
        # the call, so that one list serves all messages.
        topic, sequence, produce = self._life.topic, self._before.sequence, transactions.client.produce
        numbered = self._numbered()
        for value, key, partition, own, _ in self._items:
            sequence += 1
            numbered[2] = (SEQUENCE, b"%d" % sequence)
            headers = own + numbered if own else numbered
            try:
                produce(topic, value, key, partition, None, None, 0, headers)  # type: ignore[arg-type]  # a narrower list
            except (BufferError, KafkaException):
                transactions.send_all([((topic, partition, key, value, headers), None)])

    def _records(self) -> Iterator[Record]:
        numbered = self._numbered()
        for sequence, (value, key, partition, own, _) in enumerate(self._items, self._before.sequence + 1):
            numbered[2] = (SEQUENCE, b"%d" % sequence)
            yield (self._life.topic, partition, key, value, own + numbered if own else numbered)

    def _numbered(self) -> Headers:
        """Return the headers of a message of this life; the third one is to be replaced for each message."""
        return [(PRODUCER, self._life.key.encode()), (GENERATION, b"%d" % self._before.generation), (SEQUENCE, b"")]

    def _on_report(self, number: int, error: KafkaError | None, record: KafkaMessage) -> None:
        if error is None:
            self._places[number] = MessageId(record.partition() or 0, record.offset() or 0)
        elif self._refused is None and error.name() in REFUSED:
            self._refused = _RefusedError(number, error.name(), error.str())


def call_back(on_delivery: OnDelivery, place: MessageId | None, error: KmqError | None) -> None:
    """Call a sender's callback; what it raises is logged."""
    try:
        on_delivery(place, error)
    except Exception:
        logger.exception("delivery callback raised an exception", extra={"action": "callback_failed"})


def size_of(item: Item) -> int:
    """Return the approximate size of a message, bytes."""
    value, key, _, headers, _ = item
    return RECORD_BYTES + bytes_of(key, value, headers)
