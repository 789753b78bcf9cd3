"""
Consumers' hands: what handlers were given and did, by their event files, against what their consumers wrote.

Rule 1: a consumer speaks about what it holds: a KEEPALIVE or an END needs a START of its own for that message.
Rule 2: one START hands out one delivery at most; one that was given back as uncounted hands out none.
Rule 3: an ACKED needs a handler of that consumer that returned from that copy before; REJECTED and FAILED likewise.
Rule 4: consumers and event files belong together by their process id, which both have in their names.
Rule 5: a consumer repeats an ACKED whose first copy has no answer: only where the broker was away between the START and
that ACKED, and once for each `ANSWER_MS` of it at most; or where it wrote the event `resent`, and once for each. It
logs that once in `ANSWER_MS` at most, so that what it repeats up to `ANSWER_MS` later is covered.
Rule 6: events carry a monotonic clock, which all processes of a machine share. The injector's wall clock is right: its
events say what the monotonic clock means in true time.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from faults.copies import due_at_ms, expires_at_ms
from faults.protocol import LOGICAL_QUEUE as QUEUE
from faults.protocol import MarkerType, MessageId, Outcome, Release
from faults.topics import Record

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from faults.protocol import Marker
    from faults.topics import Dump
    from faults.waits import Bounds

EDGE_MS = 250
"""How exactly an event's time and an append time can be compared."""

ANSWER_MS = 10_000
"""After this time without an answer a consumer writes a marker again: its producer's `delivery.timeout.ms`."""

INJECTOR = "injector"

_OF_WRITER = re.compile(r"-(\d+)-[0-9a-f]{4}$")
_OF_ACTOR = re.compile(r"-(\d+)$")


class Finding(NamedTuple):
    """Of which invariant, and what."""

    invariant: str
    what: str


class Said(NamedTuple):
    """
    What a consumer wrote about one message.

    Attributes:
        partition: Markers partition.
        marker_offset: Where.
        at_ms: Append time, true.
        read_ms: Append time, as the broker's clock showed it.
        marker: What.
    """

    partition: int
    marker_offset: int
    at_ms: int
    read_ms: int
    marker: Marker


def process_of_writer(name: str) -> str:
    """Return the process id in the name of a consumer, role-host-process-random; the name where there is none."""
    found = _OF_WRITER.search(name)
    return found[1] if found else name


def process_of_actor(name: str) -> str:
    """Return the process id in the name of an event file, worker-process; the name where there is none."""
    found = _OF_ACTOR.search(name)
    return found[1] if found else name


class TrueTimes:
    """
    Turns the monotonic clock of events into epoch milliseconds.

    Args:
        events: All of a queue; the injector's are used.
    """

    def __init__(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Collect what the injector saw on both clocks."""
        seen = sorted((float(one["monotonic"]), float(one["wall"])) for one in events if _is_timed(one))
        self._monotonic = [at for at, _ in seen]
        self._ahead = [wall - at for at, wall in seen]

    def of(self, event: Mapping[str, Any]) -> int | None:
        """Return when an event was; None where that cannot be known."""
        if not self._monotonic or "monotonic" not in event:
            return None
        at = float(event["monotonic"])
        nearest = min(bisect_left(self._monotonic, at), len(self._monotonic) - 1)
        return round(1000 * (at + self._ahead[nearest]))


def _is_timed(event: Mapping[str, Any]) -> bool:
    return event.get("actor") == INJECTOR and "monotonic" in event and "wall" in event


Holding = tuple[MessageId, str]
"""A message, and the process that had it."""


class Hands:
    """
    What each process did with each message, by events and by markers.

    Attributes:
        began: First event of each process, which describes it, by process id.
        done: By kind of event, message and process: when; None where that cannot be known.
        given: Messages that handlers were given, with the names that they had.
        said: By message and process: what it wrote, in log order.
        acked_again: ACKEDs that were repeated because the first had no answer, once `findings` was asked.

    Args:
        dump: Topics.
        events: All of a queue.
        bounds: True append times.
        trackers: Names of trackers, which are no consumers.
    """

    def __init__(self, dump: Dump, events: Sequence[Mapping[str, Any]], bounds: Bounds, trackers: set[str]) -> None:
        """Put both in order."""
        times = TrueTimes(events)
        self.began = {process_of_actor(str(one["actor"])): one for one in events if one["event"] == "began"}
        self.done: defaultdict[str, defaultdict[Holding, list[int | None]]] = defaultdict(lambda: defaultdict(list))
        self.given: list[tuple[MessageId, str]] = []
        for event in events:
            if "copy" in event:
                copy, kind = MessageId(*event["copy"]), str(event["event"])
                self.done[kind][copy, process_of_actor(str(event.get("actor", "")))].append(times.of(event))
                if kind == "delivered":
                    self.given.append((copy, str(event.get("id", ""))))
        self.said: defaultdict[Holding, list[Said]] = defaultdict(list)
        for partition, log in dump.markers.items():
            for offset, read_ms, marker in log:
                if marker is None or (partition, offset) in dump.injected or marker.writer in trackers:
                    continue
                at_ms, writer = bounds.marker_ms(partition, offset, read_ms), process_of_writer(marker.writer)
                for message_id in marker.covered():
                    self.said[message_id, writer].append(Said(partition, offset, at_ms, read_ms, marker))
        self._records = {record.place: record for record in dump.messages}
        self._slack_ms = EDGE_MS + bounds.slack_ms
        self._away = bounds.away
        self._resent: defaultdict[str, list[int]] = defaultdict(list)
        for event in events:
            if event["event"] == "resent" and (said_ms := times.of(event)) is not None:
                self._resent[process_of_actor(str(event.get("actor", "")))].append(said_ms)
        self.acked_again = 0

    def findings(self) -> Iterator[Finding]:
        """Yield what is wrong."""
        for holding, said in self.said.items():
            yield from self._speech(holding, said)
        for holding, delivered in self.done["delivered"].items():
            yield from self._handing_out(holding, delivered)
        for copy, name in self.given:
            record = self._records.get(copy)
            if record is None or record.id != name:
                yield Finding("I2", f"a handler was given {name!r} as {copy}, which is {record and record.id!r}")
        yield from self._strangers()

    def starts(self) -> dict[MessageId, list[tuple[str, int]]]:
        """Return by which process, and when, each message was started, in log order."""
        found: defaultdict[MessageId, list[tuple[int, int, str, int]]] = defaultdict(list)
        for (copy, process), said in self.said.items():
            for one in said:
                if one.marker.type is MarkerType.START:
                    found[copy].append((one.partition, one.marker_offset, process, one.at_ms))
        return {copy: [(process, at_ms) for _, _, process, at_ms in sorted(each)] for copy, each in found.items()}

    def _strangers(self) -> Iterator[Finding]:
        """Yield messages that were started by consumers of another logical queue."""
        for (copy, process), said in self.said.items():
            record, ours = self._records.get(copy), self.began.get(process, {}).get("queue")
            if record is None or ours is None or all(one.marker.type is not MarkerType.START for one in said):
                continue
            theirs = (record.header(QUEUE) or b"").decode("utf-8", "replace")
            if theirs != ours:
                yield Finding("I2", f"{copy} of logical queue {theirs!r} was started by a consumer of {ours!r}")

    def _speech(self, holding: Holding, said: Sequence[Said]) -> Iterator[Finding]:
        """Judge what a process wrote about a message."""
        copy, process = holding
        has_started = False
        acked = started = 0
        for one in said:
            marker = one.marker
            if marker.type is MarkerType.START:
                has_started = True
                started += not marker.never_handed_out
                yield from self._start(copy, one)
            elif not has_started:
                kind = marker.outcome.name if marker.type is MarkerType.END else marker.type.name
                yield Finding("I12", f"{marker.writer!r} wrote {kind} of {copy}, and has not started it")
            if marker.type is MarkerType.END:
                acked += marker.outcome is Outcome.ACKED
                yield from self._end(holding, one)
            if marker.release is Release.FAILED and not marker.never_handed_out:
                yield from self._caused(holding, one, "raised", "a failure")
        if acked > started > 0:
            again = acked - started
            if again > self._repeats(process, said[0].at_ms, said[-1].at_ms):
                yield Finding("I4", f"process {process} acked {copy} {acked} times, and started it {started} times")
            self.acked_again += again

    def _repeats(self, process: str, from_ms: int, until_ms: int) -> int:
        """Return how often a process may have repeated a marker without an answer in a span of time."""
        by_absence = sum(
            1 + (end_ms - begin_ms) // ANSWER_MS
            for begin_ms, end_ms in self._away
            if begin_ms <= until_ms and end_ms >= from_ms
        )
        said = [at_ms for at_ms in self._resent[process] if from_ms - ANSWER_MS <= at_ms <= until_ms + self._slack_ms]
        return by_absence + len(said)

    def _start(self, copy: MessageId, one: Said) -> Iterator[Finding]:
        record = self._records.get(copy)
        if record is None:
            return
        # A first copy that is to wait is put off, whatever the time.
        due_ms = due_at_ms(record)
        if due_ms and not one.marker.never_handed_out:
            yield Finding("I7", f"{copy} was started, and asks for a delay")
        elif due_ms > one.marker.due_at_ms:
            yield Finding("I7", f"{copy} was put off until {one.marker.due_at_ms}, asked for {due_ms}")

    def _end(self, holding: Holding, one: Said) -> Iterator[Finding]:
        """Judge an END."""
        outcome, record = one.marker.outcome, self._records.get(holding[0])
        if record is None:
            return
        if outcome is Outcome.EXPIRED:
            yield from self._expired(holding, record, one)
            return
        if outcome is Outcome.ACKED:
            yield from self._caused(holding, one, "handled", "an ack")
        elif outcome is Outcome.REJECTED:
            yield from self._caused(holding, one, "rejected", "a rejection")

    def _caused(self, holding: Holding, one: Said, event: str, what: str) -> Iterator[Finding]:
        """Judge whether a handler did what its consumer says that it did, and before."""
        times = self.done[event].get(holding, [])
        if not times:
            yield Finding("I1", f"{holding[0]}: {what} by {one.marker.writer!r}, and no handler of it {event} it")
        elif all(at_ms is not None and at_ms > one.at_ms + self._slack_ms for at_ms in times):
            yield Finding("I1", f"{holding[0]}: {what} by {one.marker.writer!r} before its handler had {event} it")

    def _expired(self, holding: Holding, record: Record, one: Said) -> Iterator[Finding]:
        expiry_ms = expires_at_ms(record)
        started_ms = max((each.read_ms for each in self._started(holding) if each[:2] < one[:2]), default=0)
        if started_ms < expiry_ms:
            yield Finding("I1", f"{holding[0]} was dropped as expired {expiry_ms - started_ms} ms before its time")

    def _started(self, holding: Holding) -> list[Said]:
        return [one for one in self.said.get(holding, ()) if one.marker.type is MarkerType.START]

    def _handing_out(self, holding: Holding, delivered: Sequence[int | None]) -> Iterator[Finding]:
        """Judge what a handler was given."""
        copy, process = holding
        starts = [one for one in self._started(holding) if not one.marker.never_handed_out]
        if len(delivered) > len(starts):
            what = f"{len(delivered)} times, and started {len(starts)} times"
            yield Finding("I4", f"{copy} was handed out in process {process} {what}")
            return
        if len(delivered) > len(starts) - self._taken_back(holding):
            yield Finding("I6", f"{copy} was handed out in process {process}, and given back as if it had not been")
        known = sorted(at_ms for at_ms in delivered if at_ms is not None)
        for at_ms, start in zip(known, sorted(start.at_ms for start in starts), strict=False):
            if at_ms < start - self._slack_ms:
                yield Finding("I1", f"{copy} was handed out {start - at_ms} ms before its START was durable")
        record = self._records.get(copy)
        if record is not None and all(start.read_ms >= expires_at_ms(record) for start in starts):
            yield Finding("I7", f"{copy} was handed out after its time to live was over")

    def _taken_back(self, holding: Holding) -> int:
        """Return how many STARTs a process has given back as uncounted."""
        found = is_held = 0
        for one in self.said.get(holding, ()):
            marker = one.marker
            if marker.type is MarkerType.START:
                is_held = not marker.never_handed_out
            elif marker.type is MarkerType.KEEPALIVE and marker.never_handed_out and is_held:
                found, is_held = found + 1, False
        return found
