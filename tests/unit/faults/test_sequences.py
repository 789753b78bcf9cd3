"""The checker of what a sink wrote: it shares no code with the sink, and finds what is wrong."""

from __future__ import annotations

import pytest

from faults.sequences import Sent, sink_violations

ROWS = 8

GOOD = [
    # Rows 1 to 8 in two slots; each slot writes its rows to partition 0, in the order of its sequences.
    Sent(0, row, row, f"rows.slot-{row % 2}", 1 + row // 5, (row + 1) // 2)
    for row in range(1, ROWS + 1)
]


def test_rows_that_are_there_once_are_no_violation() -> None:
    assert sink_violations(GOOD, ROWS) == []


@pytest.mark.parametrize(
    ("sent", "found"),
    [
        (GOOD[:-1], ["line missing: 8"]),
        (GOOD[1:], ["line missing: 1", "sequence missing of rows.slot-1: 1"]),
        (
            [*GOOD, GOOD[-1]._replace(offset=9, sequence=5)],
            ["line sent twice: 8"],
        ),
        ([*GOOD, GOOD[-1]._replace(offset=9, line=9, sequence=5)], ["no such line: 9"]),
        (
            [each._replace(producer="") if each.line == 8 else each for each in GOOD],
            [f"record without a producer: {GOOD[-1]._replace(producer='')}"],
        ),
    ],
)
def test_what_is_wrong_is_named(sent: list[Sent], found: list[str]) -> None:
    assert sink_violations(sent, ROWS) == found


def test_repeated_sequence_and_wrong_order_are_named() -> None:
    repeated = [each._replace(sequence=3) if each.line == 8 else each for each in GOOD]
    assert any(what.startswith("sequence repeated of rows.slot-0: 3") for what in sink_violations(repeated, ROWS))
    swapped = [each._replace(offset=ROWS - each.offset) for each in GOOD]
    assert any(what.startswith("out of order in its partition") for what in sink_violations(swapped, ROWS))
    older = [each._replace(generation=1) if each.line == 7 else each._replace(generation=2) for each in GOOD]
    assert any(what.startswith("older life behind a newer one") for what in sink_violations(older, ROWS))
