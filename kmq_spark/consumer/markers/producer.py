"""
Send markers, tell their fate once, and send those again that must not be lost.

Rule 1: a message's markers go to the markers partition equal to its queue partition.
Rule 2: a START or a KEEPALIVE is sent once: its time has passed when it fails.
Rule 3: an END or a release is sent again as long as the consumer lives: late is better than never, and one that the
tracker does not know is ignored.
Rule 4: an idempotent producer that has failed for good is replaced; what it had not delivered counts as failed.

Source: librdkafka INTRODUCTION.md, "Idempotent Producer", for what a fatal error is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError, KafkaException, Producer

from kmq_spark.errors import KafkaClientError, KmqError
from kmq_spark.kafka.settings import client_error, make_client
from kmq_spark.wire.codec import encode_marker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from confluent_kafka import Message

    from kmq_spark.core.markers import Marker

    OnReport = Callable[[KmqError | None, int], None]

logger = logging.getLogger(__name__)

_LOG_APPEND_TIME = 2
"""The kind of a time stamp that the broker has given; any other is the clock of this host, and not to be used."""

RETRY_PAUSE_S = 0.2
"""Pause before failed markers are sent again; the client has retried for `delivery.timeout.ms` already."""

METADATA_TIMEOUT_S = 5.0
"""How long the broker may take to tell the partitions of a grown topic."""


@dataclass(slots=True, eq=False)
class _Pending:
    """A marker on its way; `number` is 0 for one that is sent once."""

    marker: Marker
    on_report: OnReport | None = None
    number: int = 0


class MarkerProducer:
    """
    Sends markers; safe for many threads, reports are served by whoever calls `serve`.

    Args:
        config: librdkafka settings of the producer.
        topic: Markers topic.
    """

    def __init__(self, config: Mapping[str, Any], topic: str) -> None:
        """Make the client; nothing is sent yet."""
        self._config = dict(config)
        self._topic = topic
        self._producer = make_client(Producer, self._config)
        self._lock = threading.Condition()
        self._last_number = 0
        self._unreported: set[int] = set()
        self._failed: deque[_Pending] = deque()
        self._errors: list[KmqError] = []
        self._retry_at = 0.0
        self._is_broken = False

    @property
    def client(self) -> Producer:
        """The client, for metadata, and to be left alone in a child process."""
        return self._producer

    @property
    def is_waiting(self) -> bool:
        """Whether a marker that must not be lost has no report yet."""
        return bool(self._unreported)

    def send(self, marker: Marker, on_report: OnReport) -> None:
        """
        Send a marker once.

        Args:
            marker: START or KEEPALIVE.
            on_report: Called once, when it is durable (None) or has failed, by this thread or one that serves reports;
                with it the append time of the marker, epoch milliseconds, broker clock, 0 where it is not known.
        """
        self._produce(_Pending(marker, on_report))

    def send_until_durable(self, marker: Marker) -> None:
        """Send a marker, again when it fails; an error that no repetition mends is kept for `wait`."""
        with self._lock:
            self._last_number += 1
            number = self._last_number
            self._unreported.add(number)
        self._produce(_Pending(marker, number=number))

    def serve(self, timeout: float) -> None:
        """Serve reports for at most *timeout* seconds, and send again what has failed."""
        self._producer.poll(timeout)
        if self._is_broken:
            self._replace()
        if self._failed and time.monotonic() >= self._retry_at:
            for _ in range(len(self._failed)):
                self._produce(self._failed.popleft())

    def wait(self, timeout: float) -> None:
        """
        Wait until every marker of `send_until_durable` so far is durable; another thread serves the reports.

        Args:
            timeout: Seconds.

        Raises:
            KmqError: A marker could not be written; the first such error since the last call.
            KafkaClientError: It took longer.
        """
        left = self.wait_for_reports(timeout)
        with self._lock:
            errors, self._errors = self._errors, []
        if errors:
            raise errors[0]
        if left:
            message = (
                f"cannot write the last markers to {self._topic}: got no answer for {left} within {timeout:g} s; "
                "check the broker, what was settled may be delivered again"
            )
            raise KafkaClientError(message, code="_TIMED_OUT", retriable=True)

    def wait_for_reports(self, timeout: float) -> int:
        """
        Wait until every marker of `send_until_durable` so far is durable or has failed for good.

        Args:
            timeout: Seconds.

        Returns:
            How many are neither by then.
        """
        with self._lock:
            last = self._last_number
            self._lock.wait_for(lambda: not any(number <= last for number in self._unreported), timeout)
            return sum(number <= last for number in self._unreported)

    def close(self) -> None:
        """Drop what has not left yet: nobody would own its retries."""
        self._producer.purge()
        self._producer.flush(1.0)

    def _produce(self, pending: _Pending, *, is_first: bool = True) -> None:
        try:
            self._producer.produce(
                self._topic,
                encode_marker(pending.marker),
                partition=pending.marker.queue_partition,
                on_delivery=lambda error, record: self._on_delivery(pending, error, record),
            )
        except BufferError:
            message = f"cannot write a marker to {self._topic}: the client's queue is full; check the broker"
            self._report(pending, KafkaClientError(message, code="_QUEUE_FULL", retriable=True))
        except KafkaException as error:
            if is_first and error.args[0].name() == "_UNKNOWN_PARTITION" and self._learn_partitions():
                self._produce(pending, is_first=False)
            else:
                self._on_delivery(pending, error.args[0])

    def _learn_partitions(self) -> bool:
        """Ask the broker for the topic anew: the queue has grown, and its consumer has seen that before this client."""
        try:
            self._producer.list_topics(self._topic, timeout=METADATA_TIMEOUT_S)
        except KafkaException:
            return False
        return True

    def _on_delivery(self, pending: _Pending, error: KafkaError | None, record: Message | None = None) -> None:
        if error is None:
            kind, at_ms = record.timestamp() if record is not None and pending.on_report is not None else (0, 0)
            self._report(pending, None, at_ms if kind == _LOG_APPEND_TIME else 0)
            return
        if error.fatal() or error.name() == "_FATAL":
            self._is_broken = True
        self._report(pending, client_error(error, f"cannot write a marker to {self._topic}"))

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
            self._unreported.discard(pending.number)
            if error is not None:
                self._errors.append(error)
            self._lock.notify_all()

    def _replace(self) -> None:
        """Make a new client after a fatal error; the old one reports what it had not delivered while it is flushed."""
        logger.warning("the producer of markers failed for good and is replaced", extra={"action": "producer_replaced"})
        old, self._producer = self._producer, make_client(Producer, self._config)
        old.purge()
        old.flush(1.0)
        self._is_broken = False
