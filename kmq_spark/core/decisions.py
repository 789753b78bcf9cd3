"""
Decisions: what the tracker is to send, as columns and as rows.

Rule 1: values only; the order is that of the log: by TICK, within it by deadline, then by message key.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kmq_spark.core.policy import DecisionAction

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray


class Decision(NamedTuple):
    """One decision; see `Decisions` for the fields."""

    queue_partition: int
    message_offset: int
    delivery_count: int
    action: DecisionAction
    deadline_at_ms: int
    tick_marker_offset: int
    tick_at_ms: int
    start_marker_offset: int
    reason: str
    is_silent: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Decisions:
    """
    Decisions as columns of equal length.

    Attributes:
        queue_partition: Queue partition of the message, int32.
        message_offset: Its offset in the queue topic, int64.
        delivery_count: Deliveries so far, int32.
        action: A `DecisionAction`, int8.
        deadline_at_ms: When its lease ended, epoch milliseconds, as the broker's clock showed it at that TICK; -1 for a
            rejected message. int64.
        tick_marker_offset: Marker offset of the TICK that decided it, int64.
        tick_at_ms: Append time of that TICK, epoch milliseconds, broker clock, int64.
        start_marker_offset: Marker offset of its last START, int64.
        is_silent: Whether its lease just ran out, so that nobody said a word: not released, deferred or rejected. bool.
        reasons: Why it is dead-lettered; of a redelivery the exception of the delivery that failed, empty for none.
    """

    queue_partition: NDArray[np.int32]
    message_offset: NDArray[np.int64]
    delivery_count: NDArray[np.int32]
    action: NDArray[np.int8]
    deadline_at_ms: NDArray[np.int64]
    tick_marker_offset: NDArray[np.int64]
    tick_at_ms: NDArray[np.int64]
    start_marker_offset: NDArray[np.int64]
    is_silent: NDArray[np.bool_]
    reasons: list[str]

    def __len__(self) -> int:
        """Return the number of decisions."""
        return len(self.reasons)

    @classmethod
    def empty(cls) -> Decisions:
        """Return no decisions."""
        return cls.from_columns(dict.fromkeys(DECISION_DTYPES, ()), ())

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any], reasons: Sequence[str | None]) -> Decisions:
        """
        Put decisions together.

        Args:
            columns: Each column of `DECISION_DTYPES`, array or sequence, of any integer type; others are left alone.
            reasons: One for each row; None is read as empty.
        """
        typed = {name: np.asarray(columns[name]).astype(dtype, copy=False) for name, dtype in DECISION_DTYPES.items()}
        return cls(**typed, reasons=[reason or "" for reason in reasons])

    @classmethod
    def concatenated(cls, parts: Iterable[Decisions]) -> Decisions:
        """Return the decisions of several TICKs as one."""
        parts = list(parts)
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return cls.empty()
        columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in DECISION_DTYPES}
        return cls.from_columns(columns, [reason for part in parts for reason in part.reasons])

    def rows(self) -> list[Decision]:
        """Return the decisions one by one."""
        columns = [getattr(self, name).tolist() for name in DECISION_DTYPES if name != "is_silent"]
        rows = map(Decision._make, zip(*columns, self.reasons, self.is_silent.tolist(), strict=True))
        return [row._replace(action=DecisionAction(row.action)) for row in rows]


DECISION_DTYPES: dict[str, np.dtype[Any]] = {
    **{column.name: np.dtype(np.int64) for column in fields(Decisions) if column.name != "reasons"},
    "queue_partition": np.dtype(np.int32),
    "delivery_count": np.dtype(np.int32),
    "action": np.dtype(np.int8),
    "is_silent": np.dtype(np.bool_),
}
"""The columns of `Decisions` in their order, with their types."""
