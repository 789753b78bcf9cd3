"""TICKs that carry the ends of the queue topic: what STARTs name past them leaves the table."""

from __future__ import annotations

import pytest

from kmq_spark.core.fold import FoldResult, PartitionState, Rules, fold
from kmq_spark.core.in_flight import KEY_BITS
from kmq_spark.core.markers import MAX_DUE_AT_MS, MAX_MESSAGE_OFFSET, MAX_MESSAGES_PER_MARKER, Outcome
from kmq_spark.testing import end, log, start, tick


def in_flight(result: FoldResult) -> list[tuple[int, int]]:
    """Return partition and offset of each message in flight."""
    return [
        (key >> KEY_BITS, key & MAX_MESSAGE_OFFSET) for key in result.state.in_flight.columns.messages().key.tolist()
    ]


def test_100_000_messages_that_do_not_exist_leave_whatever_their_instant() -> None:
    """They stayed until their lease ended; where the START named the year 9999, until then."""
    far = start(50_000_000, count=MAX_MESSAGES_PER_MARKER, never_handed_out=True, due_at_ms=MAX_DUE_AT_MS)
    ticks = [tick(1_000), tick(1_000, queue_ends=[8], ends_as_of=2)]
    result = fold(PartitionState.empty(), log(start(7), far, *ticks), Rules())
    assert in_flight(result) == [(0, 7)]
    counters = result.state.counters
    assert (counters.started, counters.nonexistent) == (MAX_MESSAGES_PER_MARKER + 1, MAX_MESSAGES_PER_MARKER)
    assert (result.status.needed_marker_offset, len(result.decisions)) == (0, 0)


@pytest.mark.parametrize(
    ("message_offset", "ends", "ends_as_of", "stays"),
    [
        (7, [8], 1, True),  # the last message of the topic
        (8, [8], 1, False),
        (8, [8], 0, True),  # started after the TICK before which the ends were not read
        (8, [-1], 1, True),  # end not known
        (8, [0], 1, False),  # an empty partition
    ],
)
def test_only_what_was_started_before_and_lies_past_the_end_leaves(
    message_offset: int, ends: list[int], ends_as_of: int, *, stays: bool
) -> None:
    ticked = tick(1_000, queue_ends=ends, ends_as_of=ends_as_of)
    result = fold(PartitionState.empty(), log(start(message_offset), tick(1_000), ticked), Rules())
    assert in_flight(result) == [(0, message_offset)] * stays
    assert result.state.counters.nonexistent == (not stays)


@pytest.mark.parametrize("partition", [0, 3])
def test_range_that_crosses_the_end_is_cut_there(partition: int) -> None:
    ticked = tick(1_000, queue_ends=[-1] * partition + [8], ends_as_of=1)
    result = fold(PartitionState.empty(), log(start(5, count=5, queue_partition=partition), ticked), Rules())
    assert in_flight(result) == [(partition, 5), (partition, 6), (partition, 7)]
    assert result.state.counters.nonexistent == 2


def test_partitions_that_the_tick_does_not_list_stay() -> None:
    """The topic may have grown since the ticker looked."""
    ticked = tick(1_000, queue_ends=[0, 5], ends_as_of=2)
    result = fold(
        PartitionState.empty(), log(start(5, queue_partition=1), start(5, queue_partition=2), ticked), Rules()
    )
    assert in_flight(result) == [(2, 5)]


def test_second_start_after_the_ends_were_read_keeps_the_message() -> None:
    """Its consumer may have fetched a message that was appended meanwhile."""
    ticked = tick(1_000, queue_ends=[8], ends_as_of=1)
    result = fold(PartitionState.empty(), log(start(8), tick(1_000), start(8), ticked), Rules())
    assert in_flight(result) == [(0, 8)]


def test_nothing_is_decided_of_what_leaves_at_the_same_tick() -> None:
    """And an END behind it names a message that is not in flight."""
    ticked = tick(99_000, queue_ends=[8], ends_as_of=1)
    result = fold(PartitionState.empty(), log(start(8), tick(1_000), ticked, end(8, 99_000)), Rules())
    assert (len(result.decisions), result.state.counters.end_unknown) == (0, 1)
    late = end(8, 99_000, outcome=Outcome.EXPIRED)
    result = fold(PartitionState.empty(), log(start(8), tick(1_000), ticked, late), Rules())
    assert result.state.counters.end_unknown == 1
