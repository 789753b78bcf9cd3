"""The state function as Spark calls it: frames in, frames out, state as one binary column."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from kmq_spark.core.markers import Marker, MarkerType, OffsetRange, Outcome
from kmq_spark.core.policy import QueueRules
from kmq_spark.tracker.fold_rows import (
    ROW_DEAD_LETTER,
    ROW_REDELIVER,
    ROW_STATUS,
    ROW_UNREADABLE,
    FoldSettings,
    fold_rows,
)
from kmq_spark.wire.codec import encode_marker
from tests.group_state import FakeGroupState

SETTINGS = FoldSettings("orders.markers", rules_at_start={7: QueueRules(1, max_deliveries=3)})

TERM, TICK = encode_marker(Marker(MarkerType.TERM, term=5)), encode_marker(Marker(MarkerType.TICK, term=5))


def start(message_offset: int, *, lease_ms: int = 1_000, delivery_count: int = 1) -> bytes:
    """Return the bytes of a START of one message of queue partition 0."""
    ranges = (OffsetRange(message_offset, 1),)
    marker = Marker(MarkerType.START, 0, ranges, redeliver_after_ms=lease_ms, delivery_count=delivery_count)
    return encode_marker(marker)


def rows(*records: tuple[int, int, bytes | None]) -> pd.DataFrame:
    """Return a frame of (marker offset, append time, value)."""
    return pd.DataFrame(records, columns=["marker_offset", "appended_at_ms", "value"])


def folded(state: FakeGroupState, *frames: pd.DataFrame, settings: FoldSettings = SETTINGS) -> pd.DataFrame:
    """Fold frames of markers partition 7 and return the one frame that comes out."""
    (result,) = fold_rows((7,), iter(frames), state, settings)
    return result


def begun() -> FakeGroupState:
    """Return a state in the term of the TICKs."""
    state = FakeGroupState()
    folded(state, rows((9, 5_000, TERM)))
    return state


def kinds(result: pd.DataFrame) -> list[int]:
    """Return the kinds of the rows."""
    return list(result["row_kind"])


def test_batch_without_decision_reports_status_alone() -> None:
    """Each partition has one status row in every batch."""
    result = folded(FakeGroupState(), rows((9, 5_000, TERM), (10, 5_000, start(1))))
    status = json.loads(result["detail"][0])
    assert kinds(result) == [ROW_STATUS]
    assert status["in_flight"] == 1
    assert status["next_marker_offset"] == 11
    assert status["next_deadline_at_ms"] == 6_000  # 5_000 + 1_000


def test_frames_in_any_order_are_folded_in_marker_order() -> None:
    """Spark passes the rows of a group in several frames and in any order; the fold uses the order of the log."""
    result = folded(FakeGroupState(), rows((12, 7_000, TICK)), rows((9, 5_000, TERM), (10, 5_000, start(1))))
    assert kinds(result) == [ROW_STATUS, ROW_REDELIVER]
    assert result["message_offset"][1] == 1
    assert result["tick_marker_offset"][1] == 12


def test_state_survives_as_bytes_between_batches() -> None:
    """A message that is started in one batch is decided in a later one."""
    state = FakeGroupState()
    folded(state, rows((9, 5_000, TERM), (10, 5_000, start(1))))
    result = folded(state, rows((11, 6_001, TICK)))
    assert kinds(result) == [ROW_STATUS, ROW_REDELIVER]
    assert result["deadline_at_ms"][1] == 6_000


def test_rejected_message_comes_out_with_the_handlers_reason() -> None:
    """A rejection is decided at the next TICK, without waiting for the deadline."""
    reject = Marker(MarkerType.END, 0, (OffsetRange(1, 1),), outcome=Outcome.REJECTED, reason="no such account")
    result = folded(
        FakeGroupState(),
        rows((9, 5_000, TERM), (10, 5_000, start(1)), (11, 5_001, encode_marker(reject)), (12, 5_002, TICK)),
    )
    assert kinds(result) == [ROW_STATUS, ROW_DEAD_LETTER]
    assert result["detail"][1] == "no such account"


@pytest.mark.parametrize(
    "value", [None, b"", b"\xff\xff\xff", b"\x08\x09"], ids=["null", "empty", "random", "version 9"]
)
def test_unreadable_record_becomes_a_row_and_stops_nothing(value: bytes | None) -> None:
    """Bytes that are no marker become a row with position and reason; the markers around them count."""
    result = folded(
        FakeGroupState(), rows((9, 5_000, TERM), (10, 5_000, start(1)), (11, 5_500, value), (12, 7_000, TICK))
    )
    assert kinds(result) == [ROW_STATUS, ROW_REDELIVER, ROW_UNREADABLE]
    assert "orders.markers[7]@11" in result["detail"][2]
