"""The next piece is made while this one is at work on: one ahead, in order, and nothing is swallowed."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from kmq_spark.tracker.sender.read_ahead import one_ahead
from tests.limits import COMES_S

if TYPE_CHECKING:
    from collections.abc import Generator


def pieces(count: int, made: list[int], fails_at: int = -1) -> Generator[int]:
    """Yield numbers, and note which were made and that the end was reached or we were closed."""
    try:
        for number in range(count):
            if number == fails_at:
                raise ValueError(number)
            made.append(number)
            yield number
    finally:
        made.append(-1)


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_all_pieces_come_in_order(count: int) -> None:
    made: list[int] = []
    assert list(one_ahead(pieces(count, made))) == list(range(count))
    assert made == [*range(count), -1]


def test_next_piece_is_made_meanwhile_and_no_other() -> None:
    """It is read in another thread, before it is needed."""
    seen = threading.Event()
    threads: set[str] = set()

    def watched() -> Generator[int]:
        for number in range(10):
            threads.add(threading.current_thread().name)
            if number == 1:
                seen.set()
            assert number < 2, "two ahead"
            yield number

    with closing(one_ahead(watched())) as ahead:
        assert next(ahead) == 0
        assert seen.wait(COMES_S)
    assert len(threads) == 2


def test_failure_is_raised_where_its_piece_would_have_been() -> None:
    with closing(one_ahead(pieces(5, [], fails_at=2))) as ahead:
        assert [next(ahead), next(ahead)] == [0, 1]
        with pytest.raises(ValueError, match="2"):
            next(ahead)


def test_whoever_stops_early_leaves_nothing_running() -> None:
    made: list[int] = []
    with closing(one_ahead(pieces(5, made))) as ahead:
        next(ahead)
    assert made == [0, 1, -1]
