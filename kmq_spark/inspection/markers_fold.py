"""
The messages in flight, folded from the markers topic by a process that only observes.

Rule 1: The rules are those of `core.fold`. What it decides is not used: only the tracker carries decisions out.
Rule 2: A fold that begins at the tracker's `needed` offset contains every message in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kmq_spark.core.fold import PartitionState, fold
from kmq_spark.core.in_flight import KEY_BITS, REJECTED
from kmq_spark.core.markers import MAX_MESSAGE_OFFSET, MarkerType, Outcome
from kmq_spark.inspection.facts import COUNTER_NAMES, Holder, PartitionView

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from kmq_spark.core.events import LoggedMarker

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
class MarkersFold:
    """One markers partition, folded as its markers are read; `view` returns its present state."""

    state: PartitionState = field(default_factory=PartitionState.empty)
    _newest_at_ms: int = 0
    _acked_at_ms: int = 0
    _ticked_at_ms: int = 0
    _unreadable_at: list[int] = field(default_factory=list)
    _starts: dict[int, Start] = field(default_factory=dict)

    def add(self, markers: Sequence[LoggedMarker]) -> None:
        """Fold the markers that were appended since the last call, in any order; those already folded are skipped."""
        for offset, appended_at_ms, marker in markers:
            self._newest_at_ms = max(self._newest_at_ms, appended_at_ms)
            if marker is None:
                if len(self._unreadable_at) < UNREADABLE_KEPT:
                    self._unreadable_at.append(offset)
            elif marker.type is MarkerType.START:
                self._starts[offset] = Start(appended_at_ms, marker.consumer_id, marker.never_handed_out)
            elif marker.type is MarkerType.TICK:
                self._ticked_at_ms = max(self._ticked_at_ms, appended_at_ms)
            elif marker.type is MarkerType.END and marker.outcome not in {Outcome.REDELIVERED, Outcome.DEAD_LETTERED}:
                self._acked_at_ms = max(self._acked_at_ms, appended_at_ms)
        self.state = fold(self.state, markers).state
        self._remove_unneeded_starts()

    def view(self, now_ms: int) -> PartitionView:
        """Return the present state; *now_ms* decides whose lease runs."""
        columns = self.state.in_flight.columns
        deadlines_ms = self.state.on_brokers_clock(columns.latest_deadline_at_ms())
        has_deadline = columns.deadline_at_ms != REJECTED
        in_flight = deferred = 0
        oldest_at_ms: int | None = None
        holders: dict[str, Holder] = {}
        for start, count, held_count, deadline_at_ms in self._by_start(deadlines_ms, has_deadline):
            if start is not None and start.is_deferral:
                deferred += count
                continue
            in_flight += count
            if start is None:
                continue
            oldest_at_ms = start.at_ms if oldest_at_ms is None else min(oldest_at_ms, start.at_ms)
            if held_count and deadline_at_ms >= now_ms:
                held, since_ms = holders.get(start.consumer_id, (0, start.at_ms))
                holders[start.consumer_id] = Holder(held + held_count, min(since_ms, start.at_ms))
        counters = self.state.counters.to_dict()
        return PartitionView(
            in_flight=in_flight,
            deferred=deferred,
            oldest_at_ms=oldest_at_ms,
            deadlines_ms=deadlines_ms[has_deadline],
            run_counts=columns.count[has_deadline],
            holders=holders,
            acked_at_ms=self._acked_at_ms,
            newest_at_ms=self._newest_at_ms,
            ticked_at_ms=self._ticked_at_ms,
            counted={name: counters[name] for name in COUNTER_NAMES},
            unreadable=counters["unreadable"],
            unreadable_at=tuple(self._unreadable_at),
        )

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

    def _by_start(
        self, deadlines_ms: NDArray[np.int64], has_deadline: NDArray[np.bool_]
    ) -> Iterator[tuple[Start | None, int, int, int]]:
        """
        Yield each START with messages in flight, if it is known: their number; of those with a deadline, which a
        rejected one has not, the number and the earliest deadline.
        """
        columns = self.state.in_flight.columns
        starts, place = np.unique(columns.start_marker_offset, return_inverse=True)
        counts = np.zeros(len(starts), dtype=np.int64)
        np.add.at(counts, place, columns.count)
        held, earliest = np.zeros_like(counts), np.full(len(starts), 2**63 - 1, dtype=np.int64)
        np.add.at(held, place[has_deadline], columns.count[has_deadline])
        np.minimum.at(earliest, place[has_deadline], deadlines_ms[has_deadline])
        for start, *found in zip(starts.tolist(), counts.tolist(), held.tolist(), earliest.tolist(), strict=True):
            count, held_count, deadline_at_ms = found
            yield self._starts.get(start), count, held_count, deadline_at_ms

    def _remove_unneeded_starts(self) -> None:
        """Remove STARTs without messages in flight."""
        if len(self._starts) <= self.state.in_flight.run_count + STARTS_SLACK:
            return
        needed = set(np.unique(self.state.in_flight.columns.start_marker_offset).tolist())
        self._starts = {offset: start for offset, start in self._starts.items() if offset in needed}
