"""
Write an own record, then read a log up to it: what stands below cannot change any more.

Rule 1: the end that a broker answers is not asked for. It may be old: a leader that was suspended and deposed answers
from its log as it was. A record that was acknowledged with an offset stands there; without one it is written again.
Rule 2: a new producer with the same transactional id ends every older transaction, and each is written as committed or
aborted, before it can write its own record. So whatever older producers committed stands below.

Source: Marshal, which claims a partition with a record and reads the log up to it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kmq_spark.errors import KafkaClientError
from kmq_spark.kafka.records import OutgoingRecord
from kmq_spark.kafka.transaction import ATTEMPTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from confluent_kafka import KafkaError, Message

    from kmq_spark.kafka.transaction import TransactionalProducer


def own_tombstone(topic: str) -> OutgoingRecord:
    """Return an own record of a compacted topic: one that deletes the empty key, which no record of ours has."""
    return OutgoingRecord(topic, 0, b"", None, [])


def write_own(producer: TransactionalProducer, records: Iterable[OutgoingRecord]) -> dict[int, int]:
    """
    Commit one record in each partition of a topic. Return the offset behind each, by partition: `read_committed` takes
    them as *ends*.

    Raises:
        FencedError: A newer producer has the transactional id.
        KafkaClientError: The broker cannot be reached, or refuses a record.
    """
    ends: dict[int, int] = {}
    records = list(records)

    def note(partition: int, error: KafkaError | None, sent: Message) -> None:
        offset = sent.offset()
        if error is None and offset is not None:
            ends[partition] = offset + 1

    def work() -> None:
        ends.clear()
        for record in records:
            producer.send(record, partial(note, record.partition))

    for _ in range(ATTEMPTS):
        producer.run(work)
        if len(ends) == len(records):
            return ends
    # The first record of a batch has no offset where the broker did not say it.
    message = (
        f"cannot read {records[0].topic}: got no offset for an own record, in {ATTEMPTS} attempts; check the broker"
    )
    raise KafkaClientError(message, code="_NO_OFFSET", retriable=True)
