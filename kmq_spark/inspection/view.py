"""
What is in flight, folded from the markers topic by somebody who only looks.

Rule 1: the rules are those of `core.fold`; only the tracker decides, so TICKs move the clock here and nothing else.
Rule 2: who looks from the tracker's `needed` offset on sees every message that is in flight.

Source: RabbitMQ's "unacked", SQS's "not visible" and "age of the oldest message".
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

_NEVER_DECIDES = Rules(decide_from_marker_offset=2**63 - 1)

UNREADABLE_KEPT = 10
"""Unreadable markers told by their offset; the rest is only counted."""

STARTS_SLACK = 10_000
"""STARTs remembered beyond those still needed, before the list is gone through."""


class Start(NamedTuple):
    """What is remembered of a START: when it was appended (epoch milliseconds, broker clock), by whom, and what for."""

    at_ms: int
    consumer_id: str
    is_deferral: bool


class Held(NamedTuple):
    """
    A message in flight.

    `started_at_ms` is None where its START was not read; `deadline_at_ms` is on the broker's clock, -1 where it was
    rejected and waits for the tracker; `is_deferred` where nobody holds it and it waits for its time.
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
    One markers partition, as it stands.

    Attributes:
        state: What is in flight, and counters since the view began.
        newest_at_ms: Append time of the newest record read, epoch milliseconds; 0 before the first.
        acked_at_ms: Append time of the newest END that a consumer wrote; 0 before the first.
        started_at_ms: Append time of the newest START that handed messages out; 0 before the first.
        ticked_at_ms: Append time of the newest TICK; 0 before the first.
        trackers: Ids of the trackers whose ENDs were read, with the append time of the newest.
        unreadable: Marker offsets of the first records that are no markers.
    """

    state: PartitionState = field(default_factory=PartitionState.empty)
    newest_at_ms: int = 0
    acked_at_ms: int = 0
    started_at_ms: int = 0
    ticked_at_ms: int = 0
    trackers: dict[str, int] = field(default_factory=dict)
    unreadable: list[int] = field(default_factory=list)
    _starts: dict[int, Start] = field(default_factory=dict)

    def take(self, markers: Sequence[LoggedMarker]) -> None:
        """
        Fold what was appended since the last time.

        Args:
            markers: In any order; what was folded before is skipped.
        """
        for offset, appended_at_ms, marker in markers:
            self.newest_at_ms = max(self.newest_at_ms, appended_at_ms)
            if marker is None:
                if len(self.unreadable) < UNREADABLE_KEPT:
                    self.unreadable.append(offset)
            else:
                self._remember(offset, appended_at_ms, marker)
        self.state = fold(self.state, markers, _NEVER_DECIDES).state
        self._forget()

    def messages(self) -> Iterator[Held]:
        """Yield every message in flight, by queue partition and offset."""
        columns = self.state.in_flight.columns
        for key, deadline_at_ms, delivery_count, start in zip(
            columns.key.tolist(), self._deadlines_ms().tolist(), columns.delivery_count.tolist(),
            columns.start_marker_offset.tolist(), strict=True,
        ):  # fmt: skip
            known = self._starts.get(start)
            yield Held(
                key >> KEY_BITS,
                key & MAX_MESSAGE_OFFSET,
                delivery_count,
                deadline_at_ms,
                None if known is None else known.at_ms,
                "" if known is None else known.consumer_id,
                known is not None and known.is_deferral,
            )

    def by_start(self) -> Iterator[tuple[Start | None, int, int]]:
        """Yield each START with messages in flight: what is known of it, how many, their earliest deadline."""
        columns = self.state.in_flight.columns
        starts, place, counts = np.unique(columns.start_marker_offset, return_inverse=True, return_counts=True)
        earliest = np.full(len(starts), 2**63 - 1, dtype=np.int64)
        np.minimum.at(earliest, place, self._deadlines_ms())
        for start, count, deadline_at_ms in zip(starts.tolist(), counts.tolist(), earliest.tolist(), strict=True):
            yield self._starts.get(start), count, deadline_at_ms

    def overdue(self, before_ms: int) -> int:
        """Return how many messages are past their deadline before an instant, epoch milliseconds, broker clock."""
        deadline_at_ms = self._deadlines_ms()
        return int(np.count_nonzero((deadline_at_ms < before_ms) & (deadline_at_ms != REJECTED)))

    def unticked_since_ms(self) -> int | None:
        """Return the earliest deadline after which no TICK was appended; None where there is none in flight."""
        deadlines = self._deadlines_ms()
        waits = self.state.in_flight.columns.deadline_at_ms != REJECTED
        unticked = deadlines[waits & (deadlines >= self.ticked_at_ms)]
        return int(unticked.min()) if len(unticked) else None

    def _deadlines_ms(self) -> NDArray[np.int64]:
        """Return the deadlines in flight on the broker's clock."""
        return self.state.on_brokers_clock(self.state.in_flight.columns.deadline_at_ms)

    def _remember(self, offset: int, appended_at_ms: int, marker: Marker) -> None:
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

    def _forget(self) -> None:
        """Drop STARTs that nothing in flight goes back to."""
        if len(self._starts) <= len(self.state.in_flight) + STARTS_SLACK:
            return
        needed = set(np.unique(self.state.in_flight.columns.start_marker_offset).tolist())
        self._starts = {offset: start for offset, start in self._starts.items() if offset in needed}
