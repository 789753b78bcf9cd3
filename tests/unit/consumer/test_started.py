"""The columns of fetched records, and the leases on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Message
from hypothesis import given
from hypothesis import strategies as st

from kmq_spark.consumer.leases import Lease, LeaseTable, Outbox
from kmq_spark.consumer.started import StartedBatch, columns_of, create_leases
from kmq_spark.errors import KafkaClientError
from kmq_spark.kafka.clock import now_s

if TYPE_CHECKING:
    from collections.abc import Sequence

PLACES = st.lists(
    st.tuples(st.integers(0, 2), st.sets(st.integers(0, 12), min_size=1).map(sorted)),
    min_size=1,
    max_size=3,
    unique_by=lambda place: place[0],
).map(lambda places: [(partition, offset) for partition, offsets in places for offset in offsets])
"""Partition and offset of each record, as a client returns them: partitions one after the other, offsets ascend."""


HOUR_LATER = now_s() + 3_600


def records_at(places: list[tuple[int, int]]) -> list[Message]:
    """Return records at these places."""
    return [Message(topic="orders", partition=partition, offset=offset, value=b"v") for partition, offset in places]


def new_lease(queue_partition: int, delivery_count: int, offsets: Sequence[int], sizes: list[int]) -> Lease:
    """Return a lease of an hour."""
    return Lease(
        Outbox(queue_partition), delivery_count, set(), renewed_at=0.0, ends_at=HOUR_LATER, limit_at=HOUR_LATER,
        offsets=offsets, sizes=sizes, is_whole=True,
    )  # fmt: skip


@given(PLACES)
def test_leases_hold_each_record_once(places: list[tuple[int, int]]) -> None:
    columns = columns_of(records_at(places), [1] * len(places))
    batch, leases = create_leases(columns, None, new_lease)
    held = sorted((lease.queue_partition, offset) for lease in leases for offset in lease.held_offsets())
    assert held == sorted(places)
    assert [(message.id.queue_partition, message.id.message_offset) for message in batch] == places
    started = StartedBatch(columns, batch, leases, LeaseTable())
    first, after_last = started.first_offsets, started.next_offsets
    for partition in {partition for partition, _ in places}:
        offsets = [offset for each, offset in places if each == partition]
        assert (first[partition], after_last[partition]) == (offsets[0], offsets[-1] + 1)


@pytest.mark.parametrize(("offsets", "range_count"), [(range(100, 600), 1), ([100, 102, 103], 0)])
def test_whole_lease_is_acknowledged_as_one_range_unless_it_has_a_gap(offsets: Sequence[int], range_count: int) -> None:
    columns = columns_of(records_at([(0, offset) for offset in offsets]), [1] * len(offsets))
    batch, (lease,) = create_leases(columns, None, new_lease)
    batch.ack()
    ranges, single = lease.outbox.acked_ranges, lease.outbox.acked
    assert [offset for first, count in ranges for offset in range(first, first + count)] + single == list(offsets)
    assert (lease.held_count, len(ranges)) == (0, range_count)


def started_batch(table: LeaseTable) -> StartedBatch:
    """Return a batch of three messages of each of two partitions, which waits for its two STARTs."""
    columns = columns_of(records_at([(partition, offset) for partition in (0, 1) for offset in (5, 6, 7)]), [1] * 6)
    batch = StartedBatch(columns, *create_leases(columns, None, new_lease), table)
    batch.expect(2)
    return batch


def test_leases_are_open_from_the_last_report_on() -> None:
    table = LeaseTable()
    batch = started_batch(table)
    first, second = batch.leases
    batch.on_report_of(first)(None, 1_000)
    assert (table.held_count(0.0), batch.waiting_count, batch.wait(0)) == (0, 6, False)
    batch.on_report_of(second)(None, 2_000)
    assert (table.held_count(0.0), batch.waiting_count, batch.wait(0)) == (6, 0, True)
    assert (first.started_at_ms, second.started_at_ms) == (1_000, 2_000)


def test_leases_of_a_batch_of_which_a_start_failed_are_never_open() -> None:
    table = LeaseTable()
    batch = started_batch(table)
    batch.on_report_of(batch.leases[0])(KafkaClientError("no broker", code="_TIMED_OUT"), 0)
    batch.on_report_of(batch.leases[1])(None, 2_000)
    assert (table.held_count(0.0), batch.error is None) == (0, False)


@pytest.mark.parametrize("is_given_back", [True, False])
def test_dropped_partition_is_not_handed_out_and_released_where_it_was_committed(*, is_given_back: bool) -> None:
    batch = started_batch(LeaseTable())
    batch.drop({1}, is_given_back=is_given_back)
    batch.drop({1})
    assert (batch.first_offsets, batch.next_offsets) == ({0: 5}, {0: 8})
    assert [message.id.queue_partition for message in batch.content._leased(0.0)] == [0, 0, 0]
    released = [(each.message_offset, each.never_handed_out) for each in batch.leases[1].outbox.others]
    assert released == [(offset, True) for offset in (5, 6, 7) if is_given_back]
