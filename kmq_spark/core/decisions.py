"""
Decisions: the redeliveries and dead letters that the tracker must send, in runs of neighbouring messages.

Rule 1: values only. Decisions are ordered by TICK, then by deadline, then by message key.
Rule 2: a run is a shorter way to write decisions, and no more: any cut of a run into shorter runs means the same.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kmq_spark.core.in_flight import spread
from kmq_spark.core.policy import DecisionAction

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray


class Decision(NamedTuple):
    """The decision on one message; `Decisions` describes the fields."""

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
    Decisions as columns of equal length, one row a run.

    A run is a number of messages with consecutive offsets in one queue partition, for which all other columns are
    equal.

    Attributes:
        message_count: Number of messages in the run, at least 1. int32.
        deadline_at_ms: When the lease ended, epoch milliseconds, on the broker's clock at the deciding TICK; -1 for
            rejected messages. int64.
        tick_at_ms: Append time of that TICK, epoch milliseconds, broker clock, int64.
        start_marker_offset: Marker offset of the last START of the messages, int64.
        is_silent: Whether the lease ran out without a release, deferral or rejection. bool.
        reasons: For a dead letter, why it is dead-lettered. For a redelivery, the exception of the failed delivery, or
            an empty text.
    """

    queue_partition: NDArray[np.int32]
    message_offset: NDArray[np.int64]
    message_count: NDArray[np.int32]
    delivery_count: NDArray[np.int32]
    action: NDArray[np.int8]
    deadline_at_ms: NDArray[np.int64]
    tick_marker_offset: NDArray[np.int64]
    tick_at_ms: NDArray[np.int64]
    start_marker_offset: NDArray[np.int64]
    is_silent: NDArray[np.bool_]
    reasons: list[str]

    def __len__(self) -> int:
        """Return the number of runs."""
        return len(self.reasons)

    @property
    def total_messages(self) -> int:
        """Number of messages in all runs; a message that two TICKs decided counts twice."""
        return int(self.message_count.sum(dtype=np.int64))

    @classmethod
    def empty(cls) -> Decisions:
        """Return an instance without decisions."""
        return cls.from_columns(dict.fromkeys(DECISION_DTYPES, ()), ())

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any], reasons: Sequence[str | None]) -> Decisions:
        """Build decisions from columns."""
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

    def messages(self) -> list[Decision]:
        """Return one `Decision` a message, in order."""
        run, message_offset = spread(self.message_offset, self.message_count)
        columns = {name: getattr(self, name)[run] for name in DECISION_DTYPES} | {"message_offset": message_offset}
        values = {name: column.tolist() for name, column in columns.items()}
        values["action"] = map(DecisionAction, values["action"])
        values["reason"] = map(self.reasons.__getitem__, run.tolist())
        return list(map(Decision._make, zip(*map(values.__getitem__, Decision._fields), strict=True)))


DECISION_DTYPES: dict[str, np.dtype[Any]] = {
    **{column.name: np.dtype(np.int64) for column in fields(Decisions) if column.name != "reasons"},
    "queue_partition": np.dtype(np.int32),
    "message_count": np.dtype(np.int32),
    "delivery_count": np.dtype(np.int32),
    "action": np.dtype(np.int8),
    "is_silent": np.dtype(np.bool_),
}
"""The columns of `Decisions`, in field order, and their types."""
