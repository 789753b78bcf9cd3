"""
Run work in Kafka transactions under one transactional id, and tell a passing fault from a lost producer.

Rule 1: one transaction at a time; the work may be run again after an abort, so it changes nothing but the transaction.
Rule 2: what librdkafka calls retriable is called again, what it calls abortable is aborted and run again; the rest ends
this producer. Its last transaction may or may not be committed, so whoever opens the next one reads the log to its end
before deciding anything.
Rule 3: a fenced producer never sends again.
Rule 4: every wait is bounded by `timeout_ms`, so that a tracker whose broker is away can still be stopped. An abort
has `ABORT_WAIT_S` only: a new producer of the same transactional id aborts the transaction, too.

Source: librdkafka INTRODUCTION.md, "Transactional Producer"; KIP-447; KIP-588 for why a time-out looks like fencing;
librdkafka's issues 5456 and 5511 for a call that may never return.
"""

from __future__ import annotations

import contextlib
import logging
import time
from functools import partial
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, KafkaException, Producer

from kmq_spark.errors import FencedError, KafkaClientError, KmqError
from kmq_spark.failpoints import failpoint
from kmq_spark.kafka.bounded_calls import aborting, in_a_thread
from kmq_spark.kafka.client_errors import PASSING_NAMES, advice_on
from kmq_spark.kafka.settings import make_client

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from confluent_kafka import Message, TopicPartition

    from kmq_spark.kafka.redelivery_records import OutgoingRecord
    from kmq_spark.wire.headers import Headers

    Record = OutgoingRecord | tuple[str, int, bytes | None, bytes | None, Headers]
    OnDelivery = Callable[[KafkaError | None, Message], None]
    OnEachDelivery = Callable[[int, KafkaError | None, Message], None]

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
POLL_S = 0.05
POLL_EACH = 500
"""Records after which their reports are looked at, where there are many."""

ABORT_WAIT_S = 3.0
"""How long an abort may take. A new producer aborts the transaction too, so waiting longer gains nothing."""


class _AbortableError(Exception):
    """The transaction is lost, the producer is not."""


class TransactionalProducer:
    """
    A producer that writes in transactions only.

    Args:
        config: librdkafka settings of a producer, `transactional.id` among them.
        timeout_ms: Bound on each call to the broker.
        role: Who writes: `tracker`, `consumer`, `redrive`. Named in errors; the crash points here are the tracker's.

    Raises:
        ConfigError: librdkafka refuses a setting.
        KafkaClientError: The broker cannot be reached, or refuses the transactional id.
    """

    def __init__(
        self, config: Mapping[str, str | int | float | bool], timeout_ms: int, *, role: str = "tracker"
    ) -> None:
        """Connect, and fence every older producer of the same transactional id."""
        self._role = role
        self._timeout_s = timeout_ms / 1000
        self._name = str(config["transactional.id"])
        self._producer = make_client(Producer, config)
        self._failed: KafkaError | None = None
        self._on_report = self._report
        self._is_given_up = False
        self._is_commit_asked = False
        self._ended_by: KafkaClientError | FencedError | None = None
        self._tracker_failpoint("tracker.opening")
        self._call(self._producer.init_transactions, "start transactions")
        self._tracker_failpoint("tracker.fenced-older")

    @property
    def client(self) -> Producer:
        """The client, to be left alone in a child process."""
        return self._producer

    @property
    def is_over(self) -> bool:
        """Whether this producer can write nothing more: make a new one."""
        return self._ended_by is not None

    @property
    def may_be_committed(self) -> bool:
        """Whether the newest transaction may be committed; False means: a new producer aborts it, if it is open."""
        return self._is_commit_asked

    def send(self, record: OutgoingRecord, on_delivery: OnDelivery | None = None) -> None:
        """
        Add a record to the open transaction; only `run`'s work may call it.

        Args:
            record: What to write.
            on_delivery: Told what became of it; called from this thread, before `run` returns.

        Raises:
            KafkaException: The client refuses it; `run` knows what to make of that.
        """
        self._produce(record, self._on_report if on_delivery is None else partial(self._report_to, on_delivery))
        self._producer.poll(0)

    def send_all(self, records: Iterable[Record | None], on_delivery: OnEachDelivery) -> None:
        """
        Add many records to the open transaction; only `run`'s work may call it.

        Args:
            records: What to write, None for nothing. The next one is asked for when the last one was taken.
            on_delivery: Told of each record that is not None what became of it, with its number among *records*; called
                from this thread, before `run` returns.

        Raises:
            KafkaException: The client refuses one; `run` knows what to make of that.
        """
        report = self._report_of
        for number, record in enumerate(records):
            if record is not None:
                self._produce(record, partial(report, on_delivery, number))
            if number % POLL_EACH == 0:
                # Each call lets go of the interpreter and takes it again: not once a record.
                self._producer.poll(0)
                if self._failed is not None:
                    raise KafkaException(self._failed)

    def send_unreported(self, records: Iterable[Record]) -> None:
        """
        Add many records to the open transaction, without a report of each; only `run`'s work may call it.

        A report takes the interpreter from the thread that sends meanwhile. A record that fails aborts the transaction
        all the same, at the commit; which one it was is not known then.

        Args:
            records: What to write.

        Raises:
            KafkaException: The client refuses one; `run` knows what to make of that.
        """
        produce = self._producer.produce
        for record in records:
            topic, partition, key, value, headers = record
            try:
                produce(topic, value, key, partition, None, None, 0, headers)  # type: ignore[arg-type]  # as below
            except (BufferError, KafkaException):
                self._produce(record, None)

    def _produce(self, record: Record, report: OnDelivery | None) -> None:
        topic, partition, key, value, headers = record
        is_asked = False
        while True:
            try:
                self._producer.produce(topic, value, key, partition, report, None, 0, headers)  # type: ignore[arg-type]  # a narrower list
            except BufferError:
                # The local queue is full: let it drain.
                self._producer.poll(POLL_S)
            except KafkaException as error:
                if is_asked or error.args[0].code() != KafkaError._UNKNOWN_PARTITION:  # noqa: SLF001  # as above
                    raise
                # A topic that has grown: the client looks by itself every five minutes only.
                is_asked = True
                self._producer.list_topics(topic, timeout=self._timeout_s)
            else:
                return

    def run(
        self,
        work: Callable[[], None],
        positions: list[TopicPartition],
        group_metadata: object,
        progress: Callable[[], int] = lambda: 0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Do the work in one transaction and commit it.

        Args:
            work: Sends records; called again after an abort. A record that fails aborts the transaction.
            positions: Offsets to commit with it; may be empty.
            group_metadata: Of the group whose offsets these are, from `Consumer.consumer_group_metadata`.
            progress: A number that grows when an attempt that was aborted has taught the work something: such attempts
                are not counted, for the next one is another.
            check: Called when all of it is durable, right before the commit: raises where it must not be committed.

        Whatever else *work* and *check* raise aborts the transaction and is raised here.

        Raises:
            FencedError: A newer producer of this transactional id exists, or the broker gave this transaction up.
            KafkaClientError: It did not succeed; its outcome may be unknown.
        """
        if self._ended_by is not None:
            # Whoever else writes through this producer finds its transaction open: tell what ended it, not that.
            raise self._ended_by
        attempt, known = 1, progress()
        while True:
            try:
                self._attempt_or_abort(work, positions, group_metadata, check)
            except _AbortableError as error:
                if (now_known := progress()) > known:
                    attempt, known = 1, now_known
                    continue
                if attempt == ATTEMPTS:
                    message = (
                        f"cannot commit a transaction of {self._name}: {error}, {ATTEMPTS} times; check the broker"
                    )
                    raise KafkaClientError(message, code="_ABORTED", retriable=True) from error
                logger.warning(
                    "transaction of %s aborted, trying again: %s", self._name, error, extra={"action": "txn_aborted"}
                )
                time.sleep(_backoff_s(attempt))
                attempt += 1
            else:
                return

    def close(self) -> None:
        """Give up what is open; a transaction that is not committed by now never will be."""
        if self._is_given_up:
            return
        # No flush: after a fatal error confluent-kafka's raises SystemError, and there is nothing to wait for.
        self._producer.purge()

    def _attempt_or_abort(
        self,
        work: Callable[[], None],
        positions: list[TopicPartition],
        group: object,
        check: Callable[[], None],
    ) -> None:
        """Make one attempt; with an error of the client the transaction may be left open, and the producer is over."""
        try:
            try:
                self._attempt(work, positions, group, check)
            except _AbortableError:
                self._abort()
                raise
        except (KafkaClientError, FencedError) as error:
            self._ended_by = error
            raise

    def _attempt(
        self,
        work: Callable[[], None],
        positions: list[TopicPartition],
        group: object,
        check: Callable[[], None],
    ) -> None:
        self._failed, self._is_commit_asked = None, False
        self._call(lambda _: self._producer.begin_transaction(), "begin a transaction")
        try:
            work()
            self._drain()
            if positions:
                self._add_offsets(positions, group)
                self._tracker_failpoint("tracker.offsets-added")
            check()
        except KafkaException as error:
            self._raise_translated(error, "produce in a transaction", produced=True)
        except (_AbortableError, KafkaClientError, FencedError):
            raise  # `run` aborts, or this producer is at its end
        except BaseException:
            # Left open, it would hold up every reader of its partitions until the broker's time-out.
            with contextlib.suppress(_AbortableError, KmqError, KafkaException):
                self._abort()
            raise
        self._tracker_failpoint("tracker.before-commit")
        self._is_commit_asked = True
        try:
            self._call(self._producer.commit_transaction, "commit a transaction")
        except _AbortableError:
            self._is_commit_asked = False  # librdkafka: such a transaction was not committed
            raise
        self._tracker_failpoint("tracker.committed")

    def _add_offsets(self, positions: list[TopicPartition], group: object) -> None:
        """
        Add offsets to the transaction, and give the producer up where that does not return.

        While the group's coordinator is away librdkafka ignores the time-out, and called again it may wait for ever. So
        the call has a thread of its own. A producer that is given up commits nothing: nobody asks it to, and the next
        one fences it.
        """
        answer = in_a_thread(
            "kmq-transaction-offsets",
            partial(self._producer.send_offsets_to_transaction, positions, group, self._timeout_s),
        )
        try:
            answer.result(self._timeout_s)
        except TimeoutError as error:
            self._is_given_up = True
            message = (
                f"cannot add offsets to a transaction as {self._name}: got no answer within {self._timeout_s:g} s; "
                "check the broker, or raise [kafka] timeout_ms"
            )
            raise KafkaClientError(message, code="_TIMED_OUT", retriable=True) from error
        except KafkaException as error:
            if error.args[0].retriable() and not error.args[0].fatal():
                raise _AbortableError(f"{error.args[0].name()}: {error.args[0].str()}") from error
            self._raise_translated(error, "add offsets to a transaction")

    def _drain(self) -> None:
        """
        Wait for the delivery reports, and for no more than the first failure.

        A commit waits for them too, but behind a record that was refused librdkafka holds back the next ones until
        their delivery time-out: a minute of standing still for one message that is too large.
        """
        while len(self._producer) and self._failed is None:
            self._producer.poll(POLL_S)
        if self._failed is not None:
            raise KafkaException(self._failed)

    def _report(self, error: KafkaError | None, _: Message) -> None:
        if error is not None and self._failed is None:
            self._failed = error

    def _report_to(self, on_delivery: OnDelivery, error: KafkaError | None, record: Message) -> None:
        if error is not None and self._failed is None:
            self._failed = error
        on_delivery(error, record)

    def _report_of(self, on_delivery: OnEachDelivery, number: int, error: KafkaError | None, record: Message) -> None:
        if error is not None and self._failed is None:
            self._failed = error
        on_delivery(number, error, record)

    def _tracker_failpoint(self, name: str) -> None:
        if self._role == "tracker":
            failpoint(name)

    def _abort(self) -> None:
        """
        Abort the open transaction, and give the producer up where that takes too long.

        Behind a request that has no answer the call waits for the request's time-out, and it may never return. A new
        producer of the same transactional id aborts the transaction at once.
        """
        self._tracker_failpoint("tracker.aborting")
        answer = aborting(self._producer, ABORT_WAIT_S)
        try:
            answer.result(0)
        except TimeoutError as error:
            self._is_given_up = True
            message = (
                f"cannot abort a transaction as {self._name}: got no answer within {ABORT_WAIT_S:g} s; "
                "a new producer aborts it"
            )
            raise KafkaClientError(message, code="_TIMED_OUT", retriable=True) from error
        except KafkaException as error:
            try:
                self._raise_translated(error, "abort a transaction")
            except _AbortableError as failure:
                # Not to be aborted again: this is the abort.
                message = f"cannot abort a transaction as {self._name}: {failure}; a new producer aborts it"
                raise KafkaClientError(message, code=error.args[0].name(), retriable=True) from error

    def _call(self, call: Callable[[float], object], what: str) -> None:
        """Call with the seconds that are left, and again while the failure may pass and there are any."""
        deadline_s = time.monotonic() + self._timeout_s
        attempt = 1
        while True:
            try:
                call(max(deadline_s - time.monotonic(), POLL_S))
            except KafkaException as error:
                kafka_error = error.args[0]
                passing = kafka_error.retriable() and not kafka_error.txn_requires_abort() and not kafka_error.fatal()
                if not passing or time.monotonic() > deadline_s:
                    self._raise_translated(error, what)
                time.sleep(_backoff_s(attempt))
                attempt += 1
            else:
                return

    def _raise_translated(self, error: KafkaException, what: str, *, produced: bool = False) -> None:
        """Raise what the error means; `produced`: a record was refused, which an abort puts right."""
        kafka_error = error.args[0]
        if kafka_error.code() in _FENCED_CODES:
            message = (
                f"cannot {what} as {self._name}: {kafka_error.str()}; "
                f"a newer {self._role} has taken over, stop this one"
            )
            raise FencedError(message) from error
        if kafka_error.txn_requires_abort() or (produced and not kafka_error.fatal()):
            raise _AbortableError(f"{kafka_error.name()}: {kafka_error.str()}") from error
        code = kafka_error.name()
        advice = advice_on(code) or "check the broker at its bootstrap servers"
        message = f"cannot {what} as {self._name}: {kafka_error.str()} ({code}); {advice}"
        # Fatal is this producer, not the queue: a new one begins where the log says.
        may_pass = kafka_error.fatal() or kafka_error.retriable() or code in PASSING_NAMES
        raise KafkaClientError(message, code=code, retriable=may_pass) from error


def _backoff_s(attempt: int) -> float:
    return float(min(FIRST_BACKOFF_S * 2 ** (attempt - 1), LONGEST_BACKOFF_S))
