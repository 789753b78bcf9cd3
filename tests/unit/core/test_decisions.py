"""Decisions as columns: their types travel to Spark and back, and their order is that of the log."""

from __future__ import annotations

from kmq_spark.core.decisions import DECISION_DTYPES, Decision, Decisions
from kmq_spark.core.policy import DecisionAction

ROW = Decision(3, 2**47, 5, DecisionAction.DEAD_LETTER, -1, 2**40, 1_800_000_000_000, 2**39, "bad", is_silent=True)
TYPES = {
    "queue_partition": "int32",
    "message_offset": "int64",
    "delivery_count": "int32",
    "action": "int8",
    "deadline_at_ms": "int64",
    "tick_marker_offset": "int64",
    "tick_at_ms": "int64",
    "start_marker_offset": "int64",
    "is_silent": "bool",
}


def decisions_of(*rows: Decision) -> Decisions:
    """Return rows as columns of Python's integers, with one column more than there are."""
    columns = {name: [getattr(row, name) for row in rows] for name in TYPES}
    return Decisions.from_columns({**columns, "colour": ["red"]}, [row.reason or None for row in rows])


def types_of(decisions: Decisions) -> dict[str, str]:
    """Return the type of each column."""
    return {name: str(getattr(decisions, name).dtype) for name in DECISION_DTYPES}


def test_rows_are_what_the_columns_were_made_of() -> None:
    other = ROW._replace(action=DecisionAction.REDELIVER, reason="", is_silent=False, deadline_at_ms=7)
    decisions = decisions_of(ROW, other)
    assert (len(decisions), decisions.rows()) == (2, [ROW, other])
    assert all(isinstance(row.action, DecisionAction) for row in decisions.rows())
    assert types_of(decisions) == TYPES


def test_no_decisions_have_the_same_columns() -> None:
    assert (len(Decisions.empty()), Decisions.empty().rows()) == (0, [])
    assert types_of(Decisions.empty()) == TYPES


def test_decisions_of_several_ticks_keep_their_order() -> None:
    parts = [decisions_of(ROW._replace(message_offset=offset, reason=str(offset))) for offset in (9, 3, 5)]
    whole = Decisions.concatenated(iter(parts))
    assert whole.rows() == [row for part in parts for row in part.rows()]
    assert types_of(whole) == TYPES
    assert Decisions.concatenated(parts[:1]).rows() == parts[0].rows()
    assert Decisions.concatenated([]).rows() == []
