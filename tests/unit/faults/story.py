"""A right history of a queue for the checker's tests, and ways to change it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from faults.checker import check
from faults.evidence import INJECTOR, TRACKER, WORKER, Evidence, Process, Reported
from faults.oracle import covered, is_by_a_tracker
from faults.topics import Dump, Record
from faults.waits import Bounds
from kmq_spark.core.fold import PartitionState, fold
from kmq_spark.core.markers import MarkerType, MessageId, Outcome, Release
from kmq_spark.core.policy import QueueRules
from tests.builders import begin_term, end, log, start, tick

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from faults.evidence import Verdict
    from kmq_spark.core.events import LoggedMarker

REDELIVERED, DEAD_LETTERED = Outcome.REDELIVERED, Outcome.DEAD_LETTERED

QUEUE, LIMIT, HOUR_MS = "q", 2, 3_600_000
LIMIT_REACHED, TTL_WAS_OVER = "delivery limit reached: 2 of 2", "expired: ttl of 3000 ms was over"
CONSUMER = "kmq-consumer-host-77-abcd"
"""Who wrote what names no writer, but for what only a tracker writes."""
ACTOR, OTHER = "worker", "other-78"
"""Its event file, and that of another consumer."""

Header = tuple[str, bytes | None]


def first_copy(offset: int, at_ms: int = 500, headers: tuple[Header, ...] = ()) -> Record:
    """Return a message as its producer sent it."""
    value = f"id-{offset}|body".encode()
    return Record(
        MessageId(0, offset), at_ms, b"key", value, (("trace", b"t"), ("kmq-logical-queue", b"emails"), *headers)
    )


def with_header(record: Record, name: str, value: bytes | None) -> Record:
    """Return a record with one header in place of those of its name; without them where the value is None."""
    kept = tuple(each for each in record.headers if each[0] != name)
    return record._replace(headers=kept if value is None else (*kept, (name, value)))


def copy_of(
    source: Record, offset: int, at_ms: int, count: int, *, is_silent: bool = True, error: str = "", limit: int = LIMIT
) -> Record:
    """Return a message as the tracker sends it again."""
    copy = _with_history(source, offset, at_ms, count)
    if is_silent:
        copy = with_header(copy, "kmq-silent-count", b"%d" % (int(source.header("kmq-silent-count") or 0) + 1))
    if limit and copy.header("kmq-silent-count"):
        copy = with_header(copy, "kmq-max-deliveries", b"%d" % limit)
    if error:
        copy = with_header(copy, "kmq-last-error", error.encode())
    for name in ("kmq-delay-ms", "kmq-not-before-ms"):
        copy = with_header(copy, name, None)
    return copy


def letter_of(source: Record, offset: int, at_ms: int, count: int, reason: str) -> Record:
    """Return a message as the tracker puts it into the dead-letter topic."""
    return _dead(_with_history(source, offset, at_ms, count), source.place, count, reason)


def empty_letter(place: int, offset: int, at_ms: int, count: int, reason: str) -> Record:
    """Return the dead letter of a message whose payload is gone."""
    where = b"0:%d" % place
    headers = (("kmq-delivery-count", b"%d" % count), ("kmq-origin", where), ("kmq-previous", where))
    return _dead(Record(MessageId(0, offset), at_ms, None, None, headers), MessageId(0, place), count, reason)


def _with_history(source: Record, offset: int, at_ms: int, count: int) -> Record:
    attempts = source.header("kmq-attempts-ms")
    written = {
        "kmq-delivery-count": b"%d" % count,
        "kmq-origin": source.header("kmq-origin") or b"%d:%d" % source.place,
        "kmq-previous": b"%d:%d" % source.place,
        "kmq-first-sent-ms": source.header("kmq-first-sent-ms") or b"%d" % source.at_ms,
        "kmq-attempts-ms": b"%s,%d" % (attempts, source.at_ms) if attempts else b"%d" % source.at_ms,
    }
    copy = source._replace(place=MessageId(0, offset), at_ms=at_ms)
    for name, value in written.items():
        copy = with_header(copy, name, value)
    return copy


def _dead(letter: Record, place: MessageId, count: int, reason: str) -> Record:
    written = {"topic": QUEUE, "partition": place[0], "offset": place[1], "group": f"kmq.{QUEUE}"}
    written |= {"delivery.count": count, "message": reason}
    headers = tuple((f"__dlq.errors.{name}", str(value).encode()) for name, value in written.items())
    return letter._replace(headers=(*letter.headers, *headers))


def event(kind: str, at_ms: int, offset: int = -1, name: str = "", actor: str = ACTOR, **more: Any) -> dict[str, Any]:
    """Return what an actor writes down; what a handler does names its copy."""
    found = {"event": kind, "actor": actor, "wall": at_ms / 1000, "monotonic": at_ms / 1000, **more}
    if offset >= 0:
        found |= {"id": name or f"id-{offset}", "copy": [0, offset]}
    return found


class Story:
    """
    A queue whose every promise was kept; two deliveries are the limit.

    Message 0 is acked. Message 1 expires, and its copy 10 is acked. Message 2 is rejected. Message 3 uses up its two
    deliveries. Each test breaks one thing.
    """

    def __init__(self) -> None:
        self.markers: list[LoggedMarker] = log(
            start(0, 1_000, count=4),  # 0: due at 6_000
            end(0, 2_000),
            end(2, 2_100, outcome=Outcome.REJECTED, reason="bad"),
            tick(2_500),  # 3: the rejection is due
            end(2, 2_600, outcome=DEAD_LETTERED, reason="bad"),
            tick(6_100),  # 5: messages 1 and 3 are due
            end(1, 6_200, outcome=REDELIVERED),
            end(3, 6_200, outcome=REDELIVERED),
            start(10, 6_500, delivery_count=2, count=2),  # 8: due at 11_500
            end(10, 7_000),
            tick(11_600),  # 10: copy 11 is due, for the last time
            end(11, 11_700, outcome=DEAD_LETTERED, reason="delivery limit reached: 2 of 2"),
            first=1,
        )
        # TERMs are apart, so that a marker's place in the list is its number in the comments.
        self.terms = [begin_term(900, term=1, tracker_id="old", marker_offset=0)]
        firsts = [first_copy(offset) for offset in range(4)]
        copies = [copy_of(firsts[1], 10, 6_200, 1), copy_of(firsts[3], 11, 6_200, 1)]
        self.messages = [*firsts, *copies]
        self.dead_letters = [
            letter_of(firsts[2], 0, 2_600, 1, "bad"),
            letter_of(copies[1], 1, 11_700, 2, "delivery limit reached: 2 of 2"),
        ]
        self.events: list[dict[str, Any]] = [event("injected", 0, actor=INJECTOR), event("began", 10, pid=77)]
        self.events.append(event("ended", 10**6))
        for offset in range(4):
            self.events += self.sent(offset)
        self.events += self.worked(0, 1_000, 1_900) + self.worked(2, 1_000, 2_050, "rejected")
        self.events += self.worked(10, 6_500, 6_900, name="id-1")
        self.events += [event("delivered", 1_001, 1), event("delivered", 1_001, 3)]
        self.events += [event("delivered", 6_501, 11, "id-3")]
        self.bounds = Bounds()
        self.processes = [Process(WORKER, ACTOR, 0), Process(TRACKER, "tracker-1", 0)]
        self.injections: int | None = 1
        self.checkpoint_mib = 0
        self.rules = QueueRules(1, LIMIT)
        self.removed: list[Record] = []
        self.injected: set[int] = set()
        self.results: list[Record] = []
        self.is_reported = True
        self.tracker_reports: Callable[[Reported], Reported] = lambda reported: reported
        self._next_offset = 0

    def sent(self, offset: int, name: str = "", at_ms: int = 450) -> list[dict[str, Any]]:
        """Return what a producer writes down."""
        name = name or f"id-{offset}"
        return [
            event("send", at_ms, actor="sender-1", id=name),
            event("sent", at_ms + 100, actor="sender-1", id=name, place=[0, offset]),
        ]

    def worked(
        self, offset: int, given_ms: int, done_ms: int, what: str = "handled", name: str = ""
    ) -> list[dict[str, Any]]:
        """Return what a consumer writes down of one delivery."""
        return [event("delivered", given_ms + 1, offset, name), event(what, done_ms, offset, name)]

    def says(self, **more: Any) -> None:
        """Let the worker say more of itself as it begins."""
        began = next(each for each in self.events if each["event"] == "began")
        began |= more

    def work_in_transactions(self) -> None:
        """Let the worker ack in transactions; what it has acked, 0 and 10, has a result."""
        self.says(mode="transaction")
        self.add_result(0, 1_950)
        self.add_result(10, 6_950)

    def add_result(self, copy: int, at_ms: int, process: str = "77") -> None:
        """Write the result of a copy."""
        place = MessageId(0, len(self.results))
        self.results.append(Record(place, at_ms, b"0:%d" % copy, b"result", (("process", process.encode()),)))

    def message(self, offset: int) -> Record:
        """Return a record of the queue topic."""
        return next(record for record in self.messages if record.place.message_offset == offset)

    def change(self, offset: int, record: Record) -> None:
        """Put another record in the place of one of the queue topic."""
        self.messages = [record if each.place.message_offset == offset else each for each in self.messages]

    def remove(self, offset: int) -> None:
        """Take a record out of the queue topic."""
        self.messages = [each for each in self.messages if each.place.message_offset != offset]

    def rewrite(self, at: int, logged: LoggedMarker) -> None:
        """Put another marker in the place of one."""
        self.markers[at] = logged._replace(marker_offset=self.markers[at].marker_offset)

    def resign(self, at: int, writer: str) -> None:
        """Name another writer of a marker; a tracker's has its own term."""
        marker = self.markers[at].marker
        assert marker is not None
        found = [each.marker.term for each in self.terms if each.marker and each.marker.consumer_id == writer]
        term = found[-1] if found else marker.term
        self.rewrite(at, self.markers[at]._replace(marker=replace(marker, consumer_id=writer, term=term)))

    def take_over(self, at: int, tracker_id: str = "new") -> None:
        """Let another tracker begin a term before a marker: what lies behind it is one place further."""
        begins_at, begins_ms = self.markers[at].marker_offset, self.markers[at].appended_at_ms
        self.markers[at:] = [each._replace(marker_offset=each.marker_offset + 1) for each in self.markers[at:]]
        term = len(self.terms) + 1
        self.terms.append(begin_term(begins_ms, term=term, tracker_id=tracker_id, marker_offset=begins_at))

    def add(self, offset: int, at_ms: int = 500, headers: tuple[Header, ...] = ()) -> Record:
        """Let a producer send one more message."""
        self.messages.append(first_copy(offset, at_ms, headers))
        self.events += self.sent(offset, at_ms=at_ms - 50)
        return self.messages[-1]

    def append(self, *markers: LoggedMarker, is_handled: bool = True, names: dict[int, str] | None = None) -> None:
        """Go on with the log; what is started is given to a handler, what is acked has been handled."""
        first = max(self._next_offset, self.markers[-1].marker_offset + 1)
        self.markers += log(*markers, first=first)
        for logged in markers if is_handled else ():
            self.events += self._done(logged, names or {})

    def commit(self) -> None:
        """End a transaction: its commit takes an offset."""
        self._next_offset = self.markers[-1].marker_offset + 2

    def _done(self, logged: LoggedMarker, names: dict[int, str]) -> Iterator[dict[str, Any]]:
        marker = logged.marker
        assert marker is not None
        kind = ""
        if marker.type is MarkerType.START and not marker.never_handed_out:
            kind = "delivered"
        elif marker.type is MarkerType.END:
            kind = {Outcome.ACKED: "handled", Outcome.REJECTED: "rejected"}.get(marker.outcome, "")
        elif marker.release is Release.FAILED:
            kind = "raised"
        for each in covered(marker) if kind else ():
            offset = each.message_offset
            yield event(kind, logged.appended_at_ms, offset, names.get(offset, self._name(offset)))

    def _name(self, offset: int) -> str:
        return next((each.id for each in self.messages if each.place.message_offset == offset), "")

    def _signed(self, logged: LoggedMarker) -> LoggedMarker:
        """Return a marker that names its writer."""
        marker = logged.marker
        if marker is None or marker.consumer_id:
            return logged
        if marker.type not in {MarkerType.TICK, MarkerType.RULES} and not is_by_a_tracker(marker):
            return logged._replace(marker=replace(marker, consumer_id=CONSUMER))
        begun = [each.marker for each in self.terms if each.marker_offset < logged.marker_offset]
        term, writer = (begun[-1].term, begun[-1].consumer_id) if begun and begun[-1] else (0, "")
        if marker.type is MarkerType.RULES:
            term = 0
        return logged._replace(marker=replace(marker, consumer_id=writer, term=term))

    def log(self) -> list[LoggedMarker]:
        """Return the markers partition as it is read."""
        return sorted([*self.terms, *map(self._signed, self.markers)], key=lambda each: each.marker_offset)

    def evidence(self) -> Evidence:
        """Return what the checker gets."""
        dump = Dump(
            QUEUE,
            {0: self.log()},
            [*self.messages, *self.removed],
            self.dead_letters,
            self.results,
            {record.place for record in self.removed},
            {(0, offset) for offset in self.injected},
        )
        return Evidence(
            dump, self.events, {"old", "new"}, self.rules, self.bounds, self.processes, self.injections,
            {0: self.tracker_reports(self.reported())} if self.is_reported else {},
            checkpoint_mib=self.checkpoint_mib,
        )  # fmt: skip

    def reported(self) -> Reported:
        """Return what a real fold of the log reports."""
        status = fold(PartitionState.empty(self.rules), self.log()).status
        return Reported(0, status.next_marker_offset, status.in_flight, status.counters)

    def verdict(self) -> Verdict:
        """Check it."""
        return check(self.evidence())

    # Steps that several stories take.

    def redeliver(
        self, offset: int, to: int, at_ms: int, *before: LoggedMarker, count: int = 1, is_silent: bool = True,
        error: str = "",
    ) -> None:  # fmt: skip
        """Let the tracker redeliver a message; its copy is started and acked."""
        self.append(*before, end(offset, at_ms, outcome=REDELIVERED))
        self.messages.append(copy_of(self.message(offset), to, at_ms, count, is_silent=is_silent, error=error))
        self.append(start(to, at_ms + 100, delivery_count=count + 1), end(to, at_ms + 200))

    def bury(self, offset: int, to: int, at_ms: int, count: int, reason: str, *before: LoggedMarker) -> None:
        """Let the tracker dead-letter a message."""
        self.append(*before, end(offset, at_ms, outcome=DEAD_LETTERED, reason=reason))
        self.dead_letters.append(letter_of(self.message(offset), to, at_ms, count, reason))

    def defer(
        self, *, decided_ms: int = 20_001, count: int = 0, is_silent: bool = False, delay_ms: int = 8_200
    ) -> None:
        """Message 4 is put off until 20_000, and comes then."""
        self.add(4, 11_800, (("kmq-delay-ms", b"%d" % delay_ms),))
        self.append(start(4, 12_000, lease_ms=0, never_handed_out=True, due_at_ms=20_000))
        self.redeliver(4, 12, 20_100, tick(decided_ms), count=count, is_silent=is_silent)

    def keep_what_expires(self) -> None:
        """Let the queue's rules turn expired messages into dead letters."""
        self.rules = replace(self.rules, dead_letters_expired=True)

    def expire_in_a_lease(self) -> None:
        """Message 4 has a TTL of 3 s, its lease runs out at 19_000, and its queue keeps what expires."""
        self.keep_what_expires()
        self.add(4, 11_800, (("kmq-ttl-ms", b"3000"),))
        self.append(start(4, 14_000), tick(19_100))

    def expire_at_its_start(self) -> None:
        """A consumer ends message 4, whose TTL is over, and TICK 15_000 decides it; its queue keeps what expires."""
        self.keep_what_expires()
        self.add(4, 11_800, (("kmq-ttl-ms", b"3000"),))
        self.append(start(4, 14_800), is_handled=False)
        self.append(end(4, 14_900, outcome=Outcome.EXPIRED, reason="expired"), tick(15_000))

    def start_again(
        self, offset: int = 0, at_ms: int = 40_000, *, ends: bool = True, woke_ms: Sequence[int] = ()
    ) -> None:
        """Let another consumer, which was suspended until then, start a message again, and acknowledge it."""
        first, name = len(self.markers), self.message(offset).id
        self.append(start(offset, at_ms, delivery_count=1 + (offset == 11)), is_handled=False)
        if ends:
            self.append(end(offset, at_ms + 100), is_handled=False)
        for at in range(first, len(self.markers)):
            self.resign(at, "kmq-consumer-host-78-abcd")
        self.processes = [*self.processes, Process(WORKER, OTHER, 0, woke_ms=woke_ms)]
        self.events += [event("began", -(10**6), actor=OTHER, pid=78), event("ended", 10**6, actor=OTHER)]
        for kind in ("delivered", "handled") if ends else ("delivered",):
            self.events.append(event(kind, at_ms + 50, offset, name, actor=OTHER))
