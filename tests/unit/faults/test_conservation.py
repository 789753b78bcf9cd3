"""The campaign's accounts (I10): what a real fold counts, they count, whatever a consumer does between TICK and END."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hypothesis import example, given
from hypothesis import strategies as st

from faults.conservation import Status, read_account, unbalanced, untrue
from faults.leases import Session, read_leases
from faults.protocol import LoggedMarker as SeenMarker
from faults.protocol import QueueRules
from kmq_spark.core.fold import DecisionAction, PartitionState, Rules, fold
from kmq_spark.core.markers import MarkerType, Outcome
from kmq_spark.testing import end, keep_alive, log, start, tick
from tests.unit.fault_story import protocol_marker

if TYPE_CHECKING:
    from kmq_spark.core.decisions import Decision
    from kmq_spark.core.events import LoggedMarker
    from kmq_spark.core.state import Status as TrackerStatus

RULES = Rules(max_deliveries=3)


def seen(log: list[LoggedMarker]) -> list[SeenMarker]:
    """Return a log as the checker reads it."""
    return list(map(_seen, log))


def _seen(logged: LoggedMarker) -> SeenMarker:
    marker = None if logged.marker is None else protocol_marker(logged.marker)
    return SeenMarker(logged.marker_offset, logged.appended_at_ms, marker)


def said(status: TrackerStatus) -> Status:
    """Return a status as the checker reads it."""
    return Status.of(status.to_dict())


@dataclass(slots=True)
class Tracked:
    """A markers partition with a tracker that folds each marker as it comes, and writes its ENDs a little later."""

    log: list[LoggedMarker] = field(default_factory=list)
    reported: list[TrackerStatus] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=lambda: [Session("0", {0: 0})])
    state: PartitionState = field(default_factory=PartitionState.empty)
    now_ms: int = 1_000
    rules: Rules = RULES
    kept: tuple[PartitionState, int] = field(default_factory=lambda: (PartitionState.empty(), 0))
    waiting: list[Decision] = field(default_factory=list)
    expired: set[int] = field(default_factory=set)

    def write(self, *markers: LoggedMarker) -> None:
        """Append markers, each at its own instant, and fold them."""
        for marker in markers:
            (logged,) = log(marker._replace(appended_at_ms=self.now_ms), first=len(self.log))
            self.log.append(logged)
            result = fold(self.state, [logged], self.rules)
            self.state = result.state
            self.waiting += result.decisions.messages()
            # A decision that was not sent is in no status: a status is known when its batch has been carried out.
            if not self.waiting:
                self.reported.append(result.status)
            self.now_ms += 10

    def start(self, offset: int, lease_ms: int, count: int) -> None:
        """Start a message, or start it again; one whose time is over a consumer ends right behind its START."""
        self.write(start(offset, lease_ms=lease_ms, delivery_count=count))
        if offset in self.expired:
            self.write(end(offset, outcome=Outcome.EXPIRED))

    def tick(self) -> None:
        """Let time pass."""
        self.write(tick())

    def send(self) -> None:
        """Carry out what is decided."""
        decided, self.waiting = self.waiting, []
        for one in decided:
            is_dead = one.action is DecisionAction.DEAD_LETTER
            self.write(end(one.message_offset, outcome=Outcome.DEAD_LETTERED if is_dead else Outcome.REDELIVERED))

    def keep(self) -> None:
        """Remember the state, as a checkpoint does."""
        if not self.waiting:
            self.kept = (self.state, len(self.log))

    def die(self, *, checkpoint: bool) -> None:
        """What was decided and not sent is forgotten; a newer tracker folds again what its checkpoint does not hold."""
        self.waiting.clear()
        self.sessions.append(Session(str(len(self.sessions)), {0: len(self.log)}))
        self.rules = replace(self.rules, decide_from_marker_offset=len(self.log))
        before, at = self.kept if checkpoint else (PartitionState.empty(), 0)
        self.state = fold(before, self.log[at:], self.rules).state
        self.write(tick())

    def check(self) -> None:
        """Every reported status agrees with the log, and the log with itself."""
        log = seen(self.log)
        rules = QueueRules(dead_letters_expired=self.rules.dead_letters_expired)
        leases = read_leases(0, log, self.sessions, rules)
        account = read_account(log, leases, {session.tracker_id for session in self.sessions})
        for status in self.reported:
            assert list(untrue(said(status), account)) == []
        markers = [logged.marker for logged in self.log if logged.marker is not None]
        ends = [marker.outcome for marker in markers if marker.type is MarkerType.END]
        copies, letters = ends.count(Outcome.REDELIVERED), ends.count(Outcome.DEAD_LETTERED)
        assert list(unbalanced([account], [leases], copies, letters)) == []


OFFSETS, LEASES = st.integers(0, 3), st.sampled_from([0, 15, 40])
STEPS = st.one_of(
    st.tuples(st.just("start"), OFFSETS, LEASES, st.integers(1, 3)),
    st.tuples(st.just("keep alive"), OFFSETS, LEASES),
    st.tuples(st.just("end"), OFFSETS, st.sampled_from([Outcome.ACKED, Outcome.ACKED, Outcome.REJECTED])),
    st.tuples(st.just("expire"), OFFSETS),
    st.tuples(st.sampled_from(["tick", "tick", "send", "keep", "die", "die without checkpoint"])),
)


@example(
    # Refused twice more before the dead letter of the first refusal is written: two dead letters.
    [("expire", 3), ("tick",), ("start", 3, 0, 1), ("start", 3, 0, 1), ("tick",)],
    replace(RULES, dead_letters_expired=True),
)
@given(st.lists(STEPS, max_size=40), st.sampled_from([RULES, replace(RULES, dead_letters_expired=True)]))
def test_log_and_tracker_count_the_same_whatever_happens_between_decision_and_end(
    steps: list[tuple[object, ...]], rules: Rules
) -> None:
    """
    Acks and STARTs that come after the decision, trackers that die with it unsent, checkpoints that are gone.

    On queues that drop what expires, and on queues that dead-letter it.
    """
    tracked = Tracked(rules=rules)
    for kind, *values in steps:
        _take(tracked, str(kind), values)
    tracked.send()
    tracked.check()


def _take(tracked: Tracked, kind: str, values: list[object]) -> None:
    match kind, values:
        case "start", [int(offset), int(lease_ms), int(count)]:
            tracked.start(offset, lease_ms, count)
        case "keep alive", [int(offset), int(lease_ms)]:
            tracked.write(keep_alive(offset, lease_ms=lease_ms))
        case "end", [int(offset), Outcome() as outcome]:
            tracked.write(end(offset, outcome=outcome))
        case "expire", [int(offset)]:
            tracked.expired.add(offset)
            tracked.start(offset, 1_000, 1)
        case "die" | "die without checkpoint", _:
            tracked.die(checkpoint=kind == "die")
        case "keep", _:
            tracked.keep()
        case "send", _:
            tracked.send()
        case _:
            tracked.tick()


def test_ack_between_decision_and_end_may_be_counted_either_way() -> None:
    """The log counts the ack; a tracker counts its decision, or the ack where it reads both again."""
    tracked = Tracked()
    tracked.start(7, 15, 1)
    tracked.tick()
    tracked.tick()
    assert [one.message_offset for one in tracked.waiting] == [7]
    tracked.write(end(7))
    tracked.send()
    leases = read_leases(0, seen(tracked.log), tracked.sessions)
    account = read_account(seen(tracked.log), leases)
    assert (account.totals()["acked"], account.totals()["redelivered"]) == (1, 0)
    bounds = account.bounds(len(tracked.log))
    assert (bounds["started"], bounds["acked"], bounds["redelivered"]) == ((1, 1), (0, 1), (0, 1))


def test_state_that_was_rebuilt_counts_from_where_it_begins() -> None:
    """A checkpoint was lost: what ended before the oldest marker that is still needed is not counted any more."""
    story = log(
        start(1, 1_000), end(1, 2_000),
        start(2, 3_000), tick(9_000), end(2, 9_100, outcome=Outcome.REDELIVERED),
    )  # fmt: skip
    leases = read_leases(0, seen(story), [Session("0", {0: 0})])
    rebuilt = said(fold(PartitionState.empty(), story[2:], RULES).status)
    assert list(untrue(rebuilt, read_account(seen(story), leases, begins_at=2))) == []
    assert list(untrue(rebuilt, read_account(seen(story), leases))) == [
        "the tracker counts 1 started before marker 5, the log 2",
        "the tracker counts 0 acked before marker 5, the log 1",
    ]
