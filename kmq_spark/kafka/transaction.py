"""
Run work in Kafka transactions with one transactional id, and separate temporary errors from the end of a producer.

Rule 1: the work may run again after an abort, so it must change nothing outside the transaction.
Rule 2: a retriable error of librdkafka repeats the call. An abortable error aborts the transaction and repeats the
work. Every other error ends this producer. Its last transaction may or may not be committed: the log says it, below
the first record that the next producer commits. A time-out ends the producer too: after a broker was suspended,
librdkafka may never find the transaction coordinator again (seen with 2.16), while a new producer finds it.
Rule 3: every wait is bounded, so that a tracker can be stopped while its broker is down.

Source: librdkafka INTRODUCTION.md, "Transactional Producer"; KIP-447; KIP-588, which explains why a time-out looks like
fencing; librdkafka issues 5456 and 5511 about calls that may never return.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, KafkaException, Producer

from kmq_spark.errors import FencedError, KafkaClientError, KmqError
from kmq_spark.failpoints import failpoint
from kmq_spark.kafka.client_errors import ADVICE, FENCED, TEMPORARY, TIMED_OUT
from kmq_spark.kafka.settings import make_client
from kmq_spark.pauses import retry_pause_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from confluent_kafka import Message, TopicPartition

    from kmq_spark.kafka.records import OutgoingRecord
    from kmq_spark.wire.headers import Headers

    Record = OutgoingRecord | tuple[str, int, bytes | None, bytes | None, Headers]
    OnDelivery = Callable[[KafkaError | None, Message], None]

logger = logging.getLogger(__name__)

ATTEMPTS = 8
FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 5.0
POLL_S = 0.05
POLL_EACH = 500
"""Number of records after which the delivery reports are polled, if there are many records."""

ABORT_WAIT_S = 3.0
"""Maximum time for an abort. A new producer aborts the transaction too, so a longer wait gains nothing."""

OFFSETS_WAIT_S = 5.0
"""
Maximum time to add offsets. It takes milliseconds. But after the broker has been away the call may never return, while
a new producer needs a second: redelivery goes on within 15 s of the broker's return.
"""

CONNECT_WAIT_S = 1.0
"""Maximum time to wait for the first connection to a broker before `init_transactions` is called."""

_CONNECTING_TOPIC = "__transaction_state"
"""Topic of the request that waits for a connection. The broker itself writes it for each transaction."""
ABORT_SLICE_S = 0.2

_TRANSACTION_HAS_FAILED = frozenset({"_PURGE_QUEUE", "_PURGE_INFLIGHT", "_STATE"})
"""Errors of records that were dropped, and of the next one, which the client does not take."""


class _AbortableError(Exception):
    """The transaction must be aborted. The producer remains usable, except after a time-out."""

    def __init__(self, error: KafkaError) -> None:
        super().__init__(f"{error.name()}: {error.str()}")
        self.code = error.name()


class TransactionalProducer:
    """
    A producer that writes only in transactions; *role* names its program in texts, `tracker` has failpoints.

    With *attempts* of 1, no work is repeated.
    """

    def __init__(
        self,
        config: Mapping[str, str | int | float | bool],
        timeout: float,
        *,
        role: str = "tracker",
        attempts: int = ATTEMPTS,
    ) -> None:
        self._role = role
        self._attempts = attempts
        self._timeout = timeout
        self._name = str(config["transactional.id"])
        self._producer = make_client(Producer, config)
        self._failed: KafkaError | None = None
        self._on_delivery_report = self._note_failure
        self._is_abandoned = False
        self._final_error: KafkaClientError | FencedError | None = None
        # If no broker is connected when it is called, `init_transactions` tries again only after 0.5 s.
        with contextlib.suppress(KafkaException):
            self._producer.list_topics(_CONNECTING_TOPIC, timeout=min(CONNECT_WAIT_S, self._timeout))
        self._tracker_failpoint("tracker.opening")
        self._call(self._producer.init_transactions, "start transactions")
        self._tracker_failpoint("tracker.fenced-older")

    @property
    def client(self) -> Producer:
        """The client, which a child process must not use."""
        return self._producer

    @property
    def has_ended(self) -> bool:
        """Whether this producer has ended and cannot write any more: create a new one."""
        return self._final_error is not None

    def send(self, record: OutgoingRecord, on_delivery: OnDelivery | None = None) -> None:
        """
        Add a record to the open transaction. Only the *work* of `run` may call this.

        *on_delivery* gets the delivery report, in this thread, before `run` returns.
        """
        self._produce(
            record,
            self._on_delivery_report if on_delivery is None else partial(self._note_failure_and_call, on_delivery),
        )
        self._producer.poll(0)

    def send_all(self, records: Iterable[tuple[Record, OnDelivery | None]]) -> None:
        """
        Add many records to the open transaction. Only the *work* of `run` may call this.

        Each record comes with the callback for its delivery report, which is called in this thread before `run`
        returns; None for no report, which takes the GIL from the thread that sends. A record without one that fails
        still aborts the transaction, at the commit. Neighbours best share a callback: a new one costs more than a
        record. The next record is requested only after the client took the last one.
        """
        produce, latest, report = self._producer.produce, None, None
        for number, (record, on_delivery) in enumerate(records):
            if on_delivery is not latest:
                latest = on_delivery
                report = None if on_delivery is None else partial(self._note_failure_and_call, on_delivery)
            topic, partition, key, value, headers = record
            try:
                produce(topic, value, key, partition, report, None, 0, headers)  # type: ignore[arg-type]  # a narrower list
            except (BufferError, KafkaException):
                self._produce(record, report)
            if number % POLL_EACH == 0:
                # Each poll releases and takes the GIL: do not poll once a record.
                self._producer.poll(0)
                if self._failed is not None:
                    raise KafkaException(self._failed)

    def _produce(self, record: Record, report: OnDelivery | None) -> None:
        topic, partition, key, value, headers = record
        is_refreshed = False
        while True:
            try:
                self._producer.produce(topic, value, key, partition, report, None, 0, headers)  # type: ignore[arg-type]  # a narrower list
            except BufferError:
                # librdkafka's send buffer is full: wait for deliveries.
                self._producer.poll(POLL_S)
            except KafkaException as error:
                if is_refreshed or error.args[0].code() != KafkaError._UNKNOWN_PARTITION:  # noqa: SLF001  # as above
                    raise
                # The topic has new partitions: the client refreshes its metadata only every five minutes.
                is_refreshed = True
                self._producer.list_topics(topic, timeout=self._timeout)
            else:
                return

    def run(
        self,
        work: Callable[[], None],
        positions: Sequence[TopicPartition] = (),
        group_metadata: object = None,
        progress: Callable[[], int] = lambda: 0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Run the work in one transaction and commit it."""
        if self._final_error is not None:
            # Without this, another caller of this producer would get the error of an open transaction. Raise the error
            # that ended the producer instead.
            raise self._final_error
        attempt, known = 1, progress()
        while True:
            try:
                self._attempt_or_abort(work, positions, group_metadata, check)
            except _AbortableError as error:
                if (now_known := progress()) > known:
                    attempt, known = 1, now_known
                    continue
                if attempt == self._attempts:
                    message = (
                        f"cannot commit a transaction of {self._name}: {error}, in {attempt} attempts; check the broker"
                    )
                    raise KafkaClientError(message, code="_ABORTED", retriable=True) from error
                logger.warning(
                    "transaction of %s aborted, retrying: %s", self._name, error, extra={"action": "txn_aborted"}
                )
                time.sleep(retry_pause_s(attempt, FIRST_BACKOFF_S, LONGEST_BACKOFF_S))
                attempt += 1
            else:
                return

    def close(self) -> None:
        """Discard the records that are not sent yet. A transaction that is not committed by now never will be."""
        if self._is_abandoned:
            return
        # Do not flush: after a fatal error, flush of confluent-kafka raises SystemError, and there is nothing to wait
        # for.
        self._producer.purge()

    def _attempt_or_abort(
        self,
        work: Callable[[], None],
        positions: Sequence[TopicPartition],
        group: object,
        check: Callable[[], None],
    ) -> None:
        """
        Make one attempt. After a `KafkaClientError` or `FencedError` the transaction may be open, and the producer has
        ended.
        """
        try:
            try:
                self._attempt(work, positions, group, check)
            except _AbortableError as error:
                self._abort()
                if error.code not in TIMED_OUT:
                    raise
                message = (
                    f"cannot commit a transaction of {self._name}: {error}; nothing was written; check the broker, "
                    "and run it again with a new producer"
                )
                raise KafkaClientError(message, code=error.code, retriable=True) from error
        except (KafkaClientError, FencedError) as error:
            self._final_error = error
            raise

    def _attempt(
        self,
        work: Callable[[], None],
        positions: Sequence[TopicPartition],
        group: object,
        check: Callable[[], None],
    ) -> None:
        self._failed = None
        self._call(lambda _: self._producer.begin_transaction(), "begin a transaction")
        try:
            work()
            self._drain()
            if positions:
                self._add_offsets(positions, group)
                self._tracker_failpoint("tracker.offsets-added")
            check()
        except KafkaException as error:
            self._raise_translated(self._cause_of(error), "produce in a transaction", produced=True)
        except (_AbortableError, KafkaClientError, FencedError):
            raise  # `run` aborts, or this producer has ended
        except BaseException:
            # An open transaction would block every reader of its partitions until the broker's time-out.
            with contextlib.suppress(_AbortableError, KmqError, KafkaException):
                self._abort()
            raise
        self._tracker_failpoint("tracker.before-commit")
        self._call(self._producer.commit_transaction, "commit a transaction")
        self._tracker_failpoint("tracker.committed")

    def _cause_of(self, error: KafkaException) -> KafkaException:
        """
        Return why the client has dropped the records of a transaction, or takes no more: their errors say only that.

        A producer whose transactional id the broker has forgotten would get a new epoch by an abort, although a newer
        producer may have written meanwhile. So this counts as fenced, except for a consumer, whose id is its own.
        """
        if error.args[0].name() in _TRANSACTION_HAS_FAILED and self._role != "consumer":
            try:
                # In a transaction it is refused; in one that has failed, with the failure.
                self._producer.begin_transaction()
            except KafkaException as cause:
                if cause.args[0].txn_requires_abort():
                    return cause
        return error

    def _add_offsets(self, positions: Sequence[TopicPartition], group: object) -> None:
        """
        Add offsets to the transaction. Abandon the producer if the call does not return.

        While the group's coordinator is unavailable, librdkafka ignores the time-out, and the call may never return,
        also after the broker is back. Therefore the call has its own thread. An abandoned producer commits nothing: no
        caller asks it to, and the next producer fences it.
        """
        answer = call_in_thread(
            "kmq-transaction-offsets",
            partial(self._producer.send_offsets_to_transaction, list(positions), group, self._timeout),
        )
        wait_s = min(self._timeout, OFFSETS_WAIT_S)
        try:
            answer.result(wait_s)
        except TimeoutError as error:
            self._is_abandoned = True
            message = (
                f"cannot add offsets to a transaction as {self._name}: got no answer within {wait_s:g} s; "
                "a new producer aborts it; check the broker"
            )
            raise KafkaClientError(message, code="_TIMED_OUT", retriable=True) from error
        except KafkaException as error:
            if error.args[0].retriable() and not error.args[0].fatal():
                raise _AbortableError(error.args[0]) from error
            self._raise_translated(error, "add offsets to a transaction")

    def _drain(self) -> None:
        """
        Wait for the delivery reports, but only until the first failure.

        A commit also waits for the reports. But after a rejected record librdkafka holds back the next ones until their
        delivery time-out: one message that is too large would cost a minute.
        """
        while len(self._producer) and self._failed is None:
            self._producer.poll(POLL_S)
        if self._failed is not None:
            raise KafkaException(self._failed)

    def _note_failure(self, error: KafkaError | None, _: Message) -> None:
        if error is not None and self._failed is None:
            self._failed = error

    def _note_failure_and_call(self, on_delivery: OnDelivery, error: KafkaError | None, record: Message) -> None:
        if error is not None and self._failed is None:
            self._failed = error
        on_delivery(error, record)

    def _tracker_failpoint(self, name: str) -> None:
        if self._role == "tracker":
            failpoint(name)

    def _abort(self) -> None:
        """
        Abort the open transaction. Abandon the producer if this takes too long.

        The call waits for requests that have no response yet, up to their time-out, and it may never return. A new
        producer with the same transactional id aborts the transaction at once.
        """
        self._tracker_failpoint("tracker.aborting")
        answer = start_abort(self._producer, ABORT_WAIT_S)
        try:
            answer.result(0)
        except TimeoutError as error:
            self._is_abandoned = True
            message = (
                f"cannot abort a transaction as {self._name}: got no answer within {ABORT_WAIT_S:g} s; "
                "a new producer aborts it"
            )
            raise KafkaClientError(message, code="_TIMED_OUT", retriable=True) from error
        except KafkaException as error:
            try:
                self._raise_translated(error, "abort a transaction")
            except _AbortableError as failure:
                # Do not abort again: this is the abort.
                message = f"cannot abort a transaction as {self._name}: {failure}; a new producer aborts it"
                raise KafkaClientError(message, code=error.args[0].name(), retriable=True) from error

    def _call(self, call: Callable[[float], object], operation: str) -> None:
        """Call with the remaining time in seconds. Repeat it while the error is retriable and time remains."""
        deadline_s = time.monotonic() + self._timeout
        attempt = 1
        while True:
            try:
                call(max(deadline_s - time.monotonic(), POLL_S))
            except KafkaException as error:
                kafka_error = error.args[0]
                must_end = kafka_error.fatal() or kafka_error.txn_requires_abort() or not kafka_error.retriable()
                if must_end or time.monotonic() > deadline_s:
                    self._raise_translated(error, operation)
                time.sleep(retry_pause_s(attempt, FIRST_BACKOFF_S, LONGEST_BACKOFF_S))
                attempt += 1
            else:
                return

    def _raise_translated(self, error: KafkaException, operation: str, *, produced: bool = False) -> None:
        """Raise our error for *error*. With *produced*, a record was rejected, and an abort is enough to recover."""
        kafka_error = error.args[0]
        if kafka_error.name() in FENCED:
            message = (
                f"cannot {operation} as {self._name}: {kafka_error.str()}; "
                f"a newer {self._role} has taken over, stop this one"
            )
            raise FencedError(message) from error
        if kafka_error.txn_requires_abort() or (produced and not kafka_error.fatal()):
            raise _AbortableError(kafka_error) from error
        code = kafka_error.name()
        advice = ADVICE.get(code) or "check the broker at its bootstrap servers"
        message = f"cannot {operation} as {self._name}: {kafka_error.str()} ({code}); {advice}"
        # The error is fatal for this producer, not for the queue: a new producer starts from the log.
        is_temporary = kafka_error.fatal() or kafka_error.retriable() or code in TEMPORARY
        raise KafkaClientError(message, code=code, retriable=is_temporary) from error


def call_in_thread(name: str, call: Callable[[], object]) -> Future[None]:
    """
    Run a call of librdkafka that may never return in a daemon thread, and return a future of it.

    A call that never returns blocks its own thread only: librdkafka issues 5456 and 5511.
    """
    answer: Future[None] = Future()

    def run() -> None:
        try:
            call()
        except KafkaException as error:
            answer.set_exception(error)
        else:
            answer.set_result(None)

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer


def start_abort(producer: Producer, wait_s: float) -> Future[None]:
    """
    Abort the open transaction. Return when it is aborted or when the time is over: a future, which may not be done.

    An abort also waits for requests that have no response yet, up to their time-out.
    """
    deadline_s = time.monotonic() + wait_s

    def call() -> None:
        while True:
            try:
                # Call it in short slices: librdkafka waits for the delivery reports of the records that it purges, and
                # only the `poll` of the caller's thread takes them.
                producer.abort_transaction(ABORT_SLICE_S)
            except KafkaException as error:
                cause = error.args[0]
                if cause.fatal() or not cause.retriable() or time.monotonic() > deadline_s:
                    raise
            else:
                return

    answer = call_in_thread("kmq-transaction-abort", call)
    while not answer.done() and time.monotonic() < deadline_s:
        try:
            producer.poll(POLL_S)
        except KafkaException:
            # A fatal error of the client, for example that it is fenced. The abort reports it too.
            wait([answer], POLL_S)
    return answer
