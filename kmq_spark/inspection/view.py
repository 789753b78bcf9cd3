"""
The messages in flight, folded from the markers topic by a process that only observes.

Rule 1: The rules are those of `core.fold`. Only the tracker decides, so here TICKs only move the clock.
Rule 2: A view that begins at the tracker's `needed` offset contains every message in flight.

Source: "unacked" of RabbitMQ; "not visible" and "age of the oldest message" of SQS.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kmq_spark.core.fold import PartitionState, Rules, fold
from kmq_spark.core.in_flight import KEY_BITS, REJECTED
from kmq_spark.core.markers import MAX_MESSAGE_OFFSET, MarkerType, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from kmq_spark.core.events import LoggedMarker
    from kmq_spark.core.markers import Marker

_RULES_WITHOUT_DECISIONS = Rules(decide_from_marker_offset=2**63 - 1)

UNREADABLE_KEPT = 10
"""Maximum number of unreadable markers whose offset is kept; the others are only counted."""

STARTS_SLACK = 10_000
"""Number of unneeded STARTs that are kept before the unneeded ones are removed."""


class Start(NamedTuple):
    """What is kept of a START: append time (epoch ms, broker clock), consumer id, and whether it is a deferral."""

    at_ms: int
    consumer_id: str
    is_deferral: bool


class HeldMessage(NamedTuple):
    """
    A message in flight.

    `started_at_ms` is None if its START was not read. `deadline_at_ms` is on the broker's clock, and -1 if the message
    was rejected and waits for the tracker. `is_deferred` means that no consumer holds the message and it waits until it
    is due.
    """

    queue_partition: int
    message_offset: int
    delivery_count: int
    deadline_at_ms: int
    started_at_ms: int | None
    consumer_id: str
    is_deferred: bool


@dataclass(slots=True)
class MarkersView:
    """
    One markers partition in its present state.

    Attributes:
        state: Messages in flight, and counters since the view began.
        newest_at_ms: Append time of the newest record read, epoch milliseconds; 0 before the first.
        acked_at_ms: Append time of the newest END without a copy: acknowledged, rejected or expired; 0 before the
            first.
        started_at_ms: Append time of the newest START that handed messages out; 0 before the first.
        ticked_at_ms: Append time of the newest TICK; 0 before the first.
        trackers: Append time of the newest END of each tracker, by tracker id.
        unreadable: Marker offsets of the first unreadable records.
    """

    state: PartitionState = field(default_factory=PartitionState.empty)
    newest_at_ms: int = 0
    acked_at_ms: int = 0
    started_at_ms: int = 0
    ticked_at_ms: int = 0
    trackers: dict[str, int] = field(default_factory=dict)
    unreadable: list[int] = field(default_factory=list)
    _starts: dict[int, Start] = field(default_factory=dict)

    def add(self, markers: Sequence[LoggedMarker]) -> None:
        """
        Fold the markers that were appended since the last call.

        Args:
            markers: Markers in any order; those that are already folded are skipped.
        """
        for offset, appended_at_ms, marker in markers:
            self.newest_at_ms = max(self.newest_at_ms, appended_at_ms)
            if marker is None:
                if len(self.unreadable) < UNREADABLE_KEPT:
                    self.unreadable.append(offset)
            else:
                self._note_marker(offset, appended_at_ms, marker)
        self.state = fold(self.state, markers, _RULES_WITHOUT_DECISIONS).state
        self._remove_unneeded_starts()

    def messages(self) -> Iterator[HeldMessage]:
        """Yield every message in flight, ordered by queue partition and offset."""
        columns = self.state.in_flight.columns.messages()
        deadlines_ms = self.state.on_brokers_clock(columns.deadline_at_ms).tolist()
        for key, deadline_at_ms, delivery_count, start in zip(
            columns.key.tolist(), deadlines_ms, columns.delivery_count.tolist(),
            columns.start_marker_offset.tolist(), strict=True,
        ):  # fmt: skip
            known = self._starts.get(start)
            yield HeldMessage(
                key >> KEY_BITS,
                key & MAX_MESSAGE_OFFSET,
                delivery_count,
                deadline_at_ms,
                None if known is None else known.at_ms,
                "" if known is None else known.consumer_id,
                known is not None and known.is_deferral,
            )

    def by_start(self) -> Iterator[tuple[Start | None, int, int]]:
        """
        Yield each START with messages in flight: the START if known, the number of messages, and their earliest
        deadline.
        """
        columns = self.state.in_flight.columns
        starts, place = np.unique(columns.start_marker_offset, return_inverse=True)
        counts = np.zeros(len(starts), dtype=np.int64)
        np.add.at(counts, place, columns.count)
        earliest = np.full(len(starts), 2**63 - 1, dtype=np.int64)
        np.minimum.at(earliest, place, self._deadlines_ms())
        for start, count, deadline_at_ms in zip(starts.tolist(), counts.tolist(), earliest.tolist(), strict=True):
            yield self._starts.get(start), count, deadline_at_ms

    def overdue(self, before_ms: int) -> int:
        """Return the number of messages whose deadline is before an instant (epoch milliseconds, broker clock)."""
        deadline_at_ms = self._deadlines_ms()
        is_overdue = (deadline_at_ms < before_ms) & (deadline_at_ms != REJECTED)
        return int(self.state.in_flight.columns.count[is_overdue].sum())

    def due_without_tick_since_ms(self) -> int | None:
        """Return the earliest deadline in flight that has passed without a later TICK; None if there is none."""
        deadlines = self._deadlines_ms()
        has_deadline = self.state.in_flight.columns.deadline_at_ms != REJECTED
        without_tick = deadlines[has_deadline & (deadlines >= self.ticked_at_ms)]
        return int(without_tick.min()) if len(without_tick) else None

    def _deadlines_ms(self) -> NDArray[np.int64]:
        """Return the deadline of each run in flight on the broker's clock."""
        return self.state.on_brokers_clock(self.state.in_flight.columns.deadline_at_ms)

    def _note_marker(self, offset: int, appended_at_ms: int, marker: Marker) -> None:
        if marker.type is MarkerType.START:
            self._starts[offset] = Start(appended_at_ms, marker.consumer_id, marker.never_handed_out)
            if not marker.never_handed_out:
                self.started_at_ms = max(self.started_at_ms, appended_at_ms)
        elif marker.type is MarkerType.TICK:
            self.ticked_at_ms = max(self.ticked_at_ms, appended_at_ms)
        elif marker.type is MarkerType.END:
            if marker.outcome in {Outcome.REDELIVERED, Outcome.DEAD_LETTERED}:
                self.trackers[marker.consumer_id] = appended_at_ms
            else:
                self.acked_at_ms = max(self.acked_at_ms, appended_at_ms)

    def _remove_unneeded_starts(self) -> None:
        """Remove STARTs without messages in flight."""
        if len(self._starts) <= self.state.in_flight.run_count + STARTS_SLACK:
            return
        needed = set(np.unique(self.state.in_flight.columns.start_marker_offset).tolist())
        self._starts = {offset: start for offset, start in self._starts.items() if offset in needed}
