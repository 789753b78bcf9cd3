"""
The state of one markers partition that the fold keeps between batches, and its encoding.

Rule 1: the encoding has a version. Bytes that do not fit are an error, never interpreted in another way.
Rule 2: a run of messages is one row. A consumer that holds 500 consecutive messages takes as much space as one that
holds a single message. Where no two offsets are adjacent, a message takes about one byte (`packing.py`).

Layout, little-endian:
1. magic, version, number of counters, CRC-32 of the rest;
2. clock, append time of the last record, next marker offset, number of the newest term, counters;
3. the messages in flight: packed columns, then the reasons of rejected messages and failed deliveries, each text once;
4. the marks of decided messages; the id of the tracker that began the newest term;
5. the queue's rules, each with the marker offset from which it is in force;
6. how far the clock was ahead, each value with the marker offset from which it applies.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from kmq_spark.core.backoff import Backoff, BackoffKind
from kmq_spark.core.clock import ClockStart
from kmq_spark.core.in_flight import REJECTED, Columns, InFlight
from kmq_spark.core.marks import Marks
from kmq_spark.core.packing import pack_column, unpack_column
from kmq_spark.core.policy import MAX_BACKOFF_MS, QueueRules
from kmq_spark.core.rules_log import BEFORE_ALL, RulesLog
from kmq_spark.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from kmq_spark.core.events import LoggedMarker

STATE_VERSION = 10
_MAGIC = b"KMQS"
_HEAD = struct.Struct("<4sHHI")  # magic, version, number of counters, CRC-32 of the rest
_COUNT = struct.Struct("<I")
_RULES = struct.Struct("<qqqqqqd?")  # marker offset, version, limit; kind, first and longest backoff, jitter; expired
_AGAIN = "start the tracker with a new checkpoint: its state is rebuilt from the markers topic"


@dataclass(slots=True)
class Counters:
    """
    Counters of folded markers since the state began, in messages unless stated otherwise.

    Invariant: started = in flight + acked + expired + redelivered + dead_lettered.

    Attributes:
        started: STARTs of messages not in flight.
        renewed: STARTs of messages in flight.
        kept_alive: KEEPALIVEs that set a deadline.
        expired: ENDs with EXPIRED that did so, also those that a tracker writes in place of a copy.
        rejected: ENDs with REJECTED; the message stays in flight until it is dead-lettered. Includes ENDs with EXPIRED
            where the queue dead-letters expired messages.
        keepalive_unknown: KEEPALIVEs of messages that are not in flight, or are rejected.
        end_late: ENDs of a tracker of messages that were ended before it.
        end_unknown: ENDs of consumers of messages that are not in flight, or are rejected.
        repeated: Number of markers that had been folded before.
    """

    started: int = 0
    renewed: int = 0
    kept_alive: int = 0
    acked: int = 0
    expired: int = 0
    rejected: int = 0
    redelivered: int = 0
    dead_lettered: int = 0
    keepalive_unknown: int = 0
    end_late: int = 0
    end_unknown: int = 0
    ticks: int = 0
    repeated: int = 0
    unreadable: int = 0

    def to_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        return asdict(self)


# New counters must be added at the end: in older state, the missing ones are read as 0.
_COUNTER_NAMES = tuple(counter.name for counter in fields(Counters))


@dataclass(frozen=True, slots=True)
class Status:
    """
    The status of a markers partition after a batch.

    Attributes:
        next_marker_offset: First marker offset that is not folded.
        clock_ms: Clock of the partition (`core.clock`), epoch milliseconds; 0 before the first record.
        in_flight: Number of messages in flight, including rejected and decided ones.
        needed_marker_offset: First marker offset that is needed to rebuild the state.
        next_deadline_at_ms: Earliest deadline of a message in flight that is not decided, on the broker's clock if that
            clock does not step; -1 if a rejected message waits for a TICK; None if there is no such message.
        state_bytes: Size of the stored state in bytes; 0 if it was not measured.
        behind_ms: How far the append time of the last record is behind the clock, milliseconds; above 0 after the
            broker's clock was set back.
        marked: Number of decided messages whose END is not yet read back.
        needed_ahead_ms: How far the clock was ahead at `needed_marker_offset`, milliseconds.
        term: Number of the newest term; 0 before the first. The decisions of the batch are of this term.
    """

    next_marker_offset: int
    clock_ms: int
    in_flight: int
    needed_marker_offset: int
    next_deadline_at_ms: int | None
    counters: Mapping[str, int]
    state_bytes: int = 0
    rules: QueueRules | None = None
    needed_rules: QueueRules | None = None
    behind_ms: int = 0
    marked: int = 0
    needed_ahead_ms: int = 0
    term: int = 0
    term_by: str = ""

    @property
    def needed_clock(self) -> ClockStart:
        """The clock with which a rebuild from `needed_marker_offset` begins."""
        # With nothing in flight, a rebuild begins at the next marker, and the record before it is the last one read.
        return ClockStart(self.needed_ahead_ms, -1 if self.in_flight else self.appended_at_ms)

    @property
    def appended_at_ms(self) -> int:
        """Append time of the last record, epoch milliseconds, broker clock; 0 before the first."""
        return self.clock_ms - self.behind_ms

    def to_dict(self) -> dict[str, Any]:
        """Return the status as JSON values."""
        rules = {name: value and value.to_dict() for name, value in self._rules().items()}
        return {**asdict(self), "counters": dict(self.counters), **rules}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Status:
        """Read what `to_dict` returned."""
        rules = {name: QueueRules.from_dict(values[name]) for name in _RULES_FIELDS if values.get(name)}
        return cls(**{**values, **rules})

    def _rules(self) -> dict[str, QueueRules | None]:
        return {name: getattr(self, name) for name in _RULES_FIELDS}


_RULES_FIELDS = ("rules", "needed_rules")


@dataclass(slots=True)
class PartitionState:
    """
    The complete state of the fold of one markers partition.

    Attributes:
        marks: Messages that the newest term has decided and whose END is not yet read back.
        ahead: Marker offset and new value (milliseconds) of each change of `behind_ms`, ascending, from the oldest
            marker still needed on; the value before the first change is 0.
    """

    in_flight: InFlight = field(default_factory=InFlight)
    clock_ms: int = 0
    next_marker_offset: int = 0
    counters: Counters = field(default_factory=Counters)
    marks: Marks = field(default_factory=Marks)
    term: int = 0
    term_by: str = ""
    rules_log: RulesLog = field(default_factory=RulesLog)
    appended_at_ms: int = 0
    ahead: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def empty(cls, rules: QueueRules | None = None) -> PartitionState:
        """Return the state before the first marker."""
        return cls(rules_log=RulesLog.beginning_with(rules))

    @classmethod
    def rebuilding(cls, rules: QueueRules | None, clock: ClockStart, markers: Iterable[LoggedMarker]) -> PartitionState:
        """Return the state before the first marker that a rebuild reads."""
        state, appended_at_ms = cls.empty(rules), clock.appended_at_ms
        if appended_at_ms < 0:
            timed = (each[:2] for each in markers if each[1] >= 0)
            appended_at_ms = min(timed, default=(0, 0))[1]
        state.clock_ms, state.appended_at_ms = appended_at_ms + clock.ahead_ms, appended_at_ms
        state.ahead = [(BEFORE_ALL, clock.ahead_ms)] if clock.ahead_ms else []
        return state

    def note_ahead(self, marker_offset: int) -> None:
        """Record how far the clock is ahead at a marker, if that changed."""
        if self.behind_ms != (self.ahead[-1][1] if self.ahead else 0):
            self.ahead.append((marker_offset, self.behind_ms))

    def _ahead_at(self, marker_offset: int) -> int:
        return next((ahead_ms for offset, ahead_ms in reversed(self.ahead) if offset <= marker_offset), 0)

    def forget_the_old(self) -> None:
        """
        Drop changes of rules and clock that no marker needs any more.

        Needed are the changes from the oldest START on, and the values in force there.
        """
        needed = self._needed_marker_offset()
        self.rules_log = self.rules_log.needed_from(needed)
        if self.ahead:
            ahead_ms = self._ahead_at(needed)
            first = [(BEFORE_ALL, ahead_ms)] if ahead_ms else []
            self.ahead = first + [change for change in self.ahead if change[0] > needed]

    def _needed_marker_offset(self) -> int:
        start = self.in_flight.smallest_start_marker_offset()
        return self.next_marker_offset if start is None else start

    def next_deadline_at_ms(self) -> int | None:
        """Return the earliest deadline of a message that is not marked, on the partition's clock; None for none."""
        return self.unmarked().earliest_deadline_at_ms()

    def unmarked(self) -> Columns:
        """Return the messages in flight that are not marked, in runs."""
        if not self.marks.message_count:
            return self.in_flight.columns
        table = self.marks.split(self.in_flight)
        return table.columns.take(~self.marks.cover(table))

    @property
    def behind_ms(self) -> int:
        """How far the broker's clock is behind the partition's clock, milliseconds, at least 0."""
        return self.clock_ms - self.appended_at_ms

    def on_brokers_clock(self, deadline_at_ms: NDArray[np.int64]) -> NDArray[np.int64]:
        """Convert deadlines to the broker's clock, epoch milliseconds; `REJECTED` is not changed."""
        if not self.behind_ms:
            return deadline_at_ms
        return np.where(deadline_at_ms == REJECTED, REJECTED, deadline_at_ms - self.behind_ms)

    def status(self) -> Status:
        """Return the status that the other parts of the tracker need."""
        needed = self._needed_marker_offset()
        deadline_at_ms = self.next_deadline_at_ms()
        if deadline_at_ms is not None and deadline_at_ms != REJECTED:
            deadline_at_ms -= self.behind_ms
        return Status(
            next_marker_offset=self.next_marker_offset,
            clock_ms=self.clock_ms,
            in_flight=self.in_flight.message_count,
            needed_marker_offset=needed,
            next_deadline_at_ms=deadline_at_ms,
            counters=self.counters.to_dict(),
            rules=self.rules_log.in_force,
            needed_rules=self.rules_log.at(needed),
            behind_ms=self.behind_ms,
            marked=self.marks.message_count,
            needed_ahead_ms=self._ahead_at(needed),
            term=self.term,
            term_by=self.term_by,
        )

    def to_bytes(self) -> bytes:
        """Encode the state in version `STATE_VERSION`."""
        counts = [getattr(self.counters, name) for name in _COUNTER_NAMES]
        numbers = (self.clock_ms, self.appended_at_ms, self.next_marker_offset, self.term, *counts)
        pieces: list[bytes | memoryview] = [struct.pack(f"<{len(numbers)}q", *numbers)]
        pieces += _pieces_of(self.in_flight)
        pieces += [*pack_column(self.marks.first.astype(np.int64)), *pack_column(self.marks.end.astype(np.int64))]
        term_by = self.term_by.encode()
        pieces += [_COUNT.pack(len(term_by)), term_by]
        pieces += _pieces_of_rules(self.rules_log)
        for column in zip(*self.ahead, strict=True) if self.ahead else ((), ()):
            pieces += pack_column(np.array(column, dtype=np.int64))
        checksum = 0
        for piece in pieces:
            checksum = zlib.crc32(piece, checksum)
        return b"".join([_HEAD.pack(_MAGIC, STATE_VERSION, len(counts), checksum), *pieces])

    @classmethod
    def from_bytes(cls, blob: bytes | bytearray | memoryview) -> PartitionState:
        """Decode a state."""
        view = memoryview(blob)
        if len(view) < _HEAD.size or bytes(view[:4]) != _MAGIC:
            raise StateError(f"cannot read tracker state: got {bytes(view[:4])!r}, {_MAGIC!r} expected; {_AGAIN}")
        _, version, counter_count, checksum = _HEAD.unpack_from(view)
        if version != STATE_VERSION or counter_count > len(_COUNTER_NAMES):
            raise StateError(
                f"cannot read tracker state: version {version!r} with {counter_count!r} counters, this build reads "
                f"version {STATE_VERSION} with up to {len(_COUNTER_NAMES)}; {_AGAIN}"
            )
        rest = view[_HEAD.size :]
        if zlib.crc32(rest) != checksum:
            raise StateError(f"cannot read tracker state: {len(view)} bytes with a wrong checksum; {_AGAIN}")
        try:
            numbers = struct.unpack_from(f"<{4 + counter_count}q", rest)
            in_flight, marks, term_by, rules_log, ahead = _parts_of(rest, 8 * len(numbers))
        except (StateError, struct.error, ValueError, MemoryError) as error:
            raise StateError(f"cannot read tracker state: {error}; {_AGAIN}") from error
        clock_ms, appended_at_ms, next_marker_offset, term, *counts = numbers
        counters = Counters(**dict(zip(_COUNTER_NAMES, counts, strict=False)))
        return cls(
            in_flight, clock_ms, next_marker_offset, counters, marks, term, term_by, rules_log, appended_at_ms, ahead
        )


def _pieces_of(table: InFlight) -> list[bytes | memoryview]:
    """Encode a table: its columns, then its texts."""
    *columns, text, jitter_ms = table.columns.arrays()
    # Only the texts in use, in the order in which the rows use them, so that equal states have equal bytes.
    rows = np.flatnonzero(text)
    used, first, place = np.unique(text[rows], return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty(len(used), dtype=np.int64)
    number[order] = np.arange(1, len(used) + 1)
    numbers = np.zeros(len(text), dtype=np.int64)
    numbers[rows] = number[place]
    texts = [table.texts[each].encode() for each in used[order].tolist()]
    pieces: list[bytes | memoryview] = []
    for column in (*columns, numbers, jitter_ms.view(np.int64)):
        pieces += pack_column(column.astype(np.int64, copy=False))
    pieces += pack_column(np.fromiter(map(len, texts), dtype=np.int64, count=len(texts)))
    return pieces + texts


def _pieces_of_rules(log: RulesLog) -> list[bytes]:
    """Encode the queue's rules: the number of changes, then each change."""
    pieces = [_COUNT.pack(len(log.changes))]
    for marker_offset, rules in log.changes:
        backoff = rules.backoff
        numbers = (backoff.kind, backoff.initial_ms, backoff.max_ms, backoff.jitter, rules.dead_letters_expired)
        pieces.append(_RULES.pack(marker_offset, rules.version, rules.max_deliveries, *numbers))
    return pieces


def _parts_of(view: memoryview, at: int) -> tuple[InFlight, Marks, str, RulesLog, list[tuple[int, int]]]:
    """Decode messages in flight, marks, tracker, rules and clock changes; they must fill *view* exactly."""
    in_flight, at = _table_of(view, at)
    first, at = unpack_column(view, at)
    end, at = unpack_column(view, at)
    (length,) = _COUNT.unpack_from(view, at)
    at += _COUNT.size + length
    term_by = str(view[at - length : at], "utf-8")
    (count,) = _COUNT.unpack_from(view, at)
    at += _COUNT.size
    changes = []
    for _ in range(count):
        marker_offset, version, limit, kind, initial_ms, max_ms, jitter, expired = _RULES.unpack_from(view, at)
        backoff = Backoff(BackoffKind(kind), initial_ms, max_ms, jitter)
        changes.append((marker_offset, QueueRules(version, limit, backoff, expired)))
        at += _RULES.size
    offsets, at = unpack_column(view, at)
    aheads_ms, at = unpack_column(view, at)
    if at != len(view):
        raise StateError(f"length differs: got {len(view)} bytes, {at} expected")
    ahead = list(zip(offsets.tolist(), aheads_ms.tolist(), strict=True))
    marks = Marks(first.astype(np.uint64), end.astype(np.uint64))
    return in_flight, marks, term_by, RulesLog(tuple(changes)), ahead


def _table_of(view: memoryview, at: int) -> tuple[InFlight, int]:
    """Decode a table; return it and the position after it."""
    columns = []
    for _ in range(9):
        column, at = unpack_column(view, at)
        columns.append(column)
    *rows, text_lengths = columns
    key, count, deadline_at_ms, delivery_count, start_marker_offset, given_back, text, jitter_ms = rows
    if any(len(column) != len(key) for column in rows):
        raise StateError(f"columns of unequal length: got {[len(column) for column in rows]!r}")
    if len(key) and int(count.min()) < 1:
        raise StateError(f"run without messages: got count {int(count.min())}, minimum 1")
    texts = [""]
    for length in text_lengths.tolist():
        texts.append(str(view[at : at + length], "utf-8"))
        at += length
    if len(text) and not 0 <= text.min() <= text.max() < len(texts):
        raise StateError(f"texts contradict their rows: got number {text.max()} of {len(texts)} texts")
    flags, delays_ms = given_back.astype(np.bool_), jitter_ms.view(np.float64)
    if not 0 <= delays_ms.min(initial=0) <= delays_ms.max(initial=0) <= MAX_BACKOFF_MS:
        raise StateError(f"jitter out of bounds: got {delays_ms.max()} ms, allowed 0 to {MAX_BACKOFF_MS}")
    table = Columns(key, count, deadline_at_ms, delivery_count, start_marker_offset, flags, text, delays_ms)
    return InFlight(table, tuple(texts)), at
