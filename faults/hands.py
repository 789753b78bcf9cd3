"""
Consumers: what handlers were given and did, by their event files, against what their consumers wrote.

Rule 1: consumers and event files belong together by their process id: it is in a consumer's name and in the event that
a worker writes as it begins.
Rule 2: what a promise leaves room for (a message started again, an ack written again) needs a cause, and has a bound.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from faults.copies import due_at_ms, expires_at_ms
from faults.evidence import Violation
from faults.oracle import covered
from kmq_spark.core.markers import MarkerType, MessageId, Outcome, Release
from kmq_spark.wire.headers import LOGICAL_QUEUE, ORIGIN, SILENT_COUNT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from faults.evidence import Evidence, Verdict
    from faults.topics import Record
    from kmq_spark.core.markers import Marker

EDGE_MS = 250
"""How exactly an event's time and an append time can be compared."""

ANSWER_MS = 10_000
"""After this time without an answer a consumer writes a marker again: its producer's `delivery.timeout.ms`."""

WAKES_MS = 2_000
"""So long after a process was resumed it may write what it was about to write when it was suspended."""

LOST_MS = 1_000
"""A consumer counts a lease from before it writes the START: so much sooner it may take it for lost."""

TRANSACTION, JOB = "transaction", "job"
"""Modes of the workers that acknowledge in transactions: many messages in one, in a loop; and one in a handler."""

PROCESS = "process"
"""Header of a result: the id of the process that wrote it. Its key is the place of the copy."""

DONE = frozenset({"handled", "raised", "rejected", "released"})
_OF_WRITER = re.compile(r"-(\d+)-[0-9a-f]{4}$")

Holding = tuple[MessageId, str]
"""A message, and the process that had it."""


class Start(NamedTuple):
    """Where the START of a message lies, which process wrote it, and when."""

    partition: int
    offset: int
    process: str
    at_ms: int


class SecondStart(NamedTuple):
    """A START of a message that had one, with the one before it."""

    copy: MessageId
    before: Start
    start: Start


class Said(NamedTuple):
    """What a consumer wrote about one message: where, when in true time, when by the broker's clock, and what."""

    partition: int
    offset: int
    at_ms: int
    read_ms: int
    marker: Marker


class Hands:
    """What each process, by its id, did with each message, by events (`done`) and by markers in log order (`said`)."""

    def __init__(self, evidence: Evidence, messages: Mapping[MessageId, Record]) -> None:
        self._evidence, self._messages = evidence, messages
        self._pids = {str(one["actor"]): str(one["pid"]) for one in evidence.events if one["event"] == "began"}
        self.began = {self._pids[str(one["actor"])]: one for one in evidence.events if one["event"] == "began"}
        self.done: defaultdict[str, defaultdict[Holding, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.resent: defaultdict[str, list[int]] = defaultdict(list)
        for event in evidence.events:
            if "copy" in event:
                holding = MessageId(*event["copy"]), self.process_of(event)
                self.done[str(event["event"])][holding].append(evidence.true_ms(event))
            elif event["event"] == "resent":
                self.resent[self.process_of(event)].append(evidence.true_ms(event))
        self.said: defaultdict[Holding, list[Said]] = defaultdict(list)
        # Where a consumer that was given a partition wrote that it looks what others have started, by both.
        self.looks: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
        bounds, trackers = evidence.bounds, evidence.trackers
        for partition, log in evidence.dump.markers.items():
            for offset, read_ms, marker in log:
                is_injected = (partition, offset) in evidence.dump.injected
                if marker is None or is_injected or marker.consumer_id in trackers:
                    continue
                at_ms, found = bounds.marker_ms(partition, offset, read_ms), _OF_WRITER.search(marker.consumer_id)
                process = found[1] if found else marker.consumer_id
                if marker.type is MarkerType.TICK:
                    self.looks[partition, process].append(offset)
                for message in covered(marker):
                    self.said[message, process].append(Said(partition, offset, at_ms, read_ms, marker))
        self._slack_ms = EDGE_MS + bounds.slack_ms
        self.acked_again = 0

    def process_of(self, event: Mapping[str, Any]) -> str:
        """Return the process id of an event's actor; its name where it has none."""
        actor = str(event.get("actor", ""))
        return self._pids.get(actor, actor)

    def starts(self) -> dict[MessageId, list[Start]]:
        """Return where, by which process, and when each message was started, in log order."""
        found: defaultdict[MessageId, list[Start]] = defaultdict(list)
        for (copy, process), said in self.said.items():
            for one in said:
                if one.marker.type is MarkerType.START:
                    found[copy].append(Start(one.partition, one.offset, process, one.at_ms))
        return {copy: sorted(each) for copy, each in found.items()}

    def started_again(self) -> list[SecondStart]:
        """Return each START of a message that had one, with the one before it."""
        return [SecondStart(copy, *pair) for copy, found in self.starts().items() for pair in pairwise(found)]

    def faults(self) -> Iterator[Violation]:
        """Yield what is wrong."""
        for holding, said in self.said.items():
            yield from self._speech(holding, said)
        for holding, delivered in self.done["delivered"].items():
            yield from self._handing_out(holding, delivered)
        for event in self._evidence.events:
            if event["event"] == "delivered":
                copy, name = MessageId(*event["copy"]), str(event.get("id", ""))
                record = self._messages.get(copy)
                if record is None or record.id != name:
                    what = f"a handler was given {name!r} as {copy}, which is {record and record.id!r}"
                    yield Violation("I2", what)

    def _speech(self, holding: Holding, said: Sequence[Said]) -> Iterator[Violation]:
        """Judge what a process wrote about a message."""
        copy, process = holding
        record, started, acked, has_started = self._messages.get(copy), 0, 0, False
        for one in said:
            marker = one.marker
            if marker.type is MarkerType.START:
                has_started, started = True, started + (not marker.never_handed_out)
                if record is not None:
                    yield from self._start(record, process, one)
            elif not has_started:
                kind = marker.outcome.name if marker.type is MarkerType.END else marker.type.name
                yield Violation("I12", f"{marker.consumer_id!r} wrote {kind} of {copy}, and has not started it")
            if marker.type is MarkerType.END and record is not None:
                acked += marker.outcome is Outcome.ACKED
                yield from self._end(holding, record, one)
            if marker.release is Release.FAILED and not marker.never_handed_out:
                yield from self._caused(holding, one, "raised", "a failure")
        if acked > started > 0:
            again = acked - started
            if again > self._repeats(process, said[0].at_ms, said[-1].at_ms):
                yield Violation("I4", f"process {process} acked {copy} {acked} times, and started it {started} times")
            self.acked_again += again

    def _repeats(self, process: str, from_ms: int, until_ms: int) -> int:
        """Return how often a process may repeat a marker: while something was away, or as often as it said so."""
        by_absence = sum(
            1 + (end_ms - begin_ms) // ANSWER_MS
            for begin_ms, end_ms in self._evidence.bounds.away
            if begin_ms <= until_ms and end_ms >= from_ms
        )
        first_ms, last_ms = from_ms - ANSWER_MS, until_ms + self._slack_ms
        return by_absence + sum(first_ms <= at_ms <= last_ms for at_ms in self.resent[process])

    def _start(self, record: Record, process: str, one: Said) -> Iterator[Violation]:
        ours, theirs = (
            self.began.get(process, {}).get("queue"),
            (record.header(LOGICAL_QUEUE) or b"").decode("utf-8", "replace"),
        )
        if ours is not None and theirs != ours:
            yield Violation("I2", f"{record.place} of logical queue {theirs!r} was started by a consumer of {ours!r}")
        # A first copy that is to wait is put off, whatever the time.
        due_ms = due_at_ms(record)
        if due_ms and not one.marker.never_handed_out:
            yield Violation("I7", f"{record.place} was started, and asks for a delay")
        elif due_ms > one.marker.due_at_ms:
            yield Violation("I7", f"{record.place} was put off until {one.marker.due_at_ms}, asked for {due_ms}")

    def _end(self, holding: Holding, record: Record, one: Said) -> Iterator[Violation]:
        match one.marker.outcome:
            case Outcome.ACKED:
                yield from self._caused(holding, one, "handled", "an ack")
            case Outcome.REJECTED:
                yield from self._caused(holding, one, "rejected", "a rejection")
            case Outcome.EXPIRED:
                yield from self._expired(holding, record, one)

    def _caused(self, holding: Holding, one: Said, event: str, what: str) -> Iterator[Violation]:
        """Judge whether a handler did what its consumer says that it did, and before."""
        times, who = self.done[event].get(holding, []), f"{holding[0]}: {what} by {one.marker.consumer_id!r}"
        if not times:
            yield Violation("I1", f"{who}, and no handler of it {event} it")
        elif min(times) > one.at_ms + self._slack_ms:
            yield Violation("I1", f"{who} before its handler had {event} it")

    def _expired(self, holding: Holding, record: Record, one: Said) -> Iterator[Violation]:
        expiry_ms = expires_at_ms(record)
        started_ms = max((each.read_ms for each in self._started(holding) if each[:2] < one[:2]), default=0)
        if started_ms < expiry_ms:
            yield Violation("I1", f"{holding[0]} was dropped as expired {expiry_ms - started_ms} ms before its time")

    def _started(self, holding: Holding) -> list[Said]:
        return [one for one in self.said.get(holding, ()) if one.marker.type is MarkerType.START]

    def _handing_out(self, holding: Holding, delivered: Sequence[int]) -> Iterator[Violation]:
        """Judge what a handler was given."""
        what = f"{holding[0]} was handed out in process {holding[1]}"
        starts = [one for one in self._started(holding) if not one.marker.never_handed_out]
        if len(delivered) > len(starts):
            yield Violation("I4", f"{what} {len(delivered)} times, and started {len(starts)} times")
            return
        if len(delivered) > len(starts) - self._taken_back(holding):
            yield Violation("I6", f"{what}, and given back as if it had not been")
        for at_ms, start_ms in zip(sorted(delivered), sorted(start.at_ms for start in starts), strict=False):
            if at_ms < start_ms - self._slack_ms:
                yield Violation("I1", f"{what} {start_ms - at_ms} ms before its START was durable")
        record = self._messages.get(holding[0])
        if record is not None and all(start.read_ms >= expires_at_ms(record) for start in starts):
            yield Violation("I7", f"{what} after its time to live was over")

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


def check_consumers(evidence: Evidence, messages: Mapping[MessageId, Record], verdict: Verdict) -> None:
    """I1, I2, I4, I6, I7, I12, I16, I17: what handlers did and what their consumers wrote."""
    hands = Hands(evidence, messages)
    verdict.add_all(hands.faults())
    again = hands.started_again()
    verdict.add_all(_start_faults(evidence, hands, again))
    verdict.counts |= Counter(
        acked_again=hands.acked_again,
        started_again=len(again),
        results=len(evidence.dump.results),
    )
    verdict.add_all(_result_faults(evidence, hands, messages, Counter(_origin(messages, each.copy) for each in again)))
    verdict.add_all(_suspect_faults(evidence, hands, messages))


def _origin(messages: Mapping[MessageId, Record], place: MessageId) -> MessageId:
    return messages[place].origin if place in messages else place


def _start_faults(evidence: Evidence, hands: Hands, again: Iterable[SecondStart]) -> Iterator[Violation]:
    """
    I4: a message has one START.

    A second one may be of a process that was suspended as it wrote it, and has just woken up. What the process had seen
    started, when it was given the partition, it starts in no case.
    """
    within_ms = WAKES_MS * evidence.bounds.patience
    woke_ms = {hands.process_of({"actor": process.name}): process.woke_ms for process in evidence.processes}
    for copy, before, start in again:
        looks = hands.looks[before.partition, start.process]
        at = bisect_left(looks, start.offset)
        who = f"process {start.process} started {copy} of process {before.process} again"
        if at and looks[at - 1] > before.offset:
            yield Violation("I4", f"{who}, and had looked")
        elif not any(0 <= start.at_ms + EDGE_MS - each <= within_ms for each in woke_ms.get(start.process, ())):
            yield Violation("I4", f"{who}, and had not slept")


def _result_faults(
    evidence: Evidence, hands: Hands, messages: Mapping[MessageId, Record], again: Counter[MessageId]
) -> Iterator[Violation]:
    """
    I16: each ack in a transaction has its result, each result its ack; a message has one.

    What has a result is not redelivered and is no dead letter: the tracker sees the END before the TICK. A message has
    one result more for each time that a copy of it was started again.
    """
    results = Counter(
        (MessageId.parse(record.key), (record.header(PROCESS) or b"").decode()) for record in evidence.dump.results
    )
    acks: Counter[tuple[MessageId | None, str]] = Counter(
        holding
        for holding, said in hands.said.items()
        if hands.began.get(holding[1], {}).get("mode") in {TRANSACTION, JOB}
        for one in said
        if one.marker.type is MarkerType.END and one.marker.outcome is Outcome.ACKED
    )
    for one in sorted(results.keys() | acks.keys(), key=str):
        if results[one] != acks[one]:
            what = f"{results[one]} results and {acks[one]} acks in transactions of process {one[1]}"
            yield Violation("I16", f"{one[0]} has {what}")
    by_origin = Counter(_origin(messages, copy) for copy, _ in results.elements() if copy is not None)
    followed = {record.previous for record in (*evidence.dump.messages, *evidence.dump.dead_letters)}
    for copy in sorted({copy for copy, _ in results if copy is not None and copy in followed}):
        if not again[_origin(messages, copy)]:
            yield Violation("I16", f"{copy} has a result, and was sent again or is a dead letter")
    for origin, count in sorted(by_origin.items()):
        if count > 1 + again[origin]:
            yield Violation("I16", f"{origin} has {count} results, and was started again {again[origin]} times")


def is_suspect(record: Record | None, limit: int) -> bool:
    """Return whether a copy is suspected by a consumer that isolates after *limit* silent deliveries."""
    return record is not None and record.header(ORIGIN) is not None and (record.number(SILENT_COUNT) or 0) >= limit


def _suspect_faults(evidence: Evidence, hands: Hands, messages: Mapping[MessageId, Record]) -> Iterator[Violation]:
    """
    I17: while a handler has a suspect of killing its consumer, no handler of that process has another message.

    A message is with a handler from the event in which it was given until the one that says what became of it, and no
    longer than its lease by the log: what is lost holds nothing up.
    """
    held: defaultdict[str, set[MessageId]] = defaultdict(set)
    for event in sorted((one for one in evidence.events if "copy" in one), key=lambda one: float(one["monotonic"])):
        copy, process = MessageId(*event["copy"]), hands.process_of(event)
        limit = int(hands.began.get(process, {}).get("isolate_after") or 0)
        if event["event"] in DONE:
            held[process].discard(copy)
        if event["event"] != "delivered" or not limit:
            continue
        at_ms = evidence.true_ms(event)
        for other in sorted(held[process]):
            is_one = is_suspect(messages.get(copy), limit) or is_suspect(messages.get(other), limit)
            if is_one and _is_leased(hands, other, process, at_ms):
                what = f"{copy} was handed out in process {process} together with {other}, and one of them is a suspect"
                yield Violation("I17", what)
        held[process].add(copy)


def _is_leased(hands: Hands, copy: MessageId, process: str, at_ms: int) -> bool:
    """Return whether a process holds a message by the log."""
    said = [one for one in hands.said.get((copy, process), ()) if one.at_ms <= at_ms]
    ends = [one.at_ms + one.marker.redeliver_after_ms for one in said if one.marker.type is not MarkerType.END]
    is_ended = bool(said) and said[-1].marker.type is MarkerType.END
    return bool(ends) and not is_ended and ends[-1] - LOST_MS > at_ms
