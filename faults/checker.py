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
from kmq_spark.core.markers import MessageId, Outcome
from kmq_spark.wire.headers import DELIVERY_COUNT, DLQ_MESSAGE, DLQ_PREFIX, PREFIX, SILENT_COUNT

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from faults.conservation import Told
    from faults.leases import Session
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
        lateness_ms: Append time of each redelivered message less its deadline.
        counts: What was seen, and what the promise allows.
    """

    violations: list[Violation] = field(default_factory=list)
    lateness_ms: list[int] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

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
    """
    verdict = Verdict()
    by_partition = {partition: read_leases(partition, log, sessions) for partition, log in sorted(dump.markers.items())}
    leases = list(by_partition.values())
    whole = _Whole(dump, leases)
    _check_ends(whole, sessions, max_deliveries, verdict)
    _check_copies(whole, verdict)
    _check_bytes(whole, verdict)
    _check_counts(whole, verdict)
    _check_dead_letters(whole, verdict)
    _check_producers(whole, list(events), verdict)
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

    def __init__(self, dump: Dump, leases: Sequence[Leases]) -> None:
        self.dump = dump
        self.messages = {record.place: record for record in dump.messages}
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
        if not is_last and end.outcome is Outcome.DEAD_LETTERED and not end.reason.startswith(CANNOT):
            verdict.add("I5", f"{end.message_id} is a dead letter without a cause: {end.reason!r}")


def _check_writer(
    whole: _Whole, end: Justified, sessions: Sequence[Session], order: Mapping[str, int], verdict: Verdict
) -> None:
    """I12: nothing of an older tracker lies behind the place from which a newer one decides."""
    number = order.get(end.writer)
    if number is None:
        return
    partition = end.message_id.queue_partition
    newer = [session.decides_from.get(partition, 0) for session in sessions[number + 1 :]]
    if newer and end.marker_offset >= min(newer):
        verdict.add("I12", f"{end.writer} wrote marker {end.marker_offset} after a newer tracker took over")
    verdict.counts["signed_ends"] += 1
    del whole


def _check_copies(whole: _Whole, verdict: Verdict) -> None:
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
            lateness_ms = copy.appended_at_ms - end.segment.deadline_at_ms
            verdict.lateness_ms.append(lateness_ms)
            if lateness_ms < 0:
                verdict.add("I7", f"copy {copy.place} of {place} came {-lateness_ms} ms early")
            _check_count(copy, end, verdict)
            _check_silent_count(whole, copy, end, verdict)
    verdict.counts["redelivered"] = sum(map(len, whole.copies.values()))


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
            if source is None or (record.header(DLQ_MESSAGE) or b"").startswith(GONE):
                verdict.counts["payload_gone"] += 1
            elif (record.key, record.value, _foreign(record)) != (source.key, source.value, _foreign(source)):
                verdict.add("I11", f"{record.place} differs from {record.previous}")
            elif record.origin != source.origin:
                verdict.add("I11", f"{record.place} names another origin than {record.previous}")


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
