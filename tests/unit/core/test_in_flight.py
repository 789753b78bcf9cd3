"""The packed table and its helpers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kmq_spark.core.in_flight import Columns, InFlight, message_keys, ranges_of
from kmq_spark.core.markers import MAX_MESSAGE_OFFSET, MAX_QUEUE_PARTITION, OffsetRange


def columns(*keys: int) -> Columns:
    """Return rows that differ in every column."""
    key = np.array(keys, dtype=np.int64)
    return Columns(key, key * 10, key * 100, key * 1_000, key % 2 == 1)


def test_ranges_cover_runs_of_offsets() -> None:
    """Neighbours share a range."""
    offsets = np.array([3, 4, 5, 9, 11, 12], dtype=np.int64)
    assert (OffsetRange(3, 3), OffsetRange(9, 1), OffsetRange(11, 2)) == ranges_of(offsets)


def test_no_offsets_give_no_ranges() -> None:
    """As the codec refuses a marker without messages, the caller writes none."""
    assert ranges_of(np.empty(0, dtype=np.int64)) == ()


@given(st.sets(st.integers(0, 60)))
def test_ranges_cover_exactly_their_offsets(offsets: set[int]) -> None:
    """Ascending, and as few as possible."""
    ranges = ranges_of(np.array(sorted(offsets), dtype=np.int64))
    assert [offset for first, count in ranges for offset in range(first, first + count)] == sorted(offsets)
    assert all(later.first > first + count for (first, count), later in pairwise(ranges))


def test_keys_order_messages_by_partition_then_offset() -> None:
    """The largest message of all still fits into an int64."""
    last = np.array([MAX_MESSAGE_OFFSET], dtype=np.int64)
    assert message_keys(0, last)[0] + 1 == message_keys(1, np.array([0], dtype=np.int64))[0]
    assert message_keys(MAX_QUEUE_PARTITION, last)[0] == 2**63 - 1


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)))
def test_merged_rows_are_sorted_and_keep_their_values(own: set[int], others: set[int]) -> None:
    """Wherever the new rows lie among the old ones."""
    merged = columns(*sorted(own - others)).merged(columns(*sorted(others)))
    expected = columns(*sorted(own | others))
    assert expected.key.tolist() == merged.key.tolist()
    assert expected.deadline_at_ms.tolist() == merged.deadline_at_ms.tolist()
    assert expected.delivery_count.tolist() == merged.delivery_count.tolist()
    assert expected.start_marker_offset.tolist() == merged.start_marker_offset.tolist()


def test_messages_are_found_by_key() -> None:
    """A message that is not in the table has row -1."""
    table = InFlight(columns(3, 5, 9))
    assert table.rows_of(np.array([1, 3, 4, 9, 12], dtype=np.int64)).tolist() == [-1, 0, -1, 2, -1]


def test_table_without_rows_keeps_reasons_of_the_others() -> None:
    """Reasons go with their messages."""
    table = InFlight(columns(3, 5, 9), {3: "no such order", 9: "bad amount"})
    rest = table.without(np.array([0], dtype=np.int64))
    assert rest.columns.key.tolist() == [5, 9]
    assert rest.reasons == {9: "bad amount"}
    assert table.without(np.empty(0, dtype=np.int64)) is table


def test_empty_table_has_no_deadline_and_needs_no_marker() -> None:
    """None, not a number that looks like one."""
    assert InFlight().smallest_deadline_at_ms() is None
    assert InFlight().smallest_start_marker_offset() is None
