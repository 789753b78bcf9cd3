"""
Read a topic from given positions to its present end, or what is committed in it up to its high watermark.

Rule 1: `read_committed`: records of aborted transactions are not returned. No consumer group is joined, nothing is
committed.
Rule 2: a position also moves past the control records of transactions, so that nothing is read twice.
Rule 3: a time-out counts the wait for the broker only, and not what the caller does between two records.

Source: KIP-98, "read_committed" and the last stable offset.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from kmq_spark.errors import KafkaClientError
from kmq_spark.kafka.client_errors import MISSING, client_error
from kmq_spark.kafka.lookups import bounds_of
from kmq_spark.kafka.settings import make_client

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping

    from confluent_kafka import Message

READ_AT_ONCE = 1_000

LSO_WAIT_S = 60.0
"""How long an open transaction is waited for; the broker aborts it after its time-out."""

PAUSE_S = 0.02

TIMEOUT_S = 15.0

_PERMANENT = MISSING - {"_UNKNOWN_PARTITION"} | {"TOPIC_AUTHORIZATION_FAILED"}


class LogReader:
    """Reads one topic; `positions` has the next offset to read, by partition. Nothing is sent before the first read."""

    def __init__(self, config: Mapping[str, Any], topic: str, timeout: float) -> None:
        self._consumer = make_client(
            Consumer, {**config, "enable.partition.eof": True, "auto.offset.reset": "earliest"}
        )
        self._topic = topic
        self._timeout = timeout
        self.positions: dict[int, int] = {}

    @property
    def client(self) -> Consumer:
        """The client, which a child process must not use."""
        return self._consumer

    def close(self) -> None:
        """Close the client."""
        self._consumer.close()

    def read(self, starts: Mapping[int, int]) -> Generator[Message]:
        """
        Yield every committed record from these offsets to the end of their partitions; the partitions are mixed.

        If retention removed an offset, reading starts at the beginning of the log.
        """
        if not starts:
            return
        unread = set(starts)
        self.positions |= starts
        self._consumer.assign([TopicPartition(self._topic, partition, offset) for partition, offset in starts.items()])
        try:
            last_record_at_s = time.monotonic()
            while unread:
                # `consume` waits until it has as many records as requested: request one, then those that are already
                # fetched.
                records = self._consumer.consume(1, 0.1)
                if records:
                    records += self._consumer.consume(READ_AT_ONCE, 0)
                for record in records:
                    if record.partition() in starts and self._is_record(record, unread):
                        yield record
                        last_record_at_s = time.monotonic()
                if unread and time.monotonic() - last_record_at_s > self._timeout:
                    raise _too_late(
                        self._topic,
                        f"got nothing for {self._timeout:g} s; check the broker, or raise [kafka] timeout",
                    )
        except KafkaException as error:
            raise client_error(error, f"cannot read {self._topic}") from error
        finally:
            self._consumer.unassign()

    def _is_record(self, record: Message, unread: set[int]) -> bool:
        error, partition, offset = record.error(), record.partition(), record.offset()
        if error is None:
            self.positions[partition or 0] = (offset or 0) + 1
            return True
        if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001  # librdkafka's public name for it
            unread.discard(-1 if partition is None else partition)
            self.positions[partition or 0] = offset or 0
        elif not error.retriable() and error.name() in _PERMANENT:
            raise KafkaException(error)
        # Other errors are temporary. If not, the time-out above reports them.
        return False


def read_committed(
    config: Mapping[str, Any],
    topic: str,
    partitions: Iterable[int],
    timeout: float = TIMEOUT_S,
    *,
    starts: Mapping[int, int] | None = None,
    ends: Mapping[int, int] | None = None,
    patience_s: float | None = None,
) -> Iterator[Message]:
    """
    Yield every record of a topic that is committed by now, and perhaps some of what is committed later.

    The end is that of *ends*, or the high watermark at the start, not the last stable offset: what is committed behind
    an open transaction of another producer would be missed. Its end is waited for. With *patience_s*, what lies behind
    it after that time is left out; without, that is an error.
    """
    positions, ends = _span(config, topic, partitions, timeout, starts=starts or {}, ends=ends)
    reader = LogReader(config, topic, timeout)
    until_s = time.monotonic() + (max(LSO_WAIT_S, timeout) if patience_s is None else patience_s)
    try:
        while left := {number: at for number, at in positions.items() if at < ends[number]}:
            yield from reader.read(left)
            has_moved = any(reader.positions[number] > at for number, at in left.items())
            positions |= {number: reader.positions[number] for number in left}
            if has_moved:
                continue
            if time.monotonic() > until_s and patience_s is not None:
                return
            if time.monotonic() > until_s:
                number, at = min(left.items())
                raise _too_late(
                    topic,
                    f"got offset {at} of {ends[number]} in partition {number}, a transaction is open; wait until "
                    "the broker has aborted it, or find it with `kafka-transactions.sh find-hanging`",
                )
            time.sleep(PAUSE_S)
    finally:
        reader.close()


def _span(
    config: Mapping[str, Any],
    topic: str,
    partitions: Iterable[int],
    timeout: float,
    *,
    starts: Mapping[int, int],
    ends: Mapping[int, int] | None,
) -> tuple[dict[int, int], Mapping[int, int]]:
    """Return where to begin and where to end."""
    if ends is not None:
        return {number: starts.get(number, 0) for number in partitions}, ends
    # Asked before reading: what is committed by now lies below it. With `read_committed`, the client would return the
    # last stable offset.
    client = make_client(Consumer, {**config, "isolation.level": "read_uncommitted"})
    try:
        bounds = {number: bounds_of(client, TopicPartition(topic, number), timeout) for number in partitions}
    finally:
        client.close()
    # An offset past the end belongs to a topic that was deleted and created again.
    begin = {
        number: max(starts.get(number, 0), first) if starts.get(number, 0) <= end else first
        for number, (first, end) in bounds.items()
    }
    return begin, {number: end for number, (_, end) in bounds.items()}


def _too_late(topic: str, why: str) -> KafkaClientError:
    return KafkaClientError(f"cannot read {topic} to its end: {why}", code="_TIMED_OUT", retriable=True)
