"""
Read what a copier has sent, and check it: every line once, in order, under the right sequence.

Rule 1: no code of the producer is used here, and none of `kmq producer verify`: a plain consumer, and header names as
text.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from confluent_kafka import Consumer, KafkaError, TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

READ_TIMEOUT_S = 60.0
MOST_NAMED = 5


class Sent(NamedTuple):
    """One committed record of a queue topic."""

    partition: int
    offset: int
    line: int
    producer: str
    generation: int
    sequence: int


def line_of(number: int, length: int = 60) -> bytes:
    """Return a line of a file that is copied: its number first."""
    return (b"%08d " % number).ljust(length, b".") + b"\n"


def read_sent(bootstrap_servers: str, topic: str) -> list[Sent]:
    """
    Read every committed record of a topic, partition by partition.

    Raises:
        RuntimeError: The end was not reached in time.
    """
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers, "group.id": "kmq-faults-sequences",
            "isolation.level": "read_committed", "enable.auto.commit": False, "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
        }
    )  # fmt: skip
    try:
        partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
        consumer.assign([TopicPartition(topic, number, 0) for number in partitions])
        unread, until_s = set(partitions), time.monotonic() + READ_TIMEOUT_S
        found: list[Sent] = []
        while unread:
            if time.monotonic() > until_s:
                message = f"{topic} was not read to its end in {READ_TIMEOUT_S:g} s"
                raise RuntimeError(message)
            for record in consumer.consume(1_000, 0.2):
                error = record.error()
                if error is not None:
                    if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001  # librdkafka's public name for it
                        unread.discard(record.partition())
                    continue
                headers: dict[str, Any] = dict(record.headers() or [])
                value: Any = record.value()
                found.append(
                    Sent(
                        record.partition() or 0, record.offset() or 0, int(value[:8]),
                        headers["kmq-producer"].decode(), int(headers["kmq-generation"]), int(headers["kmq-sequence"]),
                    )
                )  # fmt: skip
        return sorted(found)
    finally:
        consumer.close()


def violations(sent: Iterable[Sent], lines: int) -> list[str]:
    """
    Return what is wrong with the copy of a file of so many lines, one message each; empty where nothing is.

    The sequence of a line is its number: one message a line, no line left out, none twice.
    """
    records = sorted(sent)
    counts = Counter(record.line for record in records)
    found: list[str] = []
    _note(found, "line missing", [line for line in range(1, lines + 1) if line not in counts])
    _note(found, "line sent twice", [line for line, count in counts.items() if count > 1])
    _note(found, "no such line", [line for line in counts if not 1 <= line <= lines])
    _note(found, "sequence is not the line's number", [each for each in records if each.sequence != each.line])
    _note(
        found,
        "out of order in its partition",
        [
            after
            for before, after in itertools.pairwise(records)
            if before.partition == after.partition and before.sequence >= after.sequence
        ],
    )
    by_sequence = sorted(records, key=lambda record: record.sequence)
    _note(
        found,
        "older life behind a newer one",
        [after for before, after in itertools.pairwise(by_sequence) if before.generation > after.generation],
    )
    return found


def _note(found: list[str], what: str, which: Sequence[object]) -> None:
    found += [f"{what}: {one}" for one in which[:MOST_NAMED]]
    if len(which) > MOST_NAMED:
        found.append(f"{what}: and {len(which) - MOST_NAMED} more")
