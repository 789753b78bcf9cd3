"""
The offline checker: the topics and the event files in, violations out.

Rule 1: exact and clock-free where the promise is: no tolerance, since every instant compared is the broker's.
Rule 2: independent of what is checked: no module of the product is imported, neither for a verdict nor for reading.
Rule 3: what the promise allows (an ack that came after the decision, a message fetched again because its position was
not committed) is counted, not forgiven in silence, and has a bound.

The invariants' numbers are those of docs/faults.md, which has each rule.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from faults.allowances import Refetches, Run, bad_endings, too_large
from faults.conservation import Account, cannot, read_account, unbalanced, untrue
from faults.copies import copy_differences, empty_letter_differences, letter_differences
from faults.endings import GONE, check_ends
from faults.hands import Hands, TrueTimes
from faults.leases import OPEN_END, Leases, read_leases
from faults.once import check_results
from faults.producers import check_producers
from faults.protocol import (
    MarkerType,
    MessageId,
    Outcome,
    QueueRules,
)
from faults.suspects import crowded_suspects
from faults.waits import Bounds, Wait, stalls, too_late
from faults.whole import Verdict, Violation, Whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from faults.conservation import ReportedStatus
    from faults.leases import Justified, Session
    from faults.topics import Dump, Record

__all__ = ["Verdict", "Violation", "check", "open_messages"]


def check(
    dump: Dump,
    events: Iterable[Mapping[str, Any]],
    sessions: Sequence[Session],
    *,
    rules: QueueRules,
    is_drained: bool = True,
    reported: Mapping[int, ReportedStatus] | None = None,
    bounds: Bounds | None = None,
    run: Run | None = None,
) -> Verdict:
    """
    Check everything that can be decided from the topics and the event files.

    Args:
        dump: The topics.
        events: What producers, consumers and the injector wrote: `event` at least.
        sessions: The trackers that took over, in their order.
        rules: Rules of the queue, in force before the first RULES marker.
        is_drained: Whether consumers have worked everything off, so that nothing may be open.
        reported: Status that the last tracker reported, by markers partition; None where none did.
        bounds: How long messages may wait.
        run: Processes, injections.
    """
    verdict, events, bounds, run = Verdict(), list(events), bounds or Bounds(), run or Run()
    leases = {each: read_leases(each, log, sessions, rules) for each, log in sorted(dump.markers.items())}
    whole = Whole(dump, leases, {session.tracker_id for session in sessions})
    check_ends(whole, sessions, bounds, verdict)
    _check_copies(whole, bounds, verdict)
    _check_dead_letters(whole, verdict)
    _check_counts(whole, verdict)
    _check_set_aside(whole, verdict)
    for what in too_late([*verdict.waits, *verdict.other_waits], bounds):
        verdict.add("I8", what)
    for what in stalls(dump, bounds):
        verdict.add("I9", what)
    check_producers(whole, events, verdict)
    _check_consumers(whole, events, bounds, run, verdict)
    _check_conservation(whole, reported or {}, verdict)
    for what in bad_endings(run, events):
        verdict.add("I9", what)
    for what in too_large(run):
        verdict.add("I13", what)
    if is_drained:
        for place in sorted(open_messages(dump, list(leases.values()))):
            verdict.add("I1", f"message {place} is open after the queue was drained")
    _count(whole, verdict)
    return verdict


def open_messages(dump: Dump, leases: Sequence[Leases]) -> set[MessageId]:
    """Return the copies that are in flight, or that no consumer has started yet."""
    in_flight: set[MessageId] = set().union(*(each.in_flight for each in leases))
    started: set[MessageId] = set().union(*(each.starts.keys() for each in leases))
    return in_flight | {record.place for record in dump.messages if record.place not in started}


def _check_copies(whole: Whole, bounds: Bounds, verdict: Verdict) -> None:
    """I1, I4, I6, I7, I11: as many copies as ENDs with REDELIVERED, in their order, each as it must be, not early."""
    ends = whole.ends_of(Outcome.REDELIVERED)
    for place in ends.keys() | whole.copies.keys():
        mine, copies = ends.get(place, []), whole.copies.get(place, [])
        if len(copies) != len(mine):
            invariant = "I4" if len(copies) > len(mine) else "I1"
            verdict.add(invariant, f"{place} has {len(copies)} copies, and {len(mine)} ENDs with REDELIVERED")
        source = whole.messages.get(place)
        for (partition, end), copy in zip(mine, copies, strict=False):
            if end.segment is None:
                continue
            _check_early(copy, partition, end, bounds, verdict)
            if source is None:
                verdict.add("I11", f"{copy.place} follows {place}, which is no message")
                continue
            for one in copy_differences(source, end, copy):
                verdict.add(*one)
    verdict.counts["redelivered"] = sum(map(len, whole.copies.values()))


def _check_early(copy: Record, partition: int, end: Justified, bounds: Bounds, verdict: Verdict) -> None:
    """I7: not early in true time, unless the broker's clock was set ahead while the message was held."""
    segment = end.segment
    assert segment is not None
    began_ms = bounds.marker_ms(partition, segment.begin, segment.appended_at_ms)
    came_ms = bounds.message_ms(copy)
    due_ms = max(began_ms + segment.held_ms, segment.due_at_ms)
    if came_ms >= due_ms - bounds.slack_ms:
        verdict.waits.append(Wait(end.message_id, due_ms, came_ms))
    elif any(began_ms - bounds.slack_ms <= ahead_ms <= came_ms for ahead_ms in bounds.set_ahead):
        verdict.counts["due_by_a_step_ahead"] += 1
    else:
        verdict.add("I7", f"copy {copy.place} of {end.message_id} came {due_ms - came_ms} ms early")


def _check_dead_letters(whole: Whole, verdict: Verdict) -> None:
    """I5, I6, I11: one dead letter for each END with DEAD_LETTERED, each as it must be, and one end of a message."""
    ends = whole.ends_of(Outcome.DEAD_LETTERED)
    for place in ends.keys() | whole.letters.keys():
        mine, letters = ends.get(place, []), whole.letters.get(place, [])
        if len(letters) != len(mine):
            verdict.add("I5", f"{place} has {len(letters)} dead letters, and {len(mine)} ENDs with DEAD_LETTERED")
        for (_, end), letter in zip(mine, letters, strict=False):
            if end.segment is not None:
                _check_letter(whole, end, letter, verdict)
    _check_one_end(whole, verdict)
    verdict.counts["dead_lettered"] = len(whole.dump.dead_letters)


def _check_letter(whole: Whole, end: Justified, letter: Record, verdict: Verdict) -> None:
    queue, cause = whole.dump.queue_topic, cannot(end.reason)
    source = whole.messages.get(end.message_id)
    is_empty = cause == GONE or "too large for the dead-letter topic too" in end.reason
    if is_empty:
        verdict.counts["payload_gone"] += 1
        if source is None and end.message_id.queue_partition in whole.queue_partitions:
            verdict.add("I5", f"{end.message_id} is a dead letter, and was never a message")
        found = empty_letter_differences(end, letter, queue)
    elif source is None:
        verdict.add("I5", f"{end.message_id} is a dead letter, and was never a message")
        return
    else:
        found = letter_differences(source, end, letter, queue)
    for one in found:
        verdict.add(*one)


def _check_one_end(whole: Whole, verdict: Verdict) -> None:
    """I4, I5: a message ends once, and once more for each further lease, and for each ack behind the decision."""
    leases: Counter[MessageId] = Counter()
    copies: defaultdict[MessageId, set[MessageId]] = defaultdict(set)
    for account in whole.accounts.values():
        for lease in account.leases:
            leases[whole.origin(lease.message_id)] += 1
            copies[whole.origin(lease.message_id)].add(lease.message_id)
    twice = Counter(whole.origin(end.message_id) for _, end in whole.ends if end.is_acked and end.segment is not None)
    letters = Counter(whole.origin(letter.previous) for letter in whole.dump.dead_letters if letter.previous)
    acked = Counter(whole.origin(place) for each in whole.leases.values() for place in each.acked)
    for origin in letters.keys() | acked.keys():
        allowed = 1 + leases[origin] - len(copies[origin]) + twice[origin]
        ends = letters[origin] + acked[origin]
        verdict.counts["ends_besides_the_first"] += max(0, min(ends, allowed) - 1)
        if ends > allowed:
            what = f"{letters[origin]} dead letters and {acked[origin]} acks, at most {allowed} ends"
            verdict.add("I5" if letters[origin] else "I4", f"{origin} has {what}")


def _check_counts(whole: Whole, verdict: Verdict) -> None:
    """I6: a START carries the count of its message's header and one more."""
    for partition, each in whole.leases.items():
        for place, starts in each.starts.items():
            record = whole.messages.get(place)
            if record is None:
                continue
            for offset, count, _ in starts:
                if count != record.delivery_count + 1 and not whole.is_injected(partition, offset):
                    verdict.add("I6", f"START of {place} is delivery {count}, expected {record.delivery_count + 1}")


def _check_set_aside(whole: Whole, verdict: Verdict) -> None:
    """I5: a dead letter is a message of the queue."""
    for letter in whole.dump.set_aside:
        verdict.add("I5", f"{letter.place} is a dead letter of no message: {(letter.value or b'')[:20]!r}")


def _check_consumers(
    whole: Whole, events: Sequence[Mapping[str, Any]], bounds: Bounds, run: Run, verdict: Verdict
) -> None:
    """I1, I4, I5, I6, I7, I12: what handlers did and what their consumers wrote; what the promises leave room for."""
    hands = Hands(whole.dump, events, bounds, whole.trackers)
    for one in hands.findings():
        verdict.add(*one)
    verdict.counts["acked_again"] = hands.acked_again
    refetches = Refetches(hands, run, events, bounds)
    for what in refetches.faults():
        verdict.add("I4", what)
    verdict.counts["fetched_again"] = len(refetches.found)
    verdict.counts["fetched_again_from_the_living"] = refetches.by_change
    check_results(whole, hands, [message_id for message_id, _, _ in refetches.found], verdict)
    for what in crowded_suspects(hands, events, whole.messages, TrueTimes(events)):
        verdict.add("I17", what)
    if bounds.letters_need_a_cause:
        failed = {whole.origin(place) for name in ("raised", "rejected") for place, _ in hands.done[name]}
        for letter in whole.dump.dead_letters:
            if letter.origin not in failed:
                verdict.add("I5", f"{letter.origin} is a dead letter, and no handler failed on it or rejected it")
    if run.injections is not None:
        _check_run(whole, events, run, verdict)


def _check_run(whole: Whole, events: Sequence[Mapping[str, Any]], run: Run, verdict: Verdict) -> None:
    """A run that sent nothing, delivered nothing or broke nothing has proved nothing."""
    if not run.injections:
        verdict.add("harness", "nothing was injected")
    if not whole.messages:
        verdict.add("harness", "the queue topic is empty: nothing was sent")
    kinds = {event["event"] for event in events}
    if "began" in kinds and "delivered" not in kinds:
        verdict.add("harness", "workers began, and no handler was given a message")


def _check_conservation(whole: Whole, reported: Mapping[int, ReportedStatus], verdict: Verdict) -> None:
    """I10: every lease is in flight or ended in one way, by the markers, by the other topics, and by the tracker."""
    accounts, dump = whole.accounts, whole.dump
    copies = sum(record.previous is not None for record in dump.messages)
    for what in unbalanced(accounts.values(), whole.leases.values(), copies, len(dump.dead_letters)):
        verdict.add("I10", what)
    for partition, (begins_at, status) in reported.items():
        account = accounts.get(partition)
        if begins_at and account is not None:
            log, leases = dump.markers[partition], whole.leases[partition]
            account = read_account(log, leases, whole.trackers, begins_at=begins_at)
        for what in untrue(status, account or Account()):
            verdict.add("I10", f"markers partition {partition}: {what}")
    verdict.counts["leases"] = sum(len(account.leases) for account in accounts.values())
    verdict.counts["leases_reported_by_tracker"] = sum(status.counters["started"] for _, status in reported.values())


def _count(whole: Whole, verdict: Verdict) -> None:
    """Count what was seen."""
    counts, dump = verdict.counts, whole.dump
    counts["messages"] = sum(record.previous is None for record in dump.messages)
    counts["set_aside"] = len(dump.set_aside)
    counts["late_acks"] = sum(each.late_acks for each in whole.leases.values())
    counts["ticks"] = sum(
        logged.marker is not None and logged.marker.type is MarkerType.TICK
        for log in dump.markers.values()
        for logged in log
    )
    counts["open"] = sum(lease.ended == OPEN_END for account in whole.accounts.values() for lease in account.leases)
