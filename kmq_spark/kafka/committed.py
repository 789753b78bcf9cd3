"""
Read what is committed in a topic up to its high watermark.

Rule 1: the end is the high watermark at the start, not the last stable offset: an open transaction of another producer
holds the last stable offset back, and what is committed behind it would be missed. Its end is waited for.

Source: KIP-98, "read_committed" and the last stable offset.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, TopicPartition

from kmq_spark.errors import KafkaClientError
from kmq_spark.kafka.log_reader import LogReader
from kmq_spark.kafka.lookups import bounds_of
from kmq_spark.kafka.settings import make_client

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from confluent_kafka import Message

    from kmq_spark.kafka.lookups import Bounds

LSO_WAIT_S = 60.0
"""How long an open transaction is waited for; the broker aborts it after its time-out."""

PAUSE_S = 0.02

TIMEOUT_S = 15.0


def all_bounds_of(
    config: Mapping[str, Any], topic: str, partitions: Iterable[int], timeout: float
) -> dict[int, Bounds]:
    """
    Return first offset and high watermark of each partition.

    Args:
        config: librdkafka settings of a reader, see `settings.reader_config`.
        topic: The topic.
        partitions: Its partitions.
        timeout: Bound on each call.

    Raises:
        KmqError: The topic does not exist or may not be read, or the broker cannot be reached in time.
    """
    # With `read_committed` the end would be the last stable offset.
    client = make_client(Consumer, {**config, "isolation.level": "read_uncommitted"})
    try:
        return {number: bounds_of(client, TopicPartition(topic, number), timeout) for number in partitions}
    finally:
        client.close()


def read_committed(
    config: Mapping[str, Any],
    topic: str,
    partitions: Iterable[int],
    timeout: float = TIMEOUT_S,
    *,
    starts: Mapping[int, int] | None = None,
    patience_s: float | None = None,
) -> Iterator[Message]:
    """
    Yield every record of a topic that is committed by now.

    Args:
        config: librdkafka settings of a reader, see `settings.reader_config`.
        topic: The topic.
        partitions: Its partitions.
        timeout: Bound on each call, and on how long nothing may arrive.
        starts: First offset to read, by partition; the first that is there for partitions without one.
        patience_s: After this time what lies behind an open transaction is left out; None: that is an error, later.

    Yields:
        Records, in order within a partition, partitions mixed; some of what was committed later may be among them.

    Raises:
        KmqError: The topic does not exist or may not be read, the broker cannot be reached in time, or an open
            transaction was not ended in time.
    """
    # Asked before reading: what is committed by now lies below it.
    bounds = all_bounds_of(config, topic, partitions, timeout)
    positions = {number: _start_of(each, (starts or {}).get(number, 0)) for number, each in bounds.items()}
    reader = LogReader(config, topic, timeout)
    wait_s = max(LSO_WAIT_S, timeout) if patience_s is None else patience_s
    until_s = time.monotonic() + wait_s
    try:
        while left := {number: at for number, at in positions.items() if at < bounds[number].end}:
            yield from reader.read(left)
            has_moved = any(reader.positions[number] > at for number, at in left.items())
            positions |= {number: reader.positions[number] for number in left}
            if has_moved:
                continue
            if time.monotonic() > until_s and patience_s is not None:
                return
            if time.monotonic() > until_s:
                number, at = min(left.items())
                message = (
                    f"cannot read {topic} to its end: got offset {at} of {bounds[number].end} in partition {number}, "
                    "a transaction is open; wait until the broker has aborted it, or find it with "
                    "`kafka-transactions.sh find-hanging`"
                )
                raise KafkaClientError(message, code="_TIMED_OUT", retriable=True)
            time.sleep(PAUSE_S)
    finally:
        reader.close()


def _start_of(bounds: Bounds, wanted: int) -> int:
    """Return where to begin: an offset past the end belongs to a topic that was deleted and created again."""
    return max(wanted, bounds.first) if wanted <= bounds.end else bounds.first
