"""
The state function of the tracker: marker rows of one markers partition in; decision rows and a status row out.

Rule 1: The Python workers import this module by name, so that Spark sends the function's name and not its code.
Rule 2: This module only translates: bytes to markers (`wire`) and arrays to rows. All rules are in `core.fold`.
Rule 3: A record that cannot be read becomes a row, never an exception.
"""

from __future__ import annotations

import functools
import gc
import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pandas as pd

from kmq_spark.core.clock import ClockStart
from kmq_spark.core.fold import fold
from kmq_spark.core.state import PartitionState
from kmq_spark.failpoints import failpoint
from kmq_spark.wire.marker_log import MarkerLog

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kmq_spark.core.decisions import Decisions
    from kmq_spark.core.policy import QueueRules
    from kmq_spark.core.state import Status

ROW_STATUS, ROW_REDELIVER, ROW_DEAD_LETTER, ROW_UNREADABLE = 0, 1, 2, 3

STATE_SCHEMA = "state binary"
"""One binary column, since array and map columns in the state crash the worker of PySpark 4.2."""

OUTPUT_SCHEMA = (
    "marker_partition int, row_kind byte, queue_partition int, message_offset long, message_count int, "
    "delivery_count int, deadline_at_ms long, tick_marker_offset long, tick_at_ms long, start_marker_offset long, "
    "is_silent boolean, detail string"
)
"""
Rows of the tracker's query, by `row_kind`:
0 status: one row a partition and batch; `detail` is the partition's status as JSON.
1 redeliver, 2 dead-letter: a run of decisions, as a row of `core.decisions.Decisions`; `detail` is the reason of the
  dead letters, or the error of the failed deliveries.
3 unreadable: `detail` is the text about a record that is not a marker.
Columns that a kind does not use are -1, false or null.
"""

_INT_COLUMNS = (
    "queue_partition",
    "message_offset",
    "message_count",
    "delivery_count",
    "deadline_at_ms",
    "tick_marker_offset",
    "tick_at_ms",
    "start_marker_offset",
)


class StateHandle(Protocol):
    """The part of Spark's `GroupState` that is used here. Its constructor and class name differ between versions."""

    @property
    def exists(self) -> bool:
        """Whether the group has a state."""

    @property
    def get(self) -> tuple[Any, ...]:
        """The state, one value per column."""

    def update(self, newValue: tuple[Any, ...]) -> None:  # noqa: N803  # Spark's name
        """Replace the state."""


@dataclass(frozen=True, slots=True)
class FoldSettings:
    """
    The settings of the state function; Spark sends them to the workers with the query.

    Attributes:
        markers_topic: Name for error texts.
        rules_at_start: Rules of the queue in force where a rebuild begins, by markers partition.
        clock_at_start: The partition's clock where a rebuild begins, by markers partition.
    """

    markers_topic: str
    rules_at_start: dict[int, QueueRules | None] = field(default_factory=dict)
    clock_at_start: dict[int, ClockStart] = field(default_factory=dict)


@functools.cache
def _freeze_imports() -> None:
    """Exclude the modules of a worker from its garbage collections, once: Spark reuses the worker for many batches."""
    gc.freeze()


def fold_rows(
    key: tuple[int, ...], frames: Iterable[pd.DataFrame], state: StateHandle, settings: FoldSettings
) -> Iterator[pd.DataFrame]:
    """
    Fold the new marker rows of one markers partition into its state.

    The first call in a process excludes all objects that exist by then from garbage collection (`gc.freeze`).
    """
    _freeze_imports()
    marker_partition = int(key[0])
    log = MarkerLog(settings.markers_topic, marker_partition)
    for frame in frames:
        for row in zip(frame["marker_offset"].tolist(), frame["appended_at_ms"].tolist(), frame["value"], strict=True):
            log.read(*row)
    if state.exists:
        before = PartitionState.from_bytes(state.get[0])
    else:
        clock = settings.clock_at_start.get(marker_partition, ClockStart())
        before = PartitionState.rebuilding(settings.rules_at_start.get(marker_partition), clock, log.markers)
    result = fold(before, log.markers)
    blob = result.state.to_bytes()
    state.update((blob,))
    failpoint("tracker.state-updated")
    status = replace(result.status, state_bytes=len(blob))
    yield output_frame(marker_partition, result.decisions, status, log.unreadable)


def output_frame(marker_partition: int, decisions: Decisions, status: Status, unreadable: list[str]) -> pd.DataFrame:
    """Return the rows of one partition and batch: the status, the decisions, the unreadable records, in this order."""
    decided_count, unreadable_count = len(decisions), len(unreadable)
    row_count = 1 + decided_count + unreadable_count
    decided = slice(1, 1 + decided_count)
    row_kind = np.full(row_count, ROW_UNREADABLE, dtype=np.int8)
    row_kind[0] = ROW_STATUS
    row_kind[decided] = decisions.action
    columns: dict[str, Any] = {
        "marker_partition": np.full(row_count, marker_partition, dtype=np.int32),
        "row_kind": row_kind,
    }
    for name in _INT_COLUMNS:
        source = getattr(decisions, name)
        column = np.full(row_count, -1, dtype=source.dtype)
        column[decided] = source
        columns[name] = column
    is_silent = np.zeros(row_count, dtype=np.bool_)
    is_silent[decided] = decisions.is_silent
    columns["is_silent"] = is_silent
    detail = [json.dumps(status.to_dict()), *decisions.reasons, *unreadable]
    columns["detail"] = pd.Series(detail, dtype=object)
    return pd.DataFrame(columns)
