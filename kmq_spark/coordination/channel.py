"""
The Kafka side of a member: one reader and one writer of the group's partition.

Rule 1: records are appended in the order in which they were written: one idempotent producer, one partition.
Rule 2: a reader that retention has overtaken gets an error; it never skips records.
Rule 3: a closed channel refers to no client, so that librdkafka's threads end before the garbage collector runs.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, Consumer, KafkaError, KafkaException, Producer, TopicPartition

from kmq_spark.coordination.topic import missing_topic, partition_of
from kmq_spark.core.coordination.records import MAX_HEARTBEAT_MS
from kmq_spark.errors import KafkaClientError, TopicError, UsageError
from kmq_spark.kafka.client_errors import client_error, unreachable
from kmq_spark.kafka.lookups import bounds_of
from kmq_spark.kafka.settings import make_client, marker_producer_config, reader_config
from kmq_spark.wire.coordination_log import GroupLog

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kmq_spark.errors import KmqError

logger = logging.getLogger(__name__)

READ_AT_ONCE = 1_000
"""Records taken from the client in one call."""

READ_BACK = 30_000
"""Number of records that a new member reads from the end. The leader writes a snapshot more often than that."""

LONGEST_SILENCE_S = MAX_HEARTBEAT_MS // 1000 + 5
"""A live member writes several heartbeats within this time, whatever its T."""

_FLUSH_S = 0.05
_POLL_S = 0.1
_CHECK_EVERY_S, _CHECK_TIMEOUT_S = 30.0, 0.1
"""Interval at which a member checks the partition count of the topic, and the timeout of that check."""


class LoggedBytes(NamedTuple):
    """One record of the partition, with its append time on the broker's clock."""

    offset: int
    append_time_ms: int
    key: bytes | None
    value: bytes | None


class Channel:
    """
    Reader and writer of a group's partition.

    `partition` is -1 before `open`. `failure`: error that ended the channel. `trouble`: text of the newest temporary
    failure.
    """

    def __init__(
        self,
        topic: str,
        group: str,
        bootstrap_servers: str,
        client_id: str,
        *,
        delivery_timeout_ms: int,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        self.topic, self.partition = topic, -1
        self.failure: KmqError | None = None
        self.trouble = ""
        self._group, self._key = group, group.encode()
        self._partition_count, self._checked_s = 0, time.monotonic()
        self._bootstrap_servers = bootstrap_servers
        reader = reader_config(bootstrap_servers, f"kmq.coordination.{group}", client_id, extra)
        reader.update(
            {
                # The broker answers at once when there is a record; an idle group costs a request in 200 ms.
                "fetch.wait.max.ms": 200,
                # A leader that moves is found again within T.
                "fetch.error.backoff.ms": 50,
                "auto.offset.reset": "error",
            }
        )
        self._reader: Consumer | None = make_client(Consumer, reader)
        # Made with the first record: an idempotent producer of a user who may only read ends with a fatal error.
        self._writer: Producer | None = None
        self._writer_config = marker_producer_config(
            bootstrap_servers, client_id, extra, delivery_timeout_ms=delivery_timeout_ms
        )

    def open(self, timeout_s: float) -> tuple[int, int]:
        """Find the group's partition; return its first offset and its end."""
        try:
            self._partition_count = self._count(timeout_s)
        except KafkaException as error:
            raise unreachable(error, self._open_reader(), self._bootstrap_servers) from error
        if not self._partition_count:
            raise TopicError(missing_topic(self.topic))
        self.partition = partition_of(self._group, self._partition_count)
        place = TopicPartition(self.topic, self.partition)
        return bounds_of(self._open_reader(), place, timeout_s)

    def seek(self, offset: int) -> None:
        """Read from an offset on."""
        self._open_reader().assign([TopicPartition(self.topic, self.partition, offset)])

    def read(self, timeout_s: float) -> list[LoggedBytes]:
        """Return records that have arrived, in order; wait for the first one."""
        reader = self._open_reader()
        first = reader.poll(timeout_s)
        if first is None:
            return []
        return [
            read
            for message in [first, *reader.consume(READ_AT_ONCE, 0)]
            if (read := self._read_of(message)) is not None
        ]

    def write(self, value: bytes) -> None:
        """Pass a record to the client. Its queue is full if nothing was delivered for a long time."""
        self._open_reader()  # else a late record would make a producer that is never closed
        writer = self._writer
        if writer is None:
            writer = self._writer = make_client(Producer, self._writer_config)
        try:
            writer.produce(self.topic, value, self._key, partition=self.partition, on_delivery=self._delivered)
        except (BufferError, KafkaException) as error:
            cause = error.args[0]
            if isinstance(cause, KafkaError):
                raise client_error(cause, f"cannot write to {self.topic}") from error
            message = f"cannot write to {self.topic}: {error}; check the broker"
            raise KafkaClientError(message, code="_QUEUE_FULL", retriable=True) from error

    def serve(self) -> None:
        """Take the answers to what was written; now and then, check the topic."""
        writer = self._writer
        if writer is not None:
            try:
                writer.poll(0)
            except KafkaException as error:  # it is fatal: others come with the delivery of a record
                self.failure = self.failure or client_error(error, f"cannot write to {self.topic}")
        if time.monotonic() - self._checked_s > _CHECK_EVERY_S:
            self._checked_s = time.monotonic()
            self._check_partition_count()

    def flush(self, timeout_s: float) -> None:
        """Wait until everything has an answer, at most so long."""
        if self.failure is None and self._writer is not None:
            self._writer.flush(timeout_s)

    def close(self) -> None:
        """End the clients and their threads; what has no answer is given up. A second call does nothing."""
        reader, writer, self._reader, self._writer = self._reader, self._writer, None, None
        if writer is not None:
            writer.purge()
            if self.failure is None:  # after a fatal error confluent-kafka's flush raises SystemError
                writer.flush(_FLUSH_S)
            # A producer ends with its last reference. Its own `close` flushes without a timeout.
            del writer
        if reader is not None:
            reader.close()

    def _open_reader(self) -> Consumer:
        """Return the reader, unless the channel was closed."""
        if self._reader is None:
            message = f"coordinator of group {self._group!r} was closed: got a call after that; make a new one"
            raise UsageError(message)
        return self._reader

    def _count(self, timeout_s: float) -> int:
        """Return the number of partitions of the topic, 0 if it does not exist."""
        metadata = self._open_reader().list_topics(self.topic, timeout=timeout_s).topics.get(self.topic)
        return 0 if metadata is None or metadata.error is not None else len(metadata.partitions)

    def _check_partition_count(self) -> None:
        """End if the number of partitions has changed: new members would look for the group in another one."""
        try:
            count = self._count(_CHECK_TIMEOUT_S)
        except KafkaException:
            return
        if count and count != self._partition_count:
            self.failure = self.failure or TopicError(
                f"topic {self.topic!r} has another number of partitions: got {count}, it had {self._partition_count}; "
                "stop all members of all groups, then start them again"
            )

    def _read_of(self, message: Any) -> LoggedBytes | None:  # noqa: ANN401  # a record of the client
        error = message.error()
        if error is not None:
            self._note(error, f"cannot read {self.topic}")
            return None
        kind, append_time_ms = message.timestamp()
        if kind != TIMESTAMP_LOG_APPEND_TIME:
            self.failure = self.failure or TopicError(
                f"topic {self.topic!r} has message.timestamp.type=CreateTime at offset {message.offset()}, must be "
                "LogAppendTime: the clocks of hosts must not decide who is stale; set it and restart the members"
            )
        return LoggedBytes(message.offset(), append_time_ms, message.key(), message.value())

    def _delivered(self, error: KafkaError | None, _: object) -> None:
        if error is not None:
            self._note(error, f"cannot write to {self.topic}")

    def _note(self, error: KafkaError, doing: str) -> None:
        """Keep a failure: one that ends the client, or one that may pass."""
        if error.code() == KafkaError._AUTO_OFFSET_RESET:  # noqa: SLF001  # librdkafka's public name for it
            self.failure = self.failure or KafkaClientError(
                f"{doing}: records were deleted before they were read; join the group again", code=error.name()
            )
        elif error.fatal() or error.code() == KafkaError._FATAL:  # noqa: SLF001  # as above
            self.failure = self.failure or client_error(error, doing)
        else:
            self.trouble = f"{doing}: {error.str()} ({error.name()})"


def read_group_log(channel: Channel, group: str, until_s: float) -> GroupLog:
    """
    Read the group's partition to its end: a new member must know the state of the group before it writes.

    Start near the end of the partition; if there is no snapshot, start at its first record. If that is not the first
    record of all, a member may know more: wait for the snapshot that a leader writes when it begins to lead, or until
    no member has written for the longest T. The channel then continues after the last record.
    """
    first, end = channel.open(max(0.1, until_s - time.monotonic()))
    start = max(first, end - READ_BACK)
    log = _read_from(channel, group, start, end, until_s)
    if not log.is_complete and start > first:
        log = _read_from(channel, group, first, end, until_s)
    heard_s = time.monotonic()
    while not (log.is_complete or log.is_alone or time.monotonic() - heard_s > LONGEST_SILENCE_S):
        if _read_once(channel, log):
            heard_s = time.monotonic()
        advice = f"check that its leader runs; if all members are dead, join with timeout above {LONGEST_SILENCE_S}"
        _check_time(until_s, channel, f"no snapshot of group {group!r} was found", advice)
    if not log.is_complete:
        logger.warning(
            "no snapshot of group %s was found, and %s begins at offset %d: a new group, or its tasks and positions "
            "were deleted, since it had no member for longer than the topic's retention",
            group, channel.topic, first, extra={"action": "group_not_found"},
        )  # fmt: skip
        log.accept()
    return log


def _read_from(channel: Channel, group: str, start: int, end: int, until_s: float) -> GroupLog:
    log = GroupLog(group, topic=channel.topic, partition=channel.partition, first_offset=start)
    channel.seek(start)
    while log.world.next_offset < end:
        _read_once(channel, log)
        place = f"offset {log.world.next_offset} of {end}"
        _check_time(until_s, channel, f"cannot read {channel.topic} to its end: got to {place}", "check the broker")
    return log


def _read_once(channel: Channel, log: GroupLog) -> bool:
    """Read what has arrived; return whether a record of the group was among it."""
    is_heard = False
    for one in channel.read(_POLL_S):
        log.read(one.offset, one.append_time_ms, one.key, one.value)
        is_heard = is_heard or log.record is not None
    return is_heard


def _check_time(until_s: float, channel: Channel, what: str, advice: str) -> None:
    if channel.failure is not None:
        raise channel.failure
    if time.monotonic() > until_s:
        trouble = f" ({channel.trouble})" if channel.trouble else ""
        raise KafkaClientError(f"{what}{trouble}; {advice}", code="_TIMED_OUT", retriable=True)
