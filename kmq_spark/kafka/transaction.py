"""
Run work in Kafka transactions under one transactional id, and tell a passing fault from a lost producer.

Rule 1: one transaction at a time; the work may be run again after an abort, so it changes nothing but the transaction.
Rule 2: what librdkafka calls retriable is called again, what it calls abortable is aborted and run again; the rest ends
this producer. Its last transaction may or may not be committed, so whoever opens the next one reads the log to its end
before deciding anything.
Rule 3: a fenced producer never sends again.

Source: librdkafka INTRODUCTION.md, "Transactional Producer"; KIP-447; KIP-588 for why a time-out looks like fencing.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, KafkaException, Producer

from kmq_spark.errors import FencedError, KafkaClientError
from kmq_spark.failpoints import failpoint
from kmq_spark.kafka.client_errors import PASSING_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from confluent_kafka import TopicPartition

logger = logging.getLogger(__name__)

_FENCED_CODES = frozenset(
    {
        KafkaError._FENCED,  # noqa: SLF001  # librdkafka's public name for it
        KafkaError.PRODUCER_FENCED,
        KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.INVALID_PRODUCER_ID_MAPPING,
    }
)

ATTEMPTS = 8
FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 5.0


class _AbortableError(Exception):
    """The transaction is lost, the producer is not."""


class TransactionalProducer:
    """
    A producer that writes in transactions only.

    Args:
        config: librdkafka settings of a producer, `transactional.id` among them.
        timeout_ms: Bound on each call to the broker.

    Raises:
        KafkaClientError: The broker cannot be reached, or refuses the transactional id.
    """

    def __init__(self, config: Mapping[str, str | int | float | bool], timeout_ms: int) -> None:
        """Connect, and fence every older producer of the same transactional id."""
        self._timeout_s = timeout_ms / 1000
        self._name = str(config["transactional.id"])
        self._producer = Producer(dict(config))
        failpoint("tracker.opening")
        self._call(lambda: self._producer.init_transactions(self._timeout_s), "start transactions")
        failpoint("tracker.fenced-older")

    def run(self, work: Callable[[Producer], None], positions: list[TopicPartition], group_metadata: object) -> None:
        """
        Do the work in one transaction and commit it.

        Args:
            work: Produces records; called again after an abort. A record that fails aborts the transaction.
            positions: Offsets to commit with it; may be empty.
            group_metadata: Of the group whose offsets these are, from `Consumer.consumer_group_metadata`.

        Raises:
            FencedError: A newer producer of this transactional id exists, or the broker gave this transaction up.
            KafkaClientError: It did not succeed; its outcome may be unknown.
        """
        backoff_s = FIRST_BACKOFF_S
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._attempt(work, positions, group_metadata)
            except _AbortableError as error:
                self._call(lambda: self._producer.abort_transaction(self._timeout_s), "abort a transaction")
                if attempt == ATTEMPTS:
                    message = (
                        f"cannot commit a transaction of {self._name}: {error}, {ATTEMPTS} times; check the broker"
                    )
                    raise KafkaClientError(message, code="_ABORTED", retriable=True) from error
                logger.warning(
                    "transaction of %s aborted, trying again: %s", self._name, error, extra={"action": "txn_aborted"}
                )
                time.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)
            else:
                return

    def close(self) -> None:
        """Give up what is open; a transaction that is not committed by now never will be."""
        # No flush: after a fatal error confluent-kafka's raises SystemError, and there is nothing to wait for.
        self._producer.purge()

    def _attempt(self, work: Callable[[Producer], None], positions: list[TopicPartition], group: object) -> None:
        self._call(self._producer.begin_transaction, "begin a transaction")
        try:
            work(self._producer)
        except KafkaException as error:
            self._raise_translated(error, "produce in a transaction", produced=True)
        if positions:
            self._call(
                lambda: self._producer.send_offsets_to_transaction(positions, group, self._timeout_s),
                "add offsets to a transaction",
            )
            failpoint("tracker.offsets-added")
        failpoint("tracker.before-commit")
        self._call(lambda: self._producer.commit_transaction(self._timeout_s), "commit a transaction")
        failpoint("tracker.committed")

    def _call(self, call: Callable[[], object], what: str) -> None:
        backoff_s = FIRST_BACKOFF_S
        for attempt in range(1, ATTEMPTS + 1):
            try:
                call()
            except KafkaException as error:
                kafka_error = error.args[0]
                passing = kafka_error.retriable() and not kafka_error.txn_requires_abort() and not kafka_error.fatal()
                if not passing or attempt == ATTEMPTS:
                    self._raise_translated(error, what)
                time.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)
            else:
                return

    def _raise_translated(self, error: KafkaException, what: str, *, produced: bool = False) -> None:
        """Raise what the error means; `produced`: a record was refused, which an abort puts right."""
        kafka_error = error.args[0]
        if kafka_error.code() in _FENCED_CODES:
            message = (
                f"cannot {what} as {self._name}: {kafka_error.str()}; a newer tracker has taken over, stop this one"
            )
            raise FencedError(message) from error
        if kafka_error.txn_requires_abort() or (produced and not kafka_error.fatal()):
            raise _AbortableError(f"{kafka_error.name()}: {kafka_error.str()}") from error
        message = f"cannot {what} as {self._name}: {kafka_error.str()}; check the broker at its bootstrap servers"
        # Fatal is this producer, not the queue: a new one begins where the log says.
        may_pass = kafka_error.fatal() or kafka_error.retriable() or kafka_error.name() in PASSING_NAMES
        raise KafkaClientError(message, code=kafka_error.name(), retriable=may_pass) from error
