"""What a slot of an exactly-once sink writes of a batch, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kmq_spark.core.producing import check_own_id, slot_id, slot_of
from kmq_spark.core.sinking import Batch, SlotPosition, check_repeated, rows_to_skip
from kmq_spark.errors import ConfigError, SinkError

FOUND = SlotPosition("query-a", 7, 8, 100, "d1", is_whole=True)
WHERE = "slot 3 of sink s"


def test_first_batch_of_a_slot_is_written() -> None:
    assert rows_to_skip(None, Batch("query-a", 0, 8), WHERE) == 0
    assert rows_to_skip(None, Batch("query-a", 7, 8), WHERE) == 0


def test_next_batch_is_written_and_a_repeated_one_continued() -> None:
    """A batch without rows of this slot leaves its position where it is."""
    assert rows_to_skip(FOUND, Batch("query-a", 8, 8), WHERE) == 0
    assert rows_to_skip(FOUND, Batch("query-a", 12, 8), WHERE) == 0
    assert rows_to_skip(FOUND, Batch("query-a", 7, 8), WHERE) == 100


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            Batch("query-a", 6, 8),
            "^slot 3 of sink s is ahead of the query: got batch 6, it has committed batch 7; .* that begins anew$",
        ),
        (Batch("query-a", 8, 9), "number of slots of slot 3 of sink s changed: got 9, it has 8; .* set slots=8"),
        (Batch("query-b", 0, 8), "^slot 3 of sink s was written by another query: got query query-b, batch 0; it has"),
        (Batch("query-b", 8, 8), "continue_from_batch .* or choose another sink_id"),
        (Batch("run:1", 0, 8), "was written by another query"),
    ],
)  # fmt: skip
def test_batch_that_does_not_follow_is_refused_with_the_choices(batch: Batch, message: str) -> None:
    with pytest.raises(SinkError, match=message):
        rows_to_skip(FOUND, batch, WHERE)


def test_new_query_goes_on_from_the_batch_that_is_named() -> None:
    assert rows_to_skip(FOUND, Batch("query-b", 1, 8, continue_from=2), WHERE) == -1
    assert rows_to_skip(None, Batch("query-b", 1, 8, continue_from=2), WHERE) == -1
    assert rows_to_skip(None, Batch("query-b", 2, 8, continue_from=2), WHERE) == 0
    assert rows_to_skip(FOUND, Batch("query-b", 2, 8, continue_from=2), WHERE) == 0
    # Later the option still stands in the program.
    found = replace(FOUND, query="query-b", batch=2)
    assert rows_to_skip(found, Batch("query-b", 2, 8, continue_from=2), WHERE) == 100
    assert rows_to_skip(found, Batch("query-b", 3, 8, continue_from=2), WHERE) == 0


def test_next_run_of_a_batch_job_is_written_and_a_repeated_one_continued() -> None:
    found = replace(FOUND, query="run:monday", batch=0)
    assert rows_to_skip(found, Batch("run:tuesday", 0, 8), WHERE) == 0
    assert rows_to_skip(found, Batch("run:monday", 0, 8), WHERE) == 100
    with pytest.raises(SinkError, match="was written by another query"):
        rows_to_skip(found, Batch("query-a", 0, 8), WHERE)


def test_repeated_batch_with_the_same_rows_is_accepted() -> None:
    check_repeated(FOUND, "d1", 100, WHERE, is_end=True)
    check_repeated(replace(FOUND, is_whole=False), "d1", 100, WHERE, is_end=False)


@pytest.mark.parametrize(
    ("is_whole", "digest", "rows", "is_end", "rows_text"),
    [
        (True, "d2", 100, True, "100 rows are committed, all that there were; got 100 rows;"),
        (True, "d1", 100, False, "100 rows are committed, all that there were; got 100 rows and more;"),
        (True, "d2", 99, True, "100 rows are committed, all that there were; got 99 rows;"),
        (False, "d2", 100, False, "100 rows are committed and more were to come; got 100 rows and more;"),
        (False, "d1", 100, True, "100 rows are committed and more were to come; got 100 rows;"),
        (False, "d2", 60, True, "100 rows are committed and more were to come; got 60 rows;"),
    ],
)
def test_repeated_batch_with_other_rows_is_refused(
    is_whole: bool,  # noqa: FBT001  # a table
    digest: str,
    rows: int,
    is_end: bool,  # noqa: FBT001  # as above
    rows_text: str,
) -> None:
    """The error says what was there and what came, and what to do."""
    with pytest.raises(SinkError) as caught:
        check_repeated(replace(FOUND, is_whole=is_whole), digest, rows, WHERE, is_end=is_end)
    assert str(caught.value) == (
        f"batch 7 came again with other rows in slot 3 of sink s: {rows_text} make the query deterministic (no rand(), "
        "no current time, no source that changes), or write its rows to a table first and send them from there"
    )


def test_position_survives_its_record() -> None:
    assert SlotPosition.parse(FOUND.to_dict(), WHERE) == FOUND


@pytest.mark.parametrize(
    "position", [None, 7, "x", {}, {**FOUND.to_dict(), "rows": "x"}, {**FOUND.to_dict(), "rows": True}]
)
def test_position_of_something_else_is_refused(position: Any) -> None:  # noqa: ANN401  # wrong on purpose
    with pytest.raises(SinkError, match="position of slot 3 of sink s is not one of a sink"):
        SlotPosition.parse(position, WHERE)


def test_slot_has_an_id_that_no_program_may_choose() -> None:
    assert slot_id("jobs", 3) == "jobs.slot-3"
    assert slot_of("jobs.slot-3") == ("jobs", 3)
    assert slot_of("jobs.slot-3.slot-12") == ("jobs.slot-3", 12)
    assert slot_of("jobs.slot-x") is slot_of("jobs") is slot_of("slot-3") is None
    with pytest.raises(ConfigError, match=r"producer name is reserved: got 'jobs\.slot-3'"):
        check_own_id("jobs.slot-3")
    for name in ("jobs", "x" * 100):
        assert check_own_id(name) == name
