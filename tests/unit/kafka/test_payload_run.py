"""Payloads of one partition: each wanted offset is reported once, whatever holes the log has and however it arrives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from confluent_kafka import Message
from hypothesis import given
from hypothesis import strategies as st

from kmq_spark.kafka.payload_run import Run

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kmq_spark.kafka.payload_run import Stretch

SMALL = st.integers(0, 60)


def record(offset: int) -> Message:
    """Return a record as the client gives it."""
    return Message(topic="orders", partition=0, offset=offset, value=b"%d" % offset)


def reported(wanted: list[int], stretches: Iterable[Stretch]) -> list[tuple[int, int | None]]:
    """Return what was reported: which offset was meant, and that of the record, None for one that is gone."""
    return [
        (wanted[index], None if message is None else message.offset())
        for _, first, messages in stretches
        for index, message in enumerate(messages, first)
    ]


@given(st.sets(SMALL, min_size=1), st.sets(SMALL), st.lists(SMALL), st.integers(0, 61))
def test_every_wanted_offset_is_told_once_and_with_its_own_record(
    wanted_set: set[int], log_set: set[int], cuts: list[int], end: int
) -> None:
    """In whatever pieces the log comes, read again from anywhere in between, as after a seek."""
    wanted, log = sorted(wanted_set), sorted(each for each in log_set if each < end)
    run = Run("orders", 0, wanted)
    stretches = list(run.drop_from(end))
    begin = 0
    for cut in cuts:
        piece = [each for each in log if begin <= each < cut]
        if piece:
            stretches += run.take([record(each) for each in piece])
            begin = max(0, cut - 3)
    rest = [each for each in log if each >= begin]
    if rest:
        stretches += run.take([record(each) for each in rest])
    stretches += run.drop_below(end)
    assert sorted(reported(wanted, stretches)) == [(each, each if each in log else None) for each in wanted]
    assert run.is_done
    assert run.left == 0


def test_run_without_holes_is_one_stretch() -> None:
    run = Run("orders", 0, list(range(10, 1_000)))
    (stretch,) = run.take([record(offset) for offset in range(10, 900)])
    assert (stretch.first, len(stretch.messages), run.read_to, run.position().offset) == (0, 890, 900, 900)
