"""The packed table and its helpers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kmq_spark.core.in_flight import Columns, InFlight, message_keys, ranges_of
from kmq_spark.core.markers import MAX_MESSAGE_OFFSET, MAX_QUEUE_PARTITION, OffsetRange


def columns(*keys: int) -> Columns:
    """Return runs of one message that differ in every column."""
    key = np.array(keys, dtype=np.int64)
    return Columns(
        key, np.ones_like(key), key * 10, key * 100, key * 1_000, key % 2 == 1, key * 0, key.astype(np.float64)
    )


def runs(*rows: tuple[int, int, int]) -> Columns:
    """Return runs: first message, number of messages, deadline."""
    key, count, deadline_at_ms = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return Columns(key, count, deadline_at_ms, key * 0, key * 0, key < 0, key * 0, np.zeros(len(key)))


def rows_of(columns: Columns) -> list[tuple[int, int, int]]:
    """Return the rows of `runs`."""
    return list(zip(columns.key.tolist(), columns.count.tolist(), columns.deadline_at_ms.tolist(), strict=True))


def cuts(*keys: int) -> np.ndarray:
    """Return keys at which runs are split."""
    return np.array(keys, dtype=np.uint64)


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


def test_run_is_split_at_the_cuts_within_it() -> None:
    """A cut at the edge of a run, or in a gap, changes nothing."""
    table = runs((10, 5, 1), (20, 3, 2))
    assert rows_of(table.split_at(cuts(11, 13, 21))) == [
        (10, 1, 1), (11, 2, 1), (13, 2, 1), (20, 1, 2), (21, 2, 2),
    ]  # fmt: skip
    for at in (9, 10, 15, 17, 20, 23, 99):
        assert table.split_at(cuts(at)) is table
    assert len(runs().split_at(cuts(1))) == 0


def test_last_message_of_all_can_be_cut_off() -> None:
    """The key after it is no int64."""
    last = 2**63 - 1
    assert rows_of(runs((last - 2, 3, 1)).split_at(cuts(last, last + 1))) == [(last - 2, 2, 1), (last, 1, 1)]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(0, 1)), min_size=1),
    st.sets(st.integers(0, 99)),
)
def test_split_runs_hold_the_same_messages_and_coalesce_again(rows: list[tuple[int, int, int]], at: set[int]) -> None:
    """Wherever the cuts lie."""
    end, placed = 0, []
    for gap, count, deadline_at_ms in rows:
        placed.append((end + gap, count, deadline_at_ms))
        end += gap + count
    table = runs(*placed)
    split = table.split_at(cuts(*sorted(at)))
    assert rows_of(split.messages()) == rows_of(table.messages())
    assert rows_of(split.coalesced()) == rows_of(table.coalesced())
    assert not set(at) & {key + i for key, count, _ in rows_of(split) for i in range(1, count)}


def test_neighbours_with_equal_values_become_one_run() -> None:
    """Not over a gap, not with another deadline, and not from one queue partition into the next."""
    end = MAX_MESSAGE_OFFSET + 1
    table = runs((1, 2, 7), (3, 1, 7), (4, 2, 8), (7, 1, 8), (end - 1, 1, 8), (end, 1, 8))
    assert rows_of(table.coalesced()) == [(1, 3, 7), (4, 2, 8), (7, 1, 8), (end - 1, 1, 8), (end, 1, 8)]


def test_runs_in_an_area_are_found_once() -> None:
    """A run that reaches into two areas, and one that an area lies within."""
    table = runs((10, 5, 1), (20, 10, 2), (40, 1, 3))
    assert table.rows_within(cuts(12, 14, 22), cuts(13, 21, 25)).tolist() == [0, 1]
    assert table.rows_within(cuts(15), cuts(20)).tolist() == []
    assert table.rows_within(cuts(0), cuts(99)).tolist() == [0, 1, 2]


def test_empty_table_needs_no_marker() -> None:
    """None, not a number that looks like one."""
    assert InFlight().smallest_start_marker_offset() is None
