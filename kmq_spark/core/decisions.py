"""
Decisions: the redeliveries and dead letters that the tracker must send, as columns and as rows.

Rule 1: values only. Decisions are ordered by TICK, then by deadline, then by message key.
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
    """One decision; `Decisions` describes the fields."""

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
        message_offset: Offset of the message in the queue topic, int64.
        delivery_count: Number of deliveries so far, int32.
        action: A `DecisionAction`, int8.
        deadline_at_ms: When the lease ended, epoch milliseconds, on the broker's clock at the deciding TICK; -1 for a
            rejected message. int64.
        tick_marker_offset: Marker offset of the TICK that decided the message, int64.
        tick_at_ms: Append time of that TICK, epoch milliseconds, broker clock, int64.
        start_marker_offset: Marker offset of the last START of the message, int64.
        is_silent: Whether the lease ran out without a release, deferral or rejection. bool.
        reasons: For a dead letter, why it is dead-lettered. For a redelivery, the exception of the failed delivery, or
            an empty text.
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
        """Return an instance without decisions."""
        return cls.from_columns(dict.fromkeys(DECISION_DTYPES, ()), ())

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any], reasons: Sequence[str | None]) -> Decisions:
        """
        Build decisions from columns.

        Args:
            columns: Every column of `DECISION_DTYPES` as an array or sequence of any integer type; other columns are
                ignored.
            reasons: One reason a row; None becomes an empty text.
        """
        typed = {name: np.asarray(columns[name]).astype(dtype, copy=False) for name, dtype in DECISION_DTYPES.items()}
        return cls(**typed, reasons=[reason or "" for reason in reasons])

    @classmethod
    def concatenated(cls, parts: Iterable[Decisions]) -> Decisions:
        """Concatenate the decisions of several TICKs."""
        parts = list(parts)
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return cls.empty()
        columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in DECISION_DTYPES}
        return cls.from_columns(columns, [reason for part in parts for reason in part.reasons])

    def rows(self) -> list[Decision]:
        """Return one `Decision` a row."""
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
"""The columns of `Decisions`, in field order, and their types."""
