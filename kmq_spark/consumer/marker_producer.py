"""
Send markers, report the result of each once, and resend those that must not be lost.

Rule 1: a START or a lease renewal is sent once: when it fails, it is too late to send it again.
Rule 2: an END or a release is resent until it is durable or the consumer closes. A late marker is still useful, and the
tracker ignores one for a message that is not in flight.
Rule 3: after a fatal error the idempotent producer is replaced. The markers that it had not delivered count as failed.
Rule 4: where a marker lies below an earlier one, the topic is another one of this name. No marker follows: its offsets
are those of other messages.

Source: librdkafka INTRODUCTION.md, "Idempotent Producer", for what a fatal error is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError, KafkaException, Producer

from kmq_spark.core.markers import Marker, MarkerType
from kmq_spark.errors import KafkaClientError, KmqError, TopicError
from kmq_spark.kafka.client_errors import client_error, serve_reports
from kmq_spark.kafka.records import place_of
from kmq_spark.kafka.settings import make_client
from kmq_spark.pauses import RateLimit
from kmq_spark.wire.codec import encode_marker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from confluent_kafka import Message

    OnReport = Callable[[KmqError | None, int], None]

logger = logging.getLogger(__name__)

RETRY_PAUSE_S, REPLACE_PAUSE_S = 0.2, 1.0
"""Pause before failed markers are resent (the client has retried for `delivery.timeout.ms`); between two clients."""

RESENT_LOG_S = 10.0
"""Minimum time between two log lines about resent markers: as long as the client retries, `delivery.timeout.ms`."""

METADATA_TIMEOUT_S = 5.0
"""Timeout of a metadata request after the topic has gained partitions."""


@dataclass(slots=True, eq=False)
class _Pending:
    """A marker without a delivery report. `number` is 0 if the marker is sent only once."""

    marker: Marker
    on_report: OnReport | None = None
    number: int = 0


class MarkerProducer:
    """
    Producer of markers, each to the markers partition with the number of its queue partition. Thread-safe.

    The thread that calls `serve` serves the delivery reports.
    """

    def __init__(self, config: Mapping[str, Any], topic: str) -> None:
        self._config = dict(config)
        self._topic = topic
        self._producer = make_client(Producer, self._config)
        self._lock = threading.Condition()
        self._last_number = 0
        # Queue partition of each marker of `send_until_durable` without a final result, by the marker's number.
        self._unreported: dict[int, int] = {}
        self._failed: deque[_Pending] = deque()
        self._errors: list[KmqError] = []
        self._retry_at = self._replace_at = 0.0
        self._resent_log_limit = RateLimit(RESENT_LOG_S)
        self._is_broken = False
        self._fatal: KafkaError | None = None
        self._last_offsets: dict[int, int] = {}
        self._lost: TopicError | None = None

    @property
    def client(self) -> Producer:
        """The client, for metadata requests."""
        return self._producer

    @property
    def is_waiting(self) -> bool:
        """Whether a marker of `send_until_durable` has no final result yet."""
        return bool(self._unreported)

    def waiting_partitions(self) -> set[int]:
        """Return the queue partitions of the markers of `send_until_durable` that have no final result yet."""
        with self._lock:
            return set(self._unreported.values())

    def send(self, marker: Marker, on_report: OnReport) -> None:
        """
        Send a START or a KEEPALIVE once.

        *on_report* is called once as `on_report(error, appended_at_ms)`, by this thread or by one that serves reports.
        The error is None if the marker is durable. The append time is in epoch milliseconds, broker clock; 0 if
        unknown.
        """
        self._produce(_Pending(marker, on_report))

    def send_until_durable(self, marker: Marker) -> None:
        """Send a marker, and resend it while it fails with a retriable error. `wait` raises any other error."""
        with self._lock:
            self._last_number += 1
            number = self._last_number
            self._unreported[number] = marker.queue_partition
        self._produce(_Pending(marker, number=number))

    def append_own(
        self, partitions: Iterable[int], timeout: float, consumer_id: str = ""
    ) -> dict[int, tuple[int, int]]:
        """
        Append a record that changes nothing to partitions; return its offset and append time, epoch ms, broker clock.

        What others had written by now lies below it, for every reader: who is asked for the end may be a deposed
        leader. Another thread must serve the reports.
        """
        tick = encode_marker(Marker(MarkerType.TICK, consumer_id=consumer_id))
        own: dict[int, Future[tuple[int, int]]] = {each: Future() for each in partitions}

        def report(error: KafkaError | None, sent: Message) -> None:
            found = own[sent.partition() or 0]
            if error is not None:
                found.set_exception(client_error(error, f"cannot write to {self._topic}"))
            elif (place := place_of(sent)) is not None:
                self._note_offset(sent.partition() or 0, place[0])
                found.set_result(place)
            else:
                message = f"cannot read {self._topic}: the broker did not say the place of our own record"
                found.set_exception(KafkaClientError(message, code="_NO_OFFSET", retriable=True))

        until = time.monotonic() + timeout
        try:
            for partition in own:
                self._produce_to(partition, tick, report)
            return {each: found.result(max(0.0, until - time.monotonic())) for each, found in own.items()}
        except KafkaException as error:
            raise client_error(error, f"cannot write to {self._topic}") from error
        except (BufferError, TimeoutError) as error:
            message = f"cannot write to {self._topic} within {timeout:g} s; check the broker"
            raise KafkaClientError(message, code="_TIMED_OUT", retriable=True) from error

    def last_offset(self, partition: int) -> int:
        """Return the offset of the last marker that is reported; -1 if there is none."""
        return self._last_offsets.get(partition, -1)

    def serve(self, timeout: float) -> None:
        """Serve delivery reports for at most *timeout* seconds, then resend failed markers."""
        serve_reports(self._producer.poll, timeout, self._note_fatal)
        if self._is_broken and time.monotonic() >= self._replace_at:
            self._replace()
        if self._failed and time.monotonic() >= self._retry_at:
            if self._resent_log_limit.allows():
                # The broker may have written a marker although its response did not arrive in time.
                logger.warning(
                    "%d marker(s) were not confirmed by %s and are sent again; the topic may contain them twice, "
                    "which changes nothing",
                    len(self._failed), self._topic, extra={"action": "markers_resent"},
                )  # fmt: skip
            for _ in range(len(self._failed)):
                self._produce(self._failed.popleft())

    def wait(self, timeout: float) -> None:
        """
        Wait until every marker of `send_until_durable` so far is durable; raise the first error since the last call.

        Another thread must serve the reports.
        """
        left = self.wait_for_reports(timeout)
        with self._lock:
            errors, self._errors = self._errors, []
        if errors:
            raise errors[0]
        if left:
            message = (
                f"cannot write the last markers to {self._topic}: got no response for {left} within {timeout:g} s; "
                "check the broker, the settled messages may be delivered again"
            )
            raise KafkaClientError(message, code="_TIMED_OUT", retriable=True)

    def wait_for_reports(self, timeout: float) -> int:
        """Wait until each marker of `send_until_durable` so far is durable or has failed; return how many are not."""
        with self._lock:
            last = self._last_number
            self._lock.wait_for(lambda: not any(number <= last for number in self._unreported), timeout)
            return sum(number <= last for number in self._unreported)

    def give_up(self, error: TopicError) -> None:
        """Write nothing more, and report this error: the messages that this consumer knows do not exist any more."""
        self._lost = self._lost or error

    def close(self) -> None:
        """Drop the markers that are not sent yet: after `close`, no thread would resend them."""
        self._producer.purge()
        self._producer.flush(1.0)

    def _produce(self, pending: _Pending) -> None:
        if self._lost is not None:
            self._report(pending, self._lost)
            return
        try:
            self._produce_to(
                pending.marker.queue_partition,
                encode_marker(pending.marker),
                lambda error, record: self._on_delivery(pending, error, record),
            )
        except BufferError:
            message = f"cannot write a marker to {self._topic}: the client's send buffer is full; check the broker"
            self._report(pending, KafkaClientError(message, code="_QUEUE_FULL", retriable=True))
        except KafkaException as error:
            self._on_delivery(pending, error.args[0])

    def _produce_to(
        self, partition: int, value: bytes, on_delivery: Callable[[KafkaError | None, Message], None]
    ) -> None:
        try:
            self._producer.produce(self._topic, value, partition=partition, on_delivery=on_delivery)
        except KafkaException as error:
            if error.args[0].name() != "_UNKNOWN_PARTITION" or not self._learn_partitions():
                raise
            self._producer.produce(self._topic, value, partition=partition, on_delivery=on_delivery)

    def _learn_partitions(self) -> bool:
        """Refresh the topic metadata: partitions were added, and the consumer has seen them before this client."""
        try:
            self._producer.list_topics(self._topic, timeout=METADATA_TIMEOUT_S)
        except KafkaException:
            return False
        return True

    def _on_delivery(self, pending: _Pending, error: KafkaError | None, record: Message | None = None) -> None:
        if error is None:
            place = None if record is None else place_of(record)
            if record is not None and place is not None:
                self._note_offset(record.partition() or 0, place[0])
            self._report(pending, self._lost, 0 if place is None else place[1])
            return
        if error.fatal() or error.name() == "_FATAL":
            self._is_broken = True
        self._report(pending, client_error(self._fatal or error, f"cannot write a marker to {self._topic}"))

    def _note_offset(self, partition: int, offset: int) -> None:
        last = self._last_offsets.get(partition, -1)
        self._last_offsets[partition] = offset
        if offset <= last:
            self.give_up(
                TopicError(
                    f"{self._topic} was deleted and created again: got offset {offset} in partition {partition} for a "
                    f"marker that was written after offset {last}; create a new consumer, what this one holds is gone"
                )
            )

    def _report(self, pending: _Pending, error: KmqError | None, appended_at_ms: int = 0) -> None:
        if pending.on_report is not None:
            pending.on_report(error, appended_at_ms)
            return
        if error is not None and (error.retriable or self._is_broken):
            self._retry_at = time.monotonic() + RETRY_PAUSE_S
            self._failed.append(pending)
            return
        if error is not None:
            logger.error("%s; its messages will be redelivered", error, extra={"action": "marker_failed"})
        with self._lock:
            self._unreported.pop(pending.number, None)
            if error is not None:
                self._errors.append(error)
            self._lock.notify_all()

    def _note_fatal(self, error: KafkaError) -> None:
        self._is_broken, self._fatal = True, error

    def _replace(self) -> None:
        """Replace the client after a fatal error. The old client's flush reports its undelivered markers as failed."""
        logger.warning("the marker producer had a fatal error and is replaced", extra={"action": "producer_replaced"})
        old, self._producer = self._producer, make_client(Producer, self._config)
        self._replace_at = time.monotonic() + REPLACE_PAUSE_S
        old.purge()
        serve_reports(old.flush, 1.0, self._note_fatal)
        self._is_broken, self._fatal = False, None
