"""
One life of a producer id: fence the older one, then write messages and their position in transactions.

Rule 1: a life is one process with a producer id; its generation is that of the life before, plus 1. The sequence counts
the committed messages of all lives, without a gap.
Rule 2: the position record in the log decides. A new life, and one whose transaction failed, makes a new Kafka producer
with the same transactional id, which ends what is open, writes an own record, and reads the newest position below it.

Source: Kafka's proposal "Idempotent Producer" (pid, sequence, generation); KIP-98; KIP-588 for why a time-out looks
like fencing.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING

from kmq_spark.core.producing import ProducerState, next_life
from kmq_spark.errors import FencedError, KafkaClientError
from kmq_spark.failpoints import failpoint
from kmq_spark.kafka.client_errors import REFUSED
from kmq_spark.kafka.own_record import own_tombstone, write_own
from kmq_spark.kafka.transaction import TransactionalProducer
from kmq_spark.wire.headers import GENERATION, PRODUCER, RECORD_BYTES, SEQUENCE, size_of
from kmq_spark.wire.position import decode_state, encode_state

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from confluent_kafka import KafkaError, Message

    from kmq_spark.core.producing import SourcePosition
    from kmq_spark.kafka.transaction import OnDelivery, Record
    from kmq_spark.producer.position_log import PositionLog
    from kmq_spark.wire.headers import Headers

    Item = tuple[bytes | None, bytes | None, int, Headers]
    """A message: value, key, partition, headers."""

logger = logging.getLogger(__name__)

SENDER_HEADER_BYTES = 1_024
"""What the three headers add to a message, at most; the queue topic has room for them beyond the largest message."""

CLAIM_WAIT_S = 2.0
"""
How long a fenced producer looks for the record of the life that fenced it. Without one the broker gave its transaction
up. Two lives that fence each other send nothing twice: each writes only after the position below its own record.
"""

LOOK_EVERY_S = 0.2
RETRY_PAUSE_S = 0.5


class _RefusedError(Exception):
    """The broker refuses a message for good; the transaction is aborted."""

    def __init__(self, index: int, error: KafkaError) -> None:
        super().__init__(error.str())
        self.index = index
        self.code = error.name()


class Life:
    """One life of a producer id, of a program or of a slot of a Spark sink. One thread uses it."""

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
        """
        Fence the older life, read what it has committed, and write the next generation.

        Raises:
            FencedError: Another life began at the same time.
            KafkaClientError: The broker cannot be reached in time, or refuses the transactional id.
            WireError: The position record of this id cannot be read.
        """
        self.key = key
        self.topic = log.queue_topic
        self._log = log
        self._config = config
        self._by = by
        self._timeout = timeout
        self._is_sink = is_sink
        self._producer, self.state = self._begin()

    def close(self) -> None:
        """Give up what is open."""
        self._producer.close()

    def after(self, count: int, position: SourcePosition) -> ProducerState:
        """Return the state after a commit of *count* messages, with a copy of the position."""
        sequence = self.state.sequence + count
        state = ProducerState(self.state.generation, sequence, position, int(time.time() * 1000), self._by)
        return decode_state(encode_state(state))

    def write(self, items: Sequence[Item], after: ProducerState, timeout: float) -> None:
        """
        Write messages and the state behind them in one transaction, again until it is committed or cannot be.

        Raises:
            FencedError: A newer life has taken over; nothing of the transaction is visible.
            KafkaClientError: The broker refuses a message, which is named; or it did not succeed within *timeout*.
        """
        record = self._log.record_of(self.key, after)
        refused: list[_RefusedError] = []
        is_first = True

        def send() -> None:
            nonlocal is_first
            if refused:
                raise refused[0]
            # A report costs more than a message: only a second attempt asks for them, to learn what is refused.
            self._producer.send_all(self._records(items, None if is_first else refused))
            is_first = False
            failpoint("sink.rows-sent" if self._is_sink else "producer.sent")
            self._producer.send(record)
            failpoint("producer.position-sent")

        until_s = time.monotonic() + timeout
        while True:
            try:
                self._producer.run(send)
                break
            except _RefusedError as error:
                raise self._refused(error, items) from error
            except FencedError as error:
                self._look_for_newer_life(error)
            except KafkaClientError as error:
                if not error.retriable or time.monotonic() > until_s:
                    raise
                logger.warning(
                    "outcome of a transaction of producer %s is unknown; reading it from the log: %s",
                    self.key, error, extra={"action": "producer_replaced", "queue": self.topic},
                )  # fmt: skip
            if self._is_committed(after, until_s):
                break
        failpoint("sink.committed" if self._is_sink else "producer.committed")
        self.state = after

    def _begin(self) -> tuple[TransactionalProducer, ProducerState]:
        until_s = time.monotonic() + self._timeout
        while True:
            producer, found = self._fence_and_read(until_s)
            state = next_life(found, at_ms=int(time.time() * 1000), by=self._by)
            try:
                producer.run(partial(producer.send, self._log.record_of(self.key, state)))
            except KafkaClientError as error:
                if not error.retriable or time.monotonic() > until_s:
                    raise
                time.sleep(RETRY_PAUSE_S)
                continue
            logger.info(
                "producer %s of %s started generation %d after sequence %d",
                self.key, self.topic, state.generation, state.sequence,
                extra={"action": "producer_began", "queue": self.topic},
            )  # fmt: skip
            return producer, state

    def _fence_and_read(self, until_s: float) -> tuple[TransactionalProducer, ProducerState | None]:
        """Fence older lives, end what is open, and read the newest position, which cannot change any more."""
        while True:
            try:
                producer = TransactionalProducer(self._config, self._timeout, role="producer", attempts=1)
                ends = write_own(producer, [own_tombstone(self._log.topic)])
                return producer, self._log.newest(self.key, ends)
            except KafkaClientError as error:
                if not error.retriable or time.monotonic() > until_s:
                    raise
                time.sleep(RETRY_PAUSE_S)

    def _is_committed(self, after: ProducerState, until_s: float) -> bool:
        """Return whether the transaction was committed that would have written *after*."""
        self._producer.close()
        self._producer, found = self._fence_and_read(until_s)
        if found not in (self.state, after):  # a position may be a list
            raise self._fenced_by(found)
        return found == after

    def _look_for_newer_life(self, cause: FencedError) -> None:
        """
        Raise the error of a producer that a newer life has fenced; return where the broker did it.

        After `transaction.timeout.ms` of silence (a suspended process), or where it has forgotten an idle transactional
        id, the broker answers as if there were a newer producer. A newer life writes its generation first. Looking must
        not fence it, so this looks before a new Kafka producer is made.
        """
        until_s = None
        while until_s is None or time.monotonic() < until_s:
            try:
                found = self._log.newest(self.key)
            except KafkaClientError:
                return
            if found is None or found.generation != self.state.generation:
                raise self._fenced_by(found) from cause
            until_s = until_s or time.monotonic() + CLAIM_WAIT_S
            time.sleep(LOOK_EVERY_S)

    def _records(
        self, items: Sequence[Item], refused: list[_RefusedError] | None
    ) -> Iterator[tuple[Record, OnDelivery | None]]:
        # The client reads the headers within the call, so one list serves all messages.
        numbered: Headers = [
            (PRODUCER, self.key.encode()),
            (GENERATION, b"%d" % self.state.generation),
            (SEQUENCE, b""),
        ]
        first = self.state.sequence + 1
        report = None
        for index, (value, key, partition, headers) in enumerate(items):
            numbered[2] = (SEQUENCE, b"%d" % (first + index))
            if refused is not None:
                report = partial(_note_refused, refused, index)
            yield (self.topic, partition, key, value, headers + numbered if headers else numbered), report

    def _refused(self, error: _RefusedError, items: Sequence[Item]) -> KafkaClientError:
        sequence = self.state.sequence + error.index + 1
        return KafkaClientError(
            f"cannot send to {self.topic}: the broker rejected the message of sequence {sequence}, "
            f"{size_of_item(items[error.index])} bytes: {error} ({error.code}); no message after sequence "
            f"{self.state.sequence} was committed; correct the message or the topic, then create a new producer, which "
            "continues there",
            code=error.code,
        )

    def _fenced_by(self, found: ProducerState | None) -> FencedError:
        what = f"producer {self.key} of {self.topic} was fenced"
        if found is None or found.generation < self.state.generation:
            return FencedError(f"{what}: its position was forgotten; stop this one")
        return FencedError(
            f"{what}: generation {found.generation} by {found.by} has taken over from generation "
            f"{self.state.generation}; stop this one"
        )


def _note_refused(refused: list[_RefusedError], index: int, error: KafkaError | None, _: Message) -> None:
    if error is not None and error.name() in REFUSED:
        refused.append(_RefusedError(index, error))


def size_of_item(item: Item) -> int:
    """Return the size of a message as the broker counts it, at most, bytes."""
    value, key, _, headers = item
    return RECORD_BYTES + size_of(key, value, headers)
