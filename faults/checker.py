"""
The offline checker: the topics and the event files in, violations out.

Rule 1: exact and clock-free where the promise is: no tolerance, since every instant compared is the broker's.
Rule 2: independent of what is checked: neither the fold nor its model is used for a verdict.
Rule 3: what the promise allows (an ack that came after the decision, a message fetched again because its position was
not committed) is counted, not forgiven in silence.

The invariants' numbers are those of docs/faults.md.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from faults.conservation import CANNOT, Account, read_account, unbalanced, untrue
from faults.leases import REJECTED_AT_MS, Justified, Leases, read_leases
from faults.waits import Bounds, Wait, stalls, too_late
from kmq_spark.core.markers import MessageId, Outcome
from kmq_spark.wire.headers import DELIVERY_COUNT, DLQ_MESSAGE, DLQ_PREFIX, EXPIRES_AT_MS, PREFIX, SILENT_COUNT, TTL_MS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from faults.conservation import Told
    from faults.leases import Segment, Session
    from faults.topics import Dump, Record

GONE = b"payload gone"


class Violation(NamedTuple):
    """A promise that was not kept."""

    invariant: str
    what: str


@dataclass(slots=True)
class Verdict:
    """
    What the checker found.

    Attributes:
        violations: Empty when all is well.
        waits: Each redelivered message: when it was due, and when it came.
        counts: What was seen, and what the promise allows.
    """

    violations: list[Violation] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def lateness_ms(self) -> list[int]:
        """Append time of each redelivered message less its deadline."""
        return [wait.came_ms - wait.due_ms for wait in self.waits]

    def add(self, invariant: str, what: str) -> None:
        """Note a violation."""
        self.violations.append(Violation(invariant, what))


def check(
    dump: Dump,
    events: Iterable[Mapping[str, Any]],
    sessions: Sequence[Session],
    *,
    max_deliveries: int,
    is_drained: bool = True,
    told: Mapping[int, Told] | None = None,
    bounds: Bounds | None = None,
) -> Verdict:
    """
    Check everything that can be told from the topics and the event files.

    Args:
        dump: The topics.
        events: What producers and consumers wrote: `event` and `id` at least.
        sessions: The trackers that took over, in their order.
        max_deliveries: Limit of the queue, 0 = none.
        is_drained: Whether consumers have worked everything off, so that nothing may be open.
        told: What the last tracker said of itself, by markers partition; None where none said anything.
        bounds: How long messages may wait.
    """
    verdict, events, bounds = Verdict(), list(events), bounds or Bounds()
    by_partition = {partition: read_leases(partition, log, sessions) for partition, log in sorted(dump.markers.items())}
    leases = list(by_partition.values())
    whole = _Whole(dump, by_partition)
    _check_ends(whole, sessions, max_deliveries, verdict)
    _check_copies(whole, bounds, verdict)
    _check_waits(dump, bounds, verdict)
    _check_bytes(whole, verdict)
    _check_counts(whole, verdict)
    _check_dead_letters(whole, verdict)
    _check_producers(whole, events, verdict)
    _check_handlers(whole, events, bounds, verdict)
    _check_conservation(dump, by_partition, {session.tracker_id for session in sessions}, told or {}, verdict)
    if is_drained:
        for place in sorted(open_messages(dump, leases)):
            verdict.add("I1", f"message {place} is open after the queue was drained")
    verdict.counts["messages"] = sum(record.previous is None for record in dump.messages)
    verdict.counts["set_aside"] = dump.set_aside
    verdict.counts["late_acks"] = sum(each.late_acks for each in leases)
    verdict.counts["fetched_again"] = sum(len(each.restarted) for each in leases)
    return verdict


def open_messages(dump: Dump, leases: Sequence[Leases]) -> set[MessageId]:
    """Return the copies that are in flight, or that nobody has started yet."""
    in_flight: set[MessageId] = set().union(*(each.in_flight for each in leases))
    started: set[MessageId] = set().union(*(each.starts.keys() for each in leases))
    return in_flight | {record.place for record in dump.messages if record.place not in started}


class _Whole:
    """All partitions together, by message."""

    def __init__(self, dump: Dump, by_partition: Mapping[int, Leases]) -> None:
        leases = list(by_partition.values())
        self.dump = dump
        # What the injector wrote says nothing about consumers.
        self.consumer_ends = [
            (message_id, marker.outcome)
            for partition, each in by_partition.items()
            for message_id, offset, marker in each.consumer_ends
            if (partition, offset) not in dump.injected
        ]
        self.messages = {record.place: record for record in dump.messages}
        self.queue_partitions = {place.queue_partition for place in self.messages}
        self.ends = [end for each in leases for end in each.ends]
        self.acked: set[MessageId] = set().union(*(each.acked for each in leases))
        self.restarted: set[MessageId] = set().union(*(each.restarted for each in leases))
        self.starts = {place: counts for each in leases for place, counts in each.starts.items()}
        self.copies = _by_previous(dump.messages)
        self.letters = _by_previous(dump.dead_letters)

    def ends_of(self, outcome: Outcome) -> dict[MessageId, list[Justified]]:
        """Return the tracker's ENDs with an outcome, by message, in log order."""
        found: defaultdict[MessageId, list[Justified]] = defaultdict(list)
        for end in self.ends:
            if end.outcome is outcome:
                found[end.message_id].append(end)
        return found

    def is_there(self, place: MessageId) -> bool:
        """Return whether the topic still holds a message."""
        return place in self.messages and place not in self.dump.removed

    def is_injected(self, end: Justified) -> bool:
        """Return whether the injector wrote an END."""
        return (end.message_id.queue_partition, end.marker_offset) in self.dump.injected

    def origin(self, place: MessageId) -> MessageId:
        """Return the first copy of a message; itself where it is unknown."""
        record = self.messages.get(place)
        return place if record is None else record.origin


def _by_previous(records: Iterable[Record]) -> dict[MessageId, list[Record]]:
    found: defaultdict[MessageId, list[Record]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record.place):
        if record.previous is not None:
            found[record.previous].append(record)
    return found


def _check_ends(whole: _Whole, sessions: Sequence[Session], max_deliveries: int, verdict: Verdict) -> None:
    """I3, I4, I5, I7, I12: each END of a tracker is justified by a TICK at which its message was due."""
    order = {session.tracker_id: number for number, session in enumerate(sessions)}
    for end in whole.ends:
        _check_writer(whole, end, sessions, order, verdict)
        if end.segment is None:
            # Ended before by a tracker, by a consumer, or not due yet.
            invariant = "I4" if not end.started_before else "I3" if end.acked_before else "I7"
            verdict.add(invariant, f"{end.outcome.name} of {end.message_id} at marker {end.marker_offset}: not due")
            continue
        verdict.counts["acked_after_decision"] += end.acked_before
        is_last = 0 < max_deliveries <= end.segment.delivery_count or end.segment.deadline_at_ms == REJECTED_AT_MS
        if is_last and end.outcome is Outcome.REDELIVERED:
            verdict.add("I5", f"{end.message_id} was redelivered at delivery {end.segment.delivery_count} or rejected")
        is_dead = end.outcome is Outcome.DEAD_LETTERED
        if is_dead and end.reason.encode().startswith(GONE) and whole.is_there(end.message_id):
            verdict.add("I5", f"{end.message_id} is a dead letter because its payload is gone, and it is there")
        elif is_dead and not is_last and not end.reason.startswith(CANNOT):
            verdict.add("I5", f"{end.message_id} is a dead letter without a cause: {end.reason!r}")


def _check_writer(
    whole: _Whole, end: Justified, sessions: Sequence[Session], order: Mapping[str, int], verdict: Verdict
) -> None:
    """I12: nothing of an older tracker lies behind the place from which a newer one decides."""
    number = order.get(end.writer)
    if number is None:
        # Unsigned ENDs are those of the stories of the unit tests.
        if order and end.writer and not whole.is_injected(end):
            verdict.add("I12", f"{end.writer!r} wrote marker {end.marker_offset}, and is no tracker of this queue")
        return
    partition = end.message_id.queue_partition
    newer = [session.decides_from.get(partition, 0) for session in sessions[number + 1 :]]
    if newer and end.marker_offset >= min(newer):
        verdict.add("I12", f"{end.writer} wrote marker {end.marker_offset} after a newer tracker took over")
    verdict.counts["signed_ends"] += 1


def _check_copies(whole: _Whole, bounds: Bounds, verdict: Verdict) -> None:
    """I4, I6, I7: as many copies as ENDs that say so, in the same order, with the right count, not early."""
    ends = whole.ends_of(Outcome.REDELIVERED)
    for place in ends.keys() | whole.copies.keys():
        mine, copies = ends.get(place, []), whole.copies.get(place, [])
        if len(copies) != len(mine):
            invariant = "I4" if len(copies) > len(mine) else "I1"
            verdict.add(invariant, f"{place} has {len(copies)} copies, and {len(mine)} ENDs that say so")
        for end, copy in zip(mine, copies, strict=False):
            if end.segment is None:
                continue
            _check_early(copy, end.segment, bounds, verdict)
            _check_count(copy, end, verdict)
            _check_silent_count(whole, copy, end, verdict)
    verdict.counts["redelivered"] = sum(map(len, whole.copies.values()))


def _check_early(copy: Record, segment: Segment, bounds: Bounds, verdict: Verdict) -> None:
    """I7: not early in true time, unless the broker's clock was set ahead while the message was held."""
    assert copy.previous is not None
    began_ms = bounds.marker_ms(copy.previous.queue_partition, segment.begin, segment.appended_at_ms)
    came_ms = bounds.message_ms(copy)
    due_ms = max(began_ms + segment.lease_ms, segment.due_at_ms)
    if came_ms >= due_ms - bounds.slack_ms:
        verdict.waits.append(Wait(copy.previous, due_ms, came_ms))
    elif any(began_ms - bounds.slack_ms <= ahead_ms <= came_ms for ahead_ms in bounds.set_ahead):
        verdict.counts["due_by_a_step_ahead"] += 1
    else:
        verdict.add("I7", f"copy {copy.place} of {copy.previous} came {due_ms - came_ms} ms early")


def _check_waits(dump: Dump, bounds: Bounds, verdict: Verdict) -> None:
    """I8, I9: nothing is late, and no partition stands still, beyond what the faults excuse."""
    for what in too_late(verdict.waits, bounds):
        verdict.add("I8", what)
    for what in stalls(dump, bounds):
        verdict.add("I9", what)


def _check_handlers(whole: _Whole, events: Iterable[Mapping[str, Any]], bounds: Bounds, verdict: Verdict) -> None:
    """I1, I5: an ack follows a handler that returned, a dead letter a handler that failed."""
    done: defaultdict[str, set[MessageId]] = defaultdict(set)
    for event in events:
        if "copy" in event:
            done[str(event["event"])].add(MessageId(*event["copy"]))
    for place, outcome in whole.consumer_ends:
        source = whole.messages.get(place)
        if outcome is Outcome.ACKED and source is not None and place not in done["handled"]:
            verdict.add("I1", f"{place} is acked, and no handler returned from it")
        if outcome is Outcome.EXPIRED and source is not None and not _has_ttl(source):
            verdict.add("I1", f"{place} was dropped as expired, and has no time to live")
    if bounds.letters_need_a_cause:
        failed = {whole.origin(place) for place in done["raised"] | done["rejected"]}
        for letter in whole.dump.dead_letters:
            if letter.origin not in failed:
                verdict.add("I5", f"{letter.origin} is a dead letter, and no handler failed on it or rejected it")


def _has_ttl(record: Record) -> bool:
    return record.header(TTL_MS) is not None or record.header(EXPIRES_AT_MS) is not None


def _check_count(record: Record, end: Justified, verdict: Verdict) -> None:
    count = record.header(DELIVERY_COUNT)
    if end.segment is not None and count != str(end.segment.delivery_count).encode():
        verdict.add("I6", f"{record.place} says {count!r} deliveries, its lease {end.segment.delivery_count}")


def _check_silent_count(whole: _Whole, copy: Record, end: Justified, verdict: Verdict) -> None:
    """A copy counts one more delivery without a word than its source where nobody said one, and no more else."""
    source = whole.messages.get(end.message_id)
    if source is None or end.segment is None:
        return
    expected = int(source.header(SILENT_COUNT) or 0) + end.segment.is_silent
    if int(copy.header(SILENT_COUNT) or 0) != expected:
        verdict.add("I6", f"{copy.place} says {copy.header(SILENT_COUNT)!r} silent deliveries, expected {expected}")


def _check_counts(whole: _Whole, verdict: Verdict) -> None:
    """I6: a START carries the count of its message's header and one more."""
    for place, counts in whole.starts.items():
        record = whole.messages.get(place)
        if record is None:
            continue
        expected = int(record.header(DELIVERY_COUNT) or 0) + 1
        verdict.violations.extend(
            Violation("I6", f"START of {place} is delivery {count}, expected {expected}")
            for count in counts
            if count != expected
        )


def _check_bytes(whole: _Whole, verdict: Verdict) -> None:
    """I11: key, value, foreign headers and the origin of every copy and dead letter are those of what it follows."""
    for records in (*whole.copies.values(), *whole.letters.values()):
        for record in records:
            source = whole.messages.get(record.previous) if record.previous else None
            is_gone = source is None or not whole.is_there(source.place)
            if source is None or (is_gone and (record.header(DLQ_MESSAGE) or b"").startswith(GONE)):
                _check_gone(whole, record, verdict)
            elif (record.key, record.value, _foreign(record)) != (source.key, source.value, _foreign(source)):
                verdict.add("I11", f"{record.place} differs from {record.previous}")
            elif record.origin != source.origin:
                verdict.add("I11", f"{record.place} names another origin than {record.previous}")


def _check_gone(whole: _Whole, record: Record, verdict: Verdict) -> None:
    """I5: what became a dead letter without its payload was a message once."""
    verdict.counts["payload_gone"] += 1
    place = record.previous
    has_partition = place is not None and place.queue_partition in whole.queue_partitions
    if has_partition and place not in whole.messages:
        verdict.add("I5", f"{place} is a dead letter, and was never a message")


def _foreign(record: Record) -> list[tuple[str, bytes | None]]:
    return [pair for pair in record.headers if not pair[0].startswith((PREFIX, DLQ_PREFIX))]


def _check_dead_letters(whole: _Whole, verdict: Verdict) -> None:
    """I5: one dead letter for each END that says so, and one of a message at most."""
    ends = whole.ends_of(Outcome.DEAD_LETTERED)
    for place in ends.keys() | whole.letters.keys():
        mine, letters = ends.get(place, []), whole.letters.get(place, [])
        if len(letters) != len(mine):
            verdict.add("I5", f"{place} has {len(letters)} dead letters, and {len(mine)} ENDs that say so")
        for end, letter in zip(mine, letters, strict=False):
            _check_count(letter, end, verdict)
    fetched_again = {whole.origin(place) for place in whole.restarted}
    late_acks = {whole.origin(end.message_id) for end in whole.ends if end.acked_before and end.segment is not None}
    acked = {whole.origin(place) for place in whole.acked}
    for origin, count in Counter(letter.origin for letter in whole.dump.dead_letters).items():
        if count > 1:
            _allow(origin in fetched_again, "I5", f"{origin} has {count} dead letters", verdict)
        if origin in acked:
            _allow(origin in fetched_again | late_acks, "I5", f"{origin} is acked and a dead letter", verdict)
    verdict.counts["dead_lettered"] = len(whole.dump.dead_letters)


def _allow(is_allowed: bool, invariant: str, what: str, verdict: Verdict) -> None:  # noqa: FBT001  # one question
    if is_allowed:
        verdict.counts["repeats_after_refetch_or_late_ack"] += 1
    else:
        verdict.add(invariant, what)


def _check_conservation(
    dump: Dump, leases: Mapping[int, Leases], writers: Collection[str], told: Mapping[int, Told], verdict: Verdict
) -> None:
    """I10: every lease is in flight or ended in one way, by the markers, by the other topics, and by the tracker."""
    accounts = {partition: read_account(dump.markers[partition], leases[partition], writers) for partition in leases}
    copies = sum(record.previous is not None for record in dump.messages)
    for what in unbalanced(accounts.values(), leases.values(), copies, len(dump.dead_letters)):
        verdict.add("I10", what)
    for partition, (begins_at, status) in told.items():
        account = accounts.get(partition)
        if begins_at and account is not None:
            account = read_account(dump.markers[partition], leases[partition], writers, begins_at=begins_at)
        for what in untrue(status, account or Account()):
            verdict.add("I10", f"markers partition {partition}: {what}")
    verdict.counts["leases"] = sum(len(account.leases) for account in accounts.values())
    verdict.counts["leases_told_by_tracker"] = sum(status.counters["started"] for _, status in told.values())


def _check_producers(whole: _Whole, events: Sequence[Mapping[str, Any]], verdict: Verdict) -> None:
    """I1, I2: what producers were told is durable is there, and nothing that they did not try."""
    ids: defaultdict[str, set[str]] = defaultdict(set)
    for event in events:
        ids[str(event["event"])].add(str(event.get("id", "")))
    if not ids["send"]:
        return
    present = {record.id for record in whole.dump.messages}
    for missing in sorted(ids["sent"] - present):
        verdict.add("I1", f"{missing} was durable and is not in the queue topic")
    for phantom in sorted((ids["delivered"] | present) - ids["send"]):
        verdict.add("I2", f"{phantom!r} was never sent")
    verdict.counts["sends_unknown"] = len(ids["send"] - ids["sent"] - ids["send_failed"])
