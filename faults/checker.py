"""
The offline checker: the topics and the event files in, violations out.

Rule 1: exact, and clock-free where the promise is: every instant compared is the broker's.
Rule 2: what a tracker may decide is the oracle's to say (`oracle.py`); no code of the fold is used.
Rule 3: what a promise leaves room for is counted, not forgiven in silence, and has a bound.

The invariants' numbers are those of docs/internals/faults.md, which has each rule.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from faults.copies import copy_differences, expires_at_ms, letter_differences, size_of, time_to_live_ms
from faults.evidence import TRACKER, WORKER, Evidence, Verdict, Violation
from faults.hands import check_consumers
from faults.oracle import Decided, Oracle, covered, is_by_a_tracker
from faults.waits import Quiet, Wait, stalls, too_late
from kmq_spark.core.markers import MarkerType, MessageId, Outcome, Release

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from faults.evidence import Process, Reported
    from faults.topics import Dump, Record
    from kmq_spark.core.events import LoggedMarker
    from kmq_spark.core.markers import Marker
    from kmq_spark.core.policy import QueueRules

GONE, TOO_LARGE, TTL_OVER = "payload gone: ", "too large to redeliver: ", "expired: ttl of "
"""Causes for which a redelivery becomes a dead letter after all; the handler's exception may stand before them."""

LARGE_BYTES = 900_000
"""A redelivery that the broker refuses as too large has at least so many, by the broker's default of 1 MiB."""

COUNTED = ("started", "in_flight", "acked", "expired", "redelivered", "dead_lettered")
MOST_MIB = {WORKER: (300, 0), TRACKER: (1_500, 1_800)}
"""Of processes, by kind: without a JVM, and their JVM, which has a heap of 1 GiB."""

MOST_CHECKPOINT_MIB = 100
TRACEBACK = "Traceback (most recent call last)"
FENCED, CONCURRENT = "has taken over", "concurrent"
"""What a tracker says that another one has replaced; the second is Spark's word for two queries on one checkpoint."""


class Ended(NamedTuple):
    """
    A tracker's END of one message, where it lies, and what it carries out; None where no TICK could decide it.

    Its rules are those in force where it lies: a tracker applies the newest ones where it needs the payload.
    """

    partition: int
    offset: int
    at_ms: int
    message: MessageId
    marker: Marker
    rules: QueueRules
    decided: Decided | None
    wrong: str = ""
    intruder: str = ""


@dataclass(slots=True)
class _Waiting:
    """A decision whose END has not come, and what consumers have said of its message meanwhile."""

    decided: Decided
    said: str = ""
    said_at: int = -1


@dataclass(slots=True)
class Followed:
    """One markers partition, read to its end: ENDs of trackers, STARTs as marker offset and delivery count."""

    oracle: Oracle
    ends: list[Ended] = field(default_factory=list)
    starts: defaultdict[MessageId, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    found: list[Violation] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


class _Terms:
    """Which term is in force where in a markers partition, and which decisions it has carried out."""

    def __init__(self, evidence: Evidence, partition: int, log: Sequence[LoggedMarker]) -> None:
        self._begins, self._terms = [-1], [0]
        self._ends: defaultdict[MessageId, list[int]] = defaultdict(list)
        self.written: set[int] = set()
        for offset, _, marker in log:
            if marker is None:
                continue
            if marker.type is MarkerType.TERM and marker.term != self._terms[-1]:
                self._begins.append(offset)
                self._terms.append(marker.term)
            if is_by_a_tracker(marker) and (partition, offset) not in evidence.dump.injected:
                self.written.add(offset)
                for message in covered(marker):
                    self._ends[message].append(offset)

    def of(self, offset: int) -> int:
        """Return the number of the term in which a marker offset lies."""
        return bisect_right(self._begins, offset) - 1

    def decides(self, message: MessageId, tick: int) -> bool:
        """Return whether the term of a TICK carried a decision out; if not it ended before, and decided nothing."""
        ends = self._ends.get(message, [])
        at = bisect_left(ends, tick)
        return at < len(ends) and self.of(ends[at]) == self.of(tick)

    def intruder(self, offset: int, term: int) -> str:
        """Return what is wrong with the term that an END of a tracker names; empty for nothing."""
        in_force = self._terms[self.of(offset)]
        return "" if term == in_force else f"in term {term}, and term {in_force} is in force there"


def follow(evidence: Evidence, partition: int) -> Followed:
    """Read a markers partition, and match each END of a tracker with the decision that it carries out."""
    log = evidence.dump.markers[partition]
    terms = _Terms(evidence, partition, log)
    found = Followed(Oracle(evidence.rules, decides=terms.decides))
    # A transaction ends where an offset is missing: its commit has taken it.
    commits = [other.marker_offset for one, other in pairwise(log) if other.marker_offset > one.marker_offset + 1]
    order: defaultdict[int, _Order] = defaultdict(_Order)
    waiting: dict[MessageId, _Waiting] = {}
    acked: set[MessageId] = set()
    for logged in log:
        offset, at_ms, marker = logged
        for message in covered(marker) if marker is not None and marker.ranges else ():
            assert marker is not None
            if offset in terms.written:
                one, wrong = waiting.pop(message, None), ""
                if one is None:
                    wrong = "I3" if message in acked else "I7" if message in found.oracle.in_flight else "I4"
                else:
                    late = order[terms.of(offset)].is_passed(one, bisect_right(commits, offset))
                    wrong = "I3" if late else ""
                    _note_said(evidence, partition, logged, one, found)
                decided = None if one is None or wrong else one.decided
                intruder = terms.intruder(offset, marker.term)
                rules = found.oracle.rules
                found.ends.append(Ended(partition, offset, at_ms, message, marker, rules, decided, wrong, intruder))
                acked.discard(message)
                continue
            if marker.type is MarkerType.START:
                found.starts[message].append((offset, max(1, marker.delivery_count)))
                acked.discard(message)
            if message in waiting:
                _hear(waiting[message], offset, marker)
            elif marker.type is MarkerType.END and marker.outcome is Outcome.ACKED:
                found.counts["late_acks"] += message not in found.oracle.in_flight
                acked.add(message)
        for decided in found.oracle.take(logged):
            waiting[decided.message] = _Waiting(decided)
    return found


@dataclass(slots=True)
class _Order:
    """How far a term has decided: its transactions follow the order of the log."""

    transaction: int = -1
    settled: int = 0
    needed: int = 0

    def is_passed(self, one: _Waiting, transaction: int) -> bool:
        """Return whether an earlier transaction needed a TICK behind what consumers have said of this decision."""
        if transaction != self.transaction:
            self.transaction, self.settled = transaction, self.needed
        self.needed = max(self.needed, one.decided.tick)
        return bool(one.said) and one.said_at < self.settled


def _hear(one: _Waiting, offset: int, marker: Marker) -> None:
    if one.said:
        return
    if marker.type is MarkerType.START:
        one.said = "started again"
    elif marker.type is MarkerType.END:
        one.said = marker.outcome.name.lower()
    else:
        is_renewal = marker.release is Release.RENEWED and not marker.never_handed_out
        one.said = "renewed" if is_renewal else "released"
    one.said_at = offset


def _note_said(evidence: Evidence, partition: int, logged: LoggedMarker, one: _Waiting, found: Followed) -> None:
    """Count what came between decision and END, and bound how long that may be (I3)."""
    if not one.said:
        return
    found.counts[f"{one.said.replace(' ', '_')}_after_decision"] += 1
    # The decision is of the batch that has the TICK in it: a later one would have seen what came behind it.
    bounds = evidence.bounds
    decided_ms = bounds.marker_ms(partition, one.decided.tick, one.decided.tick_ms)
    ended_ms = max(decided_ms, bounds.marker_ms(partition, logged.marker_offset, logged.appended_at_ms))
    passed_ms = Quiet([*bounds.away, *bounds.held_up]).longest_ms(decided_ms, ended_ms)
    if passed_ms > bounds.late_ms:
        what = f"{one.decided.message} was {one.said}, and ended {passed_ms} ms after the TICK that could decide it"
        found.found.append(Violation("I3", what))


def open_messages(dump: Dump, rules: QueueRules) -> dict[MessageId, int]:
    """Return the messages that are in flight or that no consumer has taken, and when a deferral of each ends, or 0."""
    open_until = {record.place: 0 for record in dump.messages}
    for log in dump.markers.values():
        oracle = Oracle(rules, decides=lambda _message, _tick: False)
        started = {message for one in log if one.marker is not None for message in covered(one.marker)}
        oracle.read(log)
        for message in started:
            open_until.pop(message, None)
        for message, lease in oracle.in_flight.items():
            is_deferral = lease.is_given_back and lease.marker == lease.start
            open_until[message] = lease.deadline_ms if is_deferral else 0
    return open_until


def check(evidence: Evidence) -> Verdict:
    """Check everything that can be decided from the topics and the event files."""
    verdict, dump = Verdict(), evidence.dump
    followed = {partition: follow(evidence, partition) for partition in sorted(dump.markers)}
    messages = {record.place: record for record in dump.messages}
    ends = [end for each in followed.values() for end in each.ends]
    for each in followed.values():
        verdict.add_all(each.found)
        verdict.counts.update(each.counts)
    for end in ends:
        _check_end(evidence, end, messages.get(end.message), verdict)
    _check_copies(evidence, ends, messages, verdict)
    _check_letters(evidence, ends, messages, verdict)
    injected = _check_starts(evidence, followed, messages, verdict)
    for what in too_late([*verdict.waits, *verdict.other_waits], evidence.bounds):
        verdict.add("I8", what)
    for what in stalls(dump, evidence.bounds):
        verdict.add("I9", what)
    _check_senders(evidence, injected, verdict)
    check_consumers(evidence, messages, verdict)
    for partition, reported in evidence.reported.items():
        for what in _miscounts(evidence, dump.markers.get(partition, []), reported):
            verdict.add("I10", f"markers partition {partition}: {what}")
    for process in evidence.processes:
        verdict.add_all(_process_faults(evidence, process))
    _check_run(evidence, messages, verdict)
    _count(evidence, followed, verdict)
    return verdict


def _check_starts(
    evidence: Evidence, followed: Mapping[int, Followed], messages: Mapping[MessageId, Record], verdict: Verdict
) -> set[MessageId]:
    """I6: a START carries the count of its message's header and one more. Return what the injector has started."""
    injected = set[MessageId]()
    for partition, each in followed.items():
        for message, starts in each.starts.items():
            expected = messages[message].delivery_count + 1 if message in messages else 0
            for offset, count in starts:
                if (partition, offset) in evidence.dump.injected:
                    injected.add(message)
                elif expected and count != expected:
                    verdict.add("I6", f"START of {message} is delivery {count}, expected {expected}")
    return injected


def _check_end(evidence: Evidence, end: Ended, source: Record | None, verdict: Verdict) -> None:
    """I1, I3, I4, I5, I7, I12: who wrote an END of a tracker, whether a TICK decided it, whether its cause is one."""
    is_injected = (end.partition, end.offset) in evidence.dump.injected
    where = f"{end.marker.outcome.name} of {end.message} at marker {end.offset}"
    if not is_injected:
        _check_writer(evidence, end, verdict)
    if end.decided is None:
        if not is_injected:
            is_letter = end.marker.outcome is Outcome.DEAD_LETTERED
            verdict.add("I5" if is_letter else end.wrong, f"{where}: nothing was due there")
        return
    if end.marker.outcome is not Outcome.REDELIVERED:
        due_ms, ended_ms = _due_ms(evidence, end), evidence.bounds.marker_ms(end.partition, end.offset, end.at_ms)
        verdict.other_waits.append(Wait(end.message, due_ms, ended_ms))
    if what := _false_cause(evidence, end, end.decided, source):
        verdict.add("I1" if end.marker.outcome is Outcome.EXPIRED else "I5", f"{where}: {what}")


def _due_ms(evidence: Evidence, end: Ended) -> int:
    """Return when a lease was over, in true time."""
    assert end.decided is not None
    lease = end.decided.lease
    began_ms = evidence.bounds.marker_ms(end.partition, lease.marker, lease.at_ms)
    return max(began_ms + lease.held_ms, lease.due_at_ms)


def _check_writer(evidence: Evidence, end: Ended, verdict: Verdict) -> None:
    """I12: a tracker of this queue, in the newest term of the log below."""
    writer = end.marker.consumer_id
    where = f"{writer!r} wrote marker {end.offset} of partition {end.partition}"
    if writer not in evidence.trackers:
        verdict.add("I12", f"{where}, and is no tracker of this queue")
    elif end.intruder:
        verdict.add("I12", f"{where} {end.intruder}")


def cause_of(reason: str) -> str:
    """Return the cause in a reason for which a redelivery becomes a dead letter after all; empty for none."""
    found = [(at, cause) for cause in (GONE, TOO_LARGE, TTL_OVER) if (at := f"; {reason}".find(f"; {cause}")) >= 0]
    return min(found)[1] if found else ""


def _false_cause(evidence: Evidence, end: Ended, decided: Decided, source: Record | None) -> str:
    """Return what is wrong with what an END says; empty for nothing."""
    outcome, lease = end.marker.outcome, decided.lease
    # A START that carries no count, as kafka-mq-go's, leaves the count to the message.
    counted = source.delivery_count + 1 if source is not None and lease.is_silent else 0
    deliveries, limit = max(lease.count, counted), decided.rules.max_deliveries
    is_last = lease.is_rejected or 0 < limit <= deliveries
    if outcome is Outcome.REDELIVERED:
        is_over = source is not None and expires_at_ms(source) <= decided.tick_ms
        wrong = f"redelivered at delivery {deliveries}, or rejected" if is_last else ""
        return wrong or ("redelivered, and its time to live was over" if is_over else "")
    if outcome is Outcome.EXPIRED:
        # What does not exist is dropped as expired, too; and so is what was rejected, where the queue drops it.
        is_kept = end.rules.dead_letters_expired and source is not None
        is_early = source is not None and expires_at_ms(source) > end.at_ms
        return "dropped, before its time to live was over or where its queue keeps it" if is_kept or is_early else ""
    if cause := cause_of(end.marker.reason):
        return _false_death(evidence, end, cause, source)
    if not is_last:
        return f"a dead letter without a cause: {end.marker.reason!r}"
    reached = f"delivery limit reached: {deliveries} of {limit}"
    return _differs(end.marker.reason, lease.reason if lease.is_rejected else reached)


def _false_death(evidence: Evidence, end: Ended, cause: str, source: Record | None) -> str:
    """Return what is wrong with the cause for which a redelivery became a dead letter after all."""
    if cause == GONE:
        is_there = source is not None and end.message not in evidence.dump.removed
        return "a dead letter because its payload is gone, and it is there" if is_there else ""
    if source is None:
        return ""
    if cause == TOO_LARGE:
        size = size_of(source)
        return f"a dead letter because it is too large, and it has {size} bytes" if size < LARGE_BYTES else ""
    if expires_at_ms(source) > end.at_ms or not end.rules.dead_letters_expired:
        return "a dead letter because its time to live was over, and it was not, or its queue drops what expires"
    return _differs(end.marker.reason, f"{TTL_OVER}{time_to_live_ms(source)} ms was over")


def _differs(reason: str, expected: str) -> str:
    return "" if reason.startswith(expected) else f"got {reason!r}, expected {expected!r}"


def _by_previous(records: Sequence[Record]) -> dict[MessageId, list[Record]]:
    found: defaultdict[MessageId, list[Record]] = defaultdict(list)
    for record in sorted(records, key=lambda each: each.place):
        if record.previous is not None:
            found[record.previous].append(record)
    return found


def _ends_of(ends: Sequence[Ended], outcome: Outcome) -> dict[MessageId, list[Ended]]:
    found: defaultdict[MessageId, list[Ended]] = defaultdict(list)
    for end in ends:
        if end.marker.outcome is outcome:
            found[end.message].append(end)
    return found


def _check_copies(
    evidence: Evidence, ends: Sequence[Ended], messages: Mapping[MessageId, Record], verdict: Verdict
) -> None:
    """I1, I4, I6, I7, I11: as many copies as ENDs with REDELIVERED, in their order, each as it must be, not early."""
    copies, redelivered = _by_previous(evidence.dump.messages), _ends_of(ends, Outcome.REDELIVERED)
    for place in sorted(redelivered.keys() | copies.keys()):
        mine, found = redelivered.get(place, []), copies.get(place, [])
        if len(found) != len(mine):
            invariant = "I4" if len(found) > len(mine) else "I1"
            verdict.add(invariant, f"{place} has {len(found)} copies, and {len(mine)} ENDs with REDELIVERED")
        for end, copy in zip(mine, found, strict=False):
            if end.decided is None:
                continue
            _check_early(evidence, end, copy, verdict)
            if place in messages:
                verdict.add_all(copy_differences(messages[place], end.decided, copy))
            else:
                verdict.add("I11", f"{copy.place} follows {place}, which is no message")
    verdict.counts["redelivered"] = sum(map(len, copies.values()))
    letters = Counter(letter.origin for letter in evidence.dump.dead_letters)
    back = Counter(record.origin for record in evidence.dump.messages if record.is_redriven)
    for origin, count in (back - letters).items():
        verdict.add("I5", f"{origin} came back from the dead-letter topic {count} times more often than it was there")


def _check_early(evidence: Evidence, end: Ended, copy: Record, verdict: Verdict) -> None:
    """I7: not early in true time, unless the broker's clock was set ahead while the message was held."""
    assert end.decided is not None
    bounds, lease = evidence.bounds, end.decided.lease
    due_ms, came_ms = _due_ms(evidence, end), bounds.message_ms(copy)
    began_ms = bounds.marker_ms(end.partition, lease.marker, lease.at_ms)
    if came_ms >= due_ms - bounds.slack_ms:
        verdict.waits.append(Wait(end.message, due_ms, came_ms))
    elif any(began_ms - bounds.slack_ms <= ahead_ms <= came_ms for ahead_ms in bounds.set_ahead):
        verdict.counts["due_by_a_step_ahead"] += 1
    else:
        verdict.add("I7", f"copy {copy.place} of {end.message} came {due_ms - came_ms} ms early")


def _check_letters(
    evidence: Evidence, ends: Sequence[Ended], messages: Mapping[MessageId, Record], verdict: Verdict
) -> None:
    """I5, I6, I11: one dead letter for each END with DEAD_LETTERED, each as it must be."""
    letters, dead = _by_previous(evidence.dump.dead_letters), _ends_of(ends, Outcome.DEAD_LETTERED)
    partitions = {place.queue_partition for place in messages}
    for place in sorted(dead.keys() | letters.keys()):
        mine, found = dead.get(place, []), letters.get(place, [])
        if len(found) != len(mine):
            verdict.add("I5", f"{place} has {len(found)} dead letters, and {len(mine)} ENDs with DEAD_LETTERED")
        source = messages.get(place)
        for end, letter in zip(mine, found, strict=False):
            queue, reason = evidence.dump.queue, end.marker.reason
            is_empty = cause_of(reason) == GONE or "too large for the dead-letter topic too" in reason
            verdict.counts["payload_gone"] += is_empty
            if source is None and (not is_empty or place.queue_partition in partitions):
                verdict.add("I5", f"{place} is a dead letter, and was never a message")
            elif end.decided is not None:
                verdict.add_all(letter_differences(None if is_empty else source, end.decided, letter, queue, reason))
    if strangers := [letter.place for letter in evidence.dump.dead_letters if letter.previous is None]:
        verdict.add("I5", f"{len(strangers)} records of the dead-letter topic are no dead letters: {strangers[:3]}")
    verdict.counts["dead_lettered"] = len(evidence.dump.dead_letters)
    if evidence.bounds.letters_need_a_cause:
        copies = [MessageId(*each["copy"]) for each in evidence.events if each["event"] in {"raised", "rejected"}]
        failed = {messages[copy].origin for copy in copies if copy in messages}
        for letter in evidence.dump.dead_letters:
            if letter.origin not in failed:
                verdict.add("I5", f"{letter.origin} is a dead letter, and no handler failed on it or rejected it")


@dataclass(slots=True)
class _Sent:
    """What senders say of their messages, by name: how often tried, where confirmed, what asked for."""

    tried: Counter[str] = field(default_factory=Counter)
    durable: dict[str, MessageId | None] = field(default_factory=dict)
    asked: dict[str, Mapping[str, str]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    is_incomplete: bool = False

    def hear(self, event: Mapping[str, Any]) -> None:
        """Take an event."""
        name = str(event.get("id", ""))
        match event["event"]:
            case "send":
                self.tried[name] += 1
                self.asked[name] = event.get("asked", {})
            case "sent":
                self.durable[name] = MessageId(*event["place"]) if event.get("place") else None
            case "send_failed":
                self.failed.add(name)
            case "send_incomplete":
                self.is_incomplete = True


def _check_senders(evidence: Evidence, injected: set[MessageId], verdict: Verdict) -> None:
    """I1, I2, I11: what was confirmed is in the topic once, as it was sent, where it was confirmed; nothing else is."""
    sent = _Sent()
    for event in evidence.events:
        sent.hear(event)
    firsts = _first_copies(evidence.dump, injected)
    for name in sorted(sent.durable.keys() - firsts.keys()):
        verdict.add("I1", f"{name} was durable as {sent.durable[name]} and is not in the queue topic")
    for name, records in sorted(firsts.items()):
        tried, place = sent.tried[name], sent.durable.get(name)
        if len(records) > tried:
            verdict.add("I2", f"{name!r} is in the queue topic {len(records)} times, and was sent {tried} times")
        if place is not None and place not in {record.place for record in records}:
            verdict.add("I1", f"{name} was durable as {place}, and is {records[0].place}")
        pairs = [(each, header, value) for each in records for header, value in sent.asked.get(name, {}).items()]
        for record, header, value in pairs:
            if record.header(header) != value.encode():
                verdict.add("I11", f"{name} asks for {header} {value!r}, and has {record.header(header)!r}")
    given = {str(event.get("id", "")) for event in evidence.events if event["event"] == "delivered"}
    for name in sorted(given - sent.tried.keys() - {""}):
        verdict.add("I2", f"a handler was given {name!r}, which was never sent")
    verdict.counts["sends_unknown"] = unknown = len(sent.tried.keys() - sent.durable.keys() - sent.failed)
    if unknown and not sent.is_incomplete:
        verdict.add("I1", f"{unknown} sends have no answer, and every sender was closed in order")


def _first_copies(dump: Dump, injected: set[MessageId]) -> dict[str, list[Record]]:
    """Return the messages as they were sent, by name, without those that the injector has made and started."""
    found: defaultdict[str, list[Record]] = defaultdict(list)
    for record in dump.messages:
        is_first = record.previous is None and not record.is_redriven
        if is_first and (record.id or record.place not in injected):
            found[record.id].append(record)
    return found


def _miscounts(evidence: Evidence, log: Sequence[LoggedMarker], reported: Reported) -> Iterator[str]:
    """I10: yield where a tracker's own counts differ from the log's."""
    counts = {"in_flight": reported.in_flight, **reported.counters}
    ended = sum(counts[name] for name in COUNTED[1:])
    if counts["started"] != ended:
        yield f"the tracker counts {counts['started']} started, {ended} accounted for"
    oracle = Oracle(evidence.rules)
    oracle.read(one for one in log if one.marker_offset < reported.begins_at)
    # Its state began here: it knows the rules and the clock, and of no lease.
    oracle.counts, oracle.in_flight = Counter(), {}
    oracle.read(one for one in log if reported.begins_at <= one.marker_offset < reported.next_marker_offset)
    oracle.counts["in_flight"] = len(oracle.in_flight)
    for name in COUNTED:
        if oracle.counts[name] != counts[name]:
            found = f"the log {oracle.counts[name]} below {reported.next_marker_offset}"
            yield f"the tracker counts {counts[name]} {name}, {found}"


def _process_faults(evidence: Evidence, process: Process) -> Iterator[Violation]:
    """I9, I13: yield where a process ended by itself, or with an error, or took too much."""
    name, lines = process.name, process.log.strip().splitlines() or [""]
    # Of `kmq` its last line counts: Spark may log after it that its tasks were interrupted.
    last = next((line for line in reversed(lines) if line.startswith("kmq: ")), lines[-1])
    trackers = sum(each.kind == TRACKER for each in evidence.processes)
    is_fenced = process.kind == TRACKER and trackers > 1 and (FENCED in last or CONCURRENT in process.log.lower())
    if process.exit_code is None or process.is_hung:
        yield Violation("I9", f"{name} did not end when it was asked to")
    elif process.exit_code and not process.is_ended_by_us and not is_fenced:
        yield Violation("I9", f"{name} ended with {process.exit_code}: {last}")
    elif process.kind == WORKER and process.exit_code == 0 and name not in evidence.ended:
        yield Violation("I9", f"{name} ended with 0 and left its work in the middle")
    if process.kind == WORKER and TRACEBACK in process.log:
        after = process.log[process.log.index(TRACEBACK) :].splitlines()[1:]
        error = next((line for line in after if line[:1].strip()), "")
        yield Violation("I9", f"{name} logs an error that nothing caught: {error}")
    python_mib, jvm_mib = MOST_MIB.get(process.kind, (10**9, 10**9))
    if process.python_mib > python_mib or process.jvm_mib > jvm_mib:
        took = f"{process.python_mib} MiB and {process.jvm_mib} MiB in a JVM"
        yield Violation("I13", f"{name} took {took}, bounds {python_mib} and {jvm_mib}")


def _check_run(evidence: Evidence, messages: Mapping[MessageId, Record], verdict: Verdict) -> None:
    """I1, I13: nothing is open at the end, no checkpoint is too large; and a run that broke nothing proved nothing."""
    for place in sorted(open_messages(evidence.dump, evidence.rules)) if evidence.is_drained else ():
        verdict.add("I1", f"message {place} is open after the queue was drained")
    if evidence.checkpoint_mib > MOST_CHECKPOINT_MIB:
        verdict.add("I13", f"a checkpoint has {evidence.checkpoint_mib} MiB, bound {MOST_CHECKPOINT_MIB} MiB")
    if evidence.injections is None:
        return
    kinds = {event["event"] for event in evidence.events}
    if not evidence.injections:
        verdict.add("harness", "nothing was injected")
    if not messages:
        verdict.add("harness", "the queue topic is empty: nothing was sent")
    if "began" in kinds and "delivered" not in kinds:
        verdict.add("harness", "workers began, and no handler was given a message")


def _count(evidence: Evidence, followed: Mapping[int, Followed], verdict: Verdict) -> None:
    counts, dump = verdict.counts, evidence.dump
    counts["messages"] = sum(record.previous is None for record in dump.messages)
    counts["no_markers"] = sum(one.marker is None for log in dump.markers.values() for one in log)
    for each in followed.values():
        counts["leases"] += each.oracle.counts["started"]
        counts["ticks"] += each.oracle.counts["ticks"]
        counts["ends_of_trackers"] += len(each.ends)
    counts["leases_reported_by_tracker"] = sum(one.counters["started"] for one in evidence.reported.values())
