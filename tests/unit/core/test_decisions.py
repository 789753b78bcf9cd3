"""Decisions as columns: their types travel to Spark and back, and their order is that of the log."""

from __future__ import annotations

from kmq_spark.core.decisions import DECISION_DTYPES, Decision, Decisions
from kmq_spark.core.policy import DecisionAction
from tests.builders import decisions_of

ROW = Decision(3, 2**47, 5, DecisionAction.DEAD_LETTER, -1, 2**40, 1_800_000_000_000, 2**39, "bad", is_silent=True)
TYPES = {
    "queue_partition": "int32",
    "message_offset": "int64",
    "message_count": "int32",
    "delivery_count": "int32",
    "action": "int8",
    "deadline_at_ms": "int64",
    "tick_marker_offset": "int64",
    "tick_at_ms": "int64",
    "start_marker_offset": "int64",
    "is_silent": "bool",
}


def types_of(decisions: Decisions) -> dict[str, str]:
    """Return the type of each column."""
    return {name: str(getattr(decisions, name).dtype) for name in DECISION_DTYPES}


def test_each_message_of_a_run_has_the_decision_of_the_run() -> None:
    other = ROW._replace(action=DecisionAction.REDELIVER, reason="", is_silent=False, deadline_at_ms=7)
    decisions = decisions_of([ROW, other], [1, 3])
    assert (len(decisions), decisions.total_messages) == (2, 4)
    expected = [ROW, *(other._replace(message_offset=ROW.message_offset + place) for place in range(3))]
    assert decisions.messages() == expected
    assert all(isinstance(row.action, DecisionAction) for row in decisions.messages())
    assert types_of(decisions) == types_of(Decisions.concatenated([decisions, decisions])) == TYPES


def test_columns_that_decisions_do_not_have_are_ignored_and_no_reason_is_an_empty_one() -> None:
    columns = {"colour": ["red"], **{name: [1] for name in DECISION_DTYPES}}
    (row,) = Decisions.from_columns(columns, [None]).messages()
    assert row.reason == ""


def test_no_decisions_have_the_same_columns() -> None:
    nothing = Decisions.empty()
    assert (len(nothing), nothing.total_messages, nothing.messages()) == (0, 0, [])
    assert types_of(Decisions.empty()) == TYPES
