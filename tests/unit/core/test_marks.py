"""Marks of decided messages: ranges that behave as a set of message keys."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kmq_spark.core.in_flight import Columns, InFlight
from kmq_spark.core.marks import Marks

RUNS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), max_size=5)
LAST = 2**63 - 1


def keys_of(marks: Marks) -> set[int]:
    """Return the marked keys."""
    return {
        key for first, end in zip(marks.first.tolist(), marks.end.tolist(), strict=True) for key in range(first, end)
    }


def columns_of(runs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return first keys and counts."""
    return np.array([first for first, _ in runs], np.int64), np.array([count for _, count in runs], np.int64)


def set_of(runs: list[tuple[int, int]]) -> set[int]:
    """Return the keys of runs."""
    return {key for first, count in runs for key in range(first, first + count)}


@given(RUNS, RUNS, RUNS)
def test_marks_are_a_set_of_keys(
    added: list[tuple[int, int]], gone: list[tuple[int, int]], again: list[tuple[int, int]]
) -> None:
    marks = Marks().with_runs(*columns_of(added)).without_runs(*columns_of(gone)).with_runs(*columns_of(again))
    expected = (set_of(added) - set_of(gone)) | set_of(again)
    assert keys_of(marks) == expected
    assert marks.message_count == len(expected)
    assert (marks.first[1:] > marks.end[:-1]).all()
    key = np.arange(0, 50, dtype=np.int64)
    ones, noughts = key * 0 + 1, key * 0
    table = InFlight(Columns(key, ones, noughts, noughts, noughts, key < 0, noughts, np.zeros(len(key)))).coalesced()
    split = marks.split(table)
    is_marked = marks.cover(split)
    found = split.columns.take(is_marked).messages().key.tolist()
    assert set(found) == {each for each in expected if each < 50}


def test_largest_key_of_all_can_be_marked() -> None:
    """The key after it is no int64."""
    marks = Marks().with_runs(np.array([LAST], np.int64), np.array([1], np.int64))
    assert (marks.first.tolist(), marks.end.tolist()) == ([LAST], [LAST + 1])
    assert not marks.without_runs(np.array([LAST], np.int64), np.array([1], np.int64)).message_count
