"""
Conservation (I10): each lease that began is in flight or has ended, in one way, and all counts agree.

    started = in flight + acked + rejected + expired + redelivered + dead-lettered

Counted from the markers topic (`read_account`), from the records themselves (copies in the queue topic, dead letters),
and by the tracker (`ReportedStatus`: its own status); the ledger's `totals` are compared with the account by
`tests/faults/test_ledger_after_faults.py`.

Rule 1: the log says how a lease ended: by the first END after its START. That is the account.
Rule 2: a tracker decides at a TICK and its END follows later. What a consumer says in between (an ack, a second START)
the log counts, and the tracker may count or not, according to how often it has read that part. Such a lease is
*either way*: the tracker's counter lies between those that are surely so and those that may be. For all other leases,
nearly all, the counters are equal.
Rule 3: what a consumer rejects, or ends as expired where the queue dead-letters what expires, is *refused*: to the log
it has ended, and to the tracker it is in flight until its dead letter.
Rule 4: as the rest of the checker, neither the fold nor its model is used.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from faults.leases import BY_TRACKER, OPEN_END
from faults.protocol import MarkerType, Outcome

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from faults.leases import Leases, Segment
    from faults.protocol import LoggedMarker, Marker, MessageId

CANNOT = ("payload gone: ", "too large to redeliver: ", "expired: ttl of ")
"""Reasons for which a redelivery becomes a dead letter after all; the handler's exception may stand before them."""

IN_FLIGHT, NOT_ITS_OWN = "in_flight", ""
"""Not ended; no lease of its own for the tracker, which takes the second START as a renewal or as too late."""

NAMES = {outcome: outcome.name.lower() for outcome in Outcome}
ENDED = ("acked", "expired", "redelivered", "dead_lettered")
"""How a lease ends for the tracker; a refused one is in flight until it is dead-lettered."""

"""What a TICK took out since it lies past the end of the queue topic."""

_NONE: frozenset[str] = frozenset()


def cannot(reason: str) -> str:
    """Return the cause in a reason for which a redelivery becomes a dead letter after all; empty for none."""
    found = [(at, cause) for cause in CANNOT if (at := f"; {reason}".find(f"; {cause}")) >= 0]
    return min(found)[1] if found else ""


class Status(NamedTuple):
    """
    What a tracker says of a markers partition as it ends.

    Attributes:
        next_marker_offset: First marker offset that it has not read.
        in_flight: Messages in flight.
        counters: By name.
    """

    next_marker_offset: int
    in_flight: int
    counters: Mapping[str, int]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Status:
        """Return it from the tracker's JSON."""
        return cls(int(values["next_marker_offset"]), int(values["in_flight"]), values["counters"])


class ReportedStatus(NamedTuple):
    """
    The status of a markers partition that a tracker reported.

    Attributes:
        begins_at: Marker offset from which its state was built: 0 unless a checkpoint was lost.
        status: The last one.
    """

    begins_at: int
    status: Status


@dataclass(slots=True)
class Lease:
    """
    A lease by the log.

    Attributes:
        message_id: Whose.
        began: Marker offset of its START.
        earlier: The lease of the same message before it, back to the last END of a tracker.
        ended: Marker offset of the first END after it.
        kinds: What that END counts as.
        outcome: Outcome of that END.
        is_refused: Whether that END leaves the message to its dead letter.
        decided: Marker offset of a tracker's END that followed another one's: the dead letter of a refusal, or a
            decision that an ack came too late for.
        decided_kinds: What that counts as.
        restarted: Marker offset of its last further START.
        merged: Marker offset of a START that came while a refused message waited.
        maybe: What the tracker may count it as, too.
        is_twice: Whether the tracker may count its further START as a lease.
    """

    message_id: MessageId
    began: int
    earlier: Lease | None = None
    ended: int = OPEN_END
    kinds: frozenset[str] = _NONE
    outcome: Outcome | None = None
    is_refused: bool = False
    decided: int = OPEN_END
    decided_kinds: frozenset[str] = _NONE
    restarted: int = -1
    merged: int = OPEN_END
    maybe: frozenset[str] = _NONE
    is_twice: bool = False

    @property
    def name(self) -> str:
        """What it counts as by the log."""
        return IN_FLIGHT if self.outcome is None else NAMES[self.outcome]

    def may_be_counted_as(self, at: int) -> frozenset[str]:
        """Return what a tracker that has read all markers below an offset may count it as."""
        if self.ended >= at:
            return self.maybe | {IN_FLIGHT}
        if self.is_refused or self.decided < OPEN_END:
            return self._may_be_counted_as_refused(at)
        return self.kinds | self.maybe

    def _may_be_counted_as_refused(self, at: int) -> frozenset[str]:
        decided = self.decided_kinds or {NAMES[Outcome.DEAD_LETTERED]}
        kinds = self.maybe | decided
        if not self.is_refused:
            kinds |= self.kinds
        elif self.merged < at:
            kinds |= {NOT_ITS_OWN}
        elif self.decided >= at:
            kinds |= {IN_FLIGHT}
        return kinds


@dataclass(slots=True)
class Account:
    """
    The leases of one markers partition.

    Attributes:
        leases: In the order of their STARTs.
        taken_over: STARTs of messages whose lease was open.
        strays: ENDs of trackers that ended nothing: the message had no lease, or a tracker had ended it before.
    """

    leases: list[Lease] = field(default_factory=list)
    taken_over: int = 0
    strays: int = 0

    def totals(self) -> Counter[str]:
        """Return the counts by the names that the ledger has for them."""
        found = Counter(lease.name for lease in self.leases)
        return found + Counter(started=len(self.leases), taken_over=self.taken_over)

    def waiting(self) -> int:
        """Return how many refused messages wait for their dead letter."""
        return sum(lease.is_refused and lease.decided == OPEN_END == lease.merged for lease in self.leases)

    def settled_twice(self) -> int:
        """Return how many leases a tracker has ended by a copy or a dead letter although a consumer had ended them."""
        return sum(bool(lease.decided_kinds) and "expired" not in lease.decided_kinds for lease in self.leases)

    def bounds(self, at: int) -> dict[str, tuple[int, int]]:
        """Return the least and the most that a tracker may count when it has read all markers below an offset."""
        surely: Counter[str] = Counter()
        perhaps: Counter[str] = Counter()
        for lease in self.leases:
            if lease.began >= at:
                continue
            kinds = lease.may_be_counted_as(at)
            for each in (kinds, kinds | {NOT_ITS_OWN}) if lease.is_twice and lease.restarted < at else (kinds,):
                perhaps.update(each)
                perhaps["started"] += 1
                surely["started"] += NOT_ITS_OWN not in each
                surely.update(each if len(each) == 1 else ())
        return {name: (surely[name], perhaps[name]) for name in ("started", IN_FLIGHT, *ENDED)}


def read_account(
    log: Sequence[LoggedMarker], leases: Leases, writers: Collection[str] = (), *, begins_at: int = 0
) -> Account:
    """
    Account for the leases of a markers partition.

    Args:
        log: Its markers, by ascending offset.
        leases: The same, followed through time: which TICK an END of a tracker goes back to.
        writers: Names of the trackers.
        begins_at: First marker offset that counts.
    """
    reading = _Reading(leases, writers)
    for logged in log:
        if logged.marker is not None and logged.marker_offset >= begins_at:
            for message_id in logged.marker.covered():
                reading.take(message_id, logged.marker_offset, logged.marker)
    return reading.account


class _Reading:
    def __init__(self, leases: Leases, writers: Collection[str]) -> None:
        self.account = Account()
        self._last: dict[MessageId, Lease] = {}
        self._writers, self._kept = writers, leases.kept
        self._due: dict[tuple[MessageId, int], Segment] = {
            (end.message_id, end.marker_offset): end.segment for end in leases.ends if end.segment is not None
        }

    def take(self, message_id: MessageId, offset: int, marker: Marker) -> None:
        if marker.type is MarkerType.START:
            self._start(message_id, offset)
        elif marker.type is MarkerType.END:
            self._end(message_id, offset, marker)

    def _start(self, message_id: MessageId, offset: int) -> None:
        last = self._last.get(message_id)
        if last is not None and last.ended == OPEN_END:
            last.restarted = offset
            self.account.taken_over += 1
            return
        if last is not None and last.is_refused and last.decided == OPEN_END:
            last.merged = offset
        is_new = last is None or last.outcome in BY_TRACKER or last.decided < OPEN_END
        lease = self._last[message_id] = Lease(message_id, offset, None if is_new else last)
        self.account.leases.append(lease)

    def _end(self, message_id: MessageId, offset: int, marker: Marker) -> None:
        last, kinds = self._last.get(message_id), self._kinds(marker)
        is_by_tracker = marker.outcome in BY_TRACKER or len(kinds) > 1
        if last is not None and last.ended == OPEN_END:
            last.ended, last.outcome, last.kinds = offset, marker.outcome, kinds
            last.is_refused = marker.outcome is Outcome.REJECTED or offset in self._kept
        elif last is not None and is_by_tracker and last.outcome not in BY_TRACKER and last.decided == OPEN_END:
            last.decided, last.decided_kinds = offset, kinds
        elif marker.outcome is Outcome.DEAD_LETTERED and (refused := _refused_before(last)) is not None:
            refused.decided, refused.decided_kinds = offset, kinds
        elif is_by_tracker:
            self.account.strays += marker.outcome in BY_TRACKER
            return
        if is_by_tracker and last is not None:
            self._look_back(last, self._due.get((message_id, offset)), kinds)

    def _look_back(self, last: Lease, due: Segment | None, kinds: frozenset[str]) -> None:
        """Mark the leases that the tracker may have decided before the log says that they ended."""
        if due is None:
            return
        for lease in _back_from(last):
            lease.is_twice |= due.end <= lease.restarted
            if lease.ended > due.begin:
                lease.maybe |= kinds
            if lease.began > due.begin:
                # For a tracker that read it behind its decision, no lease at all.
                lease.maybe |= {NOT_ITS_OWN}

    def _kinds(self, marker: Marker) -> frozenset[str]:
        """Return what a tracker may count an END as: one that it decided to redeliver may end otherwise after all."""
        kinds = frozenset({NAMES[marker.outcome]})
        is_otherwise = marker.outcome is Outcome.DEAD_LETTERED and bool(cannot(marker.reason))
        if is_otherwise or (marker.outcome is Outcome.EXPIRED and marker.writer in self._writers):
            kinds |= {NAMES[Outcome.REDELIVERED]}
        return kinds


def _refused_before(last: Lease | None) -> Lease | None:
    """
    Return the newest lease of a message that was refused and has no dead letter yet.

    The tracker decides a refusal at a TICK. A consumer may fetch the message again before the END of that decision, and
    refuse it again: the next TICK decides that one, so each of the two refusals has its dead letter.
    """
    return next((lease for lease in _back_from(last) if lease.is_refused and lease.decided == OPEN_END), None)


def _back_from(lease: Lease | None) -> Iterator[Lease]:
    while lease is not None:
        yield lease
        lease = lease.earlier


def unbalanced(
    accounts: Collection[Account], leases: Collection[Leases], copies: int, dead_letters: int
) -> Iterator[str]:
    """
    Yield what does not come out even between the markers and the records of the other topics.

    Args:
        accounts: Accounts of all markers partitions.
        leases: The same, as the other reader of the log has them: in flight is counted there.
        copies: Messages that were sent again.
        dead_letters: Messages in the dead-letter topic.
    """
    total = sum((account.totals() for account in accounts), Counter())
    in_flight = sum(len(each.in_flight) for each in leases) - sum(account.waiting() for account in accounts)
    # Sent again or dead-lettered although a consumer had ended the lease: that is counted there.
    twice = sum(account.settled_twice() for account in accounts)
    ended = sum(total[name] for name in ("acked", "rejected", "expired")) + copies + dead_letters - twice
    if total["started"] != in_flight + ended:
        yield (
            f"{total['started']} leases began, and {in_flight + ended} are accounted for: {in_flight} in flight, "
            f"{total['acked']} acked, {total['rejected']} rejected, {total['expired']} expired, {copies} copies and "
            f"{dead_letters} dead letters, {twice} of both after a word"
        )
    if strays := sum(account.strays for account in accounts):
        yield f"{strays} ENDs of trackers ended no lease"


def untrue(status: Status, account: Account) -> Iterator[str]:
    """
    Yield where a tracker's own counts of a markers partition differ from the log's.

    Args:
        status: What it says.
        account: Account of the log, from where the tracker's state began.
    """
    counts = {IN_FLIGHT: status.in_flight, **status.counters}
    ended = sum(counts[name] for name in (IN_FLIGHT, *ENDED))
    if counts["started"] != ended:
        yield f"the tracker counts {counts['started']} started, {ended} accounted for"
    for name, (least, most) in account.bounds(status.next_marker_offset).items():
        if not least <= counts[name] <= most:
            expected = str(least) if least == most else f"{least} to {most}"
            yield (
                f"the tracker counts {counts[name]} {name.replace('_', ' ')} before marker "
                f"{status.next_marker_offset}, the log {expected}"
            )
