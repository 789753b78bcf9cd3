"""Each END of a tracker: who wrote it, whether a TICK justifies it, in time, and whether its cause is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from faults.conservation import cannot
from faults.copies import expires_at_ms, time_to_live_ms
from faults.protocol import Outcome
from faults.waits import Quiet, Wait

if TYPE_CHECKING:
    from collections.abc import Sequence

    from faults.leases import Justified, Segment, Session, Tick
    from faults.topics import Record
    from faults.waits import Bounds
    from faults.whole import Verdict, Whole

GONE, TOO_LARGE, TTL_OVER = "payload gone: ", "too large to redeliver: ", "expired: ttl of "
"""Causes for which a redelivery becomes a dead letter after all."""

LARGE_BYTES = 900_000
"""A redelivery that the broker refuses as too large has at least so many, by the broker's default of 1 MiB."""


def check_ends(whole: Whole, sessions: Sequence[Session], bounds: Bounds, verdict: Verdict) -> None:
    """I1, I3, I4, I5, I7, I8, I12: each END of a tracker."""
    quiet = Quiet(bounds.not_quiet)
    for partition, end in whole.ends:
        if not whole.is_injected(partition, end.marker_offset):
            _check_writer(partition, end, sessions, verdict)
        where = f"{end.outcome.name} of {end.message_id} at marker {end.marker_offset}"
        if end.segment is None and whole.is_injected(partition, end.marker_offset):
            # The injector wrote an END of the tracker once more (F9): nothing was decided, and nothing is sent.
            continue
        if end.segment is None or end.tick is None:
            # Ended before by a tracker, by a consumer, or not due yet.
            invariant = "I4" if not end.is_started else "I3" if end.is_acked else "I7"
            verdict.add(invariant, f"{where}: not due")
            continue
        segment, ended_ms = end.segment, bounds.marker_ms(partition, end.marker_offset, end.appended_at_ms)
        if segment.end < end.marker_offset:
            verdict.counts[f"{segment.ended_by.replace(' ', '_')}_after_decision"] += 1
            decided_ms = bounds.marker_ms(partition, end.tick.marker_offset, end.tick.appended_at_ms)
            # The decision is of the batch that has the TICK in it: a later one would have seen what came behind it.
            if (passed_ms := quiet.longest_ms(decided_ms, max(decided_ms, ended_ms))) > bounds.late_ms:
                verdict.add("I3", f"{where}: {segment.ended_by}, {passed_ms} ms after the TICK that could decide it")
        if end.outcome is not Outcome.REDELIVERED:
            due_ms = bounds.marker_ms(partition, segment.begin, segment.appended_at_ms) + segment.held_ms
            verdict.other_waits.append(Wait(end.message_id, max(due_ms, segment.due_at_ms), ended_ms))
        what = _Cause(end, segment, end.tick, whole.messages.get(end.message_id)).fault(whole)
        if what:
            verdict.add("I1" if end.outcome is Outcome.EXPIRED else "I5", f"{where}: {what}")


def _check_writer(partition: int, end: Justified, sessions: Sequence[Session], verdict: Verdict) -> None:
    """I12: by a tracker of this queue, and nothing of an older one where a newer one decides."""
    where = f"{end.writer!r} wrote marker {end.marker_offset} of partition {partition}"
    numbers = [number for number, session in enumerate(sessions) if session.tracker_id == end.writer]
    if not numbers:
        verdict.add("I12", f"{where}, and is no tracker of this queue")
        return
    newer = [session.decides_from.get(partition, 0) for session in sessions[numbers[-1] + 1 :]]
    if newer and end.marker_offset >= min(newer):
        verdict.add("I12", f"{where} after a newer tracker took over")
    if end.marker_offset < sessions[numbers[0]].decides_from.get(partition, 0):
        verdict.add("I12", f"{where} before it took over")
    verdict.counts["tracker_ends"] += 1


class _Cause(NamedTuple):
    """Why an END says what it says."""

    end: Justified
    segment: Segment
    tick: Tick
    source: Record | None

    @property
    def deliveries(self) -> int:
        """Deliveries; a START that carries no count, as kafka-mq-go's, leaves them to the message."""
        counted = self.source.delivery_count + 1 if self.source is not None and self.segment.is_silent else 0
        return max(self.segment.delivery_count, counted)

    @property
    def is_expired(self) -> bool:
        return self.source is not None and expires_at_ms(self.source) <= self.tick.appended_at_ms

    def fault(self, whole: Whole) -> str:
        """Return what is wrong; empty for nothing."""
        is_last = self.tick.rules.is_last(self.deliveries) or self.segment.is_rejected
        if self.end.outcome is Outcome.REDELIVERED:
            if is_last:
                return f"redelivered at delivery {self.deliveries}, or rejected"
            return "redelivered, and its time to live was over" if self.is_expired else ""
        if self.end.outcome is Outcome.EXPIRED:
            if self.end.rules.dead_letters_expired and self.source is not None:
                return "dropped, and its queue dead-letters what expires"
            # What does not exist is dropped as expired, too; and so is what was rejected, where the queue drops it.
            is_over = self.source is None or expires_at_ms(self.source) <= self.end.appended_at_ms
            return "" if is_over else "its time to live was not over"
        cause = cannot(self.end.reason)
        if cause:
            return self._false_cause(whole, cause)
        return self._false_reason() if is_last else f"a dead letter without a cause: {self.end.reason!r}"

    def _false_cause(self, whole: Whole, cause: str) -> str:
        if cause == GONE and whole.is_there(self.end.message_id):
            return "a dead letter because its payload is gone, and it is there"
        if cause == TOO_LARGE and self.source is not None and (size := _size_of(self.source)) < LARGE_BYTES:
            return f"a dead letter because it is too large, and it has {size} bytes"
        return self._false_expiry() if cause == TTL_OVER else ""

    def _false_expiry(self) -> str:
        if self.source is None or expires_at_ms(self.source) > self.end.appended_at_ms:
            return "a dead letter because its time to live was over, and it was not"
        if not self.end.rules.dead_letters_expired:
            return "a dead letter because its time to live was over, and its queue drops what expires"
        expected = f"{TTL_OVER}{time_to_live_ms(self.source)} ms was over"
        return "" if self.end.reason.startswith(expected) else f"got {self.end.reason!r}, expected {expected!r}"

    def _false_reason(self) -> str:
        reason = self.segment.reason
        expected = f"delivery limit reached: {self.deliveries} of {self.tick.rules.max_deliveries}"
        if self.segment.is_rejected:
            return "" if self.end.reason.startswith(reason) else f"rejected for {reason!r}, got {self.end.reason!r}"
        return "" if self.end.reason.startswith(expected) else f"got {self.end.reason!r}, expected {expected!r}"


def _size_of(record: Record) -> int:
    headers = sum(len(name) + len(value or b"") for name, value in record.headers)
    return len(record.key or b"") + len(record.value or b"") + headers
