"""Payloads of one partition: each wanted offset is reported once, for any gaps in the log and any order of arrival."""

from __future__ import annotations

from typing import TYPE_CHECKING

from confluent_kafka import Message
from hypothesis import given
from hypothesis import strategies as st

from kmq_spark.kafka.payload_run import WantedOffsets

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kmq_spark.kafka.payload_run import PayloadSlice

SMALL = st.integers(0, 60)


def record(offset: int) -> Message:
    """Return a record as the client gives it."""
    return Message(topic="orders", partition=0, offset=offset, value=b"%d" % offset)


def reported(wanted: list[int], slices: Iterable[PayloadSlice]) -> list[tuple[int, int | None]]:
    """Return the reports: each wanted offset, and the offset of its record or None if it is gone."""
    return [
        (wanted[index], None if message is None else message.offset())
        for found in slices
        for index, message in enumerate(found.messages, found.first)
    ]


@given(st.sets(SMALL, min_size=1), st.sets(SMALL), st.lists(SMALL), st.integers(0, 61))
def test_every_wanted_offset_is_reported_once_and_with_its_own_record(
    wanted_set: set[int], log_set: set[int], cuts: list[int], end: int
) -> None:
    """In whatever pieces the log comes, read again from anywhere in between, as after a seek."""
    wanted, log = sorted(wanted_set), sorted(each for each in log_set if each < end)
    offsets = WantedOffsets("orders", 0, wanted)
    slices = list(offsets.drop_from(end))
    begin = 0
    for cut in cuts:
        piece = [each for each in log if begin <= each < cut]
        if piece:
            slices += offsets.add([record(each) for each in piece])
            begin = max(0, cut - 3)
    rest = [each for each in log if each >= begin]
    if rest:
        slices += offsets.add([record(each) for each in rest])
    slices += offsets.drop_below(end)
    assert sorted(reported(wanted, slices)) == [(each, each if each in log else None) for each in wanted]
    assert offsets.is_done
    assert offsets.left == 0


def test_log_without_gaps_gives_one_slice() -> None:
    offsets = WantedOffsets("orders", 0, list(range(10, 1_000)))
    (found,) = offsets.add([record(each) for each in range(10, 900)])
    assert (found.first, len(found.messages), offsets.read_to, offsets.position().offset) == (0, 890, 900, 900)
