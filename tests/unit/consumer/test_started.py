"""The columns of fetched records, and the leases on them."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Message
from hypothesis import given
from hypothesis import strategies as st

from kmq_spark.consumer.leases import LeaseTable
from kmq_spark.consumer.started import LeaseParameters, columns_of, create_leases, offset_bounds

if TYPE_CHECKING:
    from collections.abc import Sequence

PLACES = st.lists(
    st.tuples(st.integers(0, 2), st.sets(st.integers(0, 12), min_size=1).map(sorted)),
    min_size=1,
    max_size=3,
    unique_by=lambda place: place[0],
).map(lambda places: [(partition, offset) for partition, offsets in places for offset in offsets])
"""Partition and offset of each record, as a client returns them: partitions one after the other, offsets ascend."""


def records_at(places: list[tuple[int, int]]) -> list[Message]:
    """Return records at these places."""
    return [Message(topic="orders", partition=partition, offset=offset, value=b"v") for partition, offset in places]


@given(PLACES)
def test_columns_have_the_offset_of_each_record_with_gaps_and_without(places: list[tuple[int, int]]) -> None:
    columns = columns_of(records_at(places), [1] * len(places))
    assert list(zip(columns.partitions, columns.offsets, strict=True)) == places


@given(PLACES)
def test_leases_hold_each_record_once(places: list[tuple[int, int]]) -> None:
    columns = columns_of(records_at(places), [1] * len(places))
    batch, leases = create_leases(columns, None, LeaseParameters(LeaseTable(), monotonic(), 30.0, 60.0))
    held = sorted((lease.queue_partition, offset) for lease in leases for offset in lease.held_offsets())
    assert held == sorted(places)
    assert [(message.id.queue_partition, message.id.message_offset) for message in batch] == places
    first, after_last = offset_bounds(columns)
    for partition in {partition for partition, _ in places}:
        offsets = [offset for each, offset in places if each == partition]
        assert (first[partition], after_last[partition]) == (offsets[0], offsets[-1] + 1)


@pytest.mark.parametrize(("offsets", "range_count"), [(range(100, 600), 1), ([100, 102, 103], 0)])
def test_whole_lease_is_acknowledged_as_one_range_unless_it_has_a_gap(offsets: Sequence[int], range_count: int) -> None:
    columns = columns_of(records_at([(0, offset) for offset in offsets]), [1] * len(offsets))
    batch, (lease,) = create_leases(columns, None, LeaseParameters(LeaseTable(), monotonic(), 30.0, 60.0))
    batch.ack()
    ranges, single = lease.outbox.take_acked_ranges(), lease.outbox.take_acked()
    assert [offset for first, count in ranges for offset in range(first, first + count)] + single == list(offsets)
    assert (lease.held_count, len(ranges)) == (0, range_count)
