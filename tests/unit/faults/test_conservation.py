"""I10: what a real fold counts, the checker counts, whatever a consumer does between TICK and END."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hypothesis import example, given
from hypothesis import strategies as st

from faults.checker import check
from faults.evidence import Evidence, Reported, Session
from faults.topics import Dump
from kmq_spark.core.fold import DecisionAction, PartitionState, Rules, fold
from kmq_spark.core.markers import Outcome
from kmq_spark.core.policy import QueueRules
from kmq_spark.testing import end, keep_alive, log, start, tick

if TYPE_CHECKING:
    from kmq_spark.core.decisions import Decision
    from kmq_spark.core.events import LoggedMarker
    from kmq_spark.core.state import Status

OFFSETS, LEASES = st.integers(0, 3), st.sampled_from([0, 15, 40])


@dataclass(slots=True)
class Tracked:
    """A markers partition with a tracker that folds each marker as it comes, and writes its ENDs a little later."""

    queue_rules: QueueRules
    rules: Rules = field(default_factory=Rules)
    log: list[LoggedMarker] = field(default_factory=list)
    reported: list[Status] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=lambda: [Session("0", {0: 0})])
    state: PartitionState = field(init=False)
    kept: tuple[PartitionState, int] = field(init=False)
    waiting: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin with nothing."""
        self.state = PartitionState.empty(self.queue_rules)
        self.kept = self.state, 0

    def write(self, *markers: LoggedMarker) -> None:
        """Append markers, each at its own instant, and fold them."""
        for marker in markers:
            (logged,) = log(marker._replace(appended_at_ms=1_000 + 10 * len(self.log)), first=len(self.log))
            self.log.append(logged)
            result = fold(self.state, [logged], self.rules)
            self.state = result.state
            self.waiting += result.decisions.messages()
            # A decision that was not sent is in no status: a status is known when its batch has been carried out.
            if not self.waiting:
                self.reported.append(result.status)

    def send(self) -> None:
        """Carry out what is decided."""
        decided, self.waiting = self.waiting, []
        for one in decided:
            is_dead = one.action is DecisionAction.DEAD_LETTER
            self.write(end(one.message_offset, outcome=Outcome.DEAD_LETTERED if is_dead else Outcome.REDELIVERED))

    def die(self, *, checkpoint: bool) -> None:
        """Forget what was decided and not sent; a newer tracker folds again what its checkpoint does not hold."""
        self.waiting.clear()
        self.sessions.append(Session(str(len(self.sessions)), {0: len(self.log)}))
        self.rules = replace(self.rules, decide_from_marker_offset=len(self.log))
        before, at = self.kept if checkpoint else (PartitionState.empty(self.queue_rules), 0)
        self.state = fold(before, self.log[at:], self.rules).state
        self.write(tick())

    def take(self, kind: str, offset: int = 0, lease_ms: int = 0, count: int = 1) -> None:
        """Let one thing happen."""
        match kind:
            case "start":
                self.write(start(offset, lease_ms=lease_ms, delivery_count=count))
            case "keep alive":
                self.write(keep_alive(offset, lease_ms=lease_ms))
            case "expire":
                self.write(start(offset, lease_ms=1_000), end(offset, outcome=Outcome.EXPIRED))
            case "send":
                self.send()
            case "keep" if not self.waiting:
                self.kept = self.state, len(self.log)
            case "die" | "die without checkpoint":
                self.die(checkpoint=kind == "die")
            case "acked" | "rejected":
                self.write(end(offset, outcome=Outcome[kind.upper()]))
            case _:
                self.write(tick())


STEPS = st.one_of(
    st.tuples(st.just("start"), OFFSETS, LEASES, st.integers(1, 3)),
    st.tuples(st.just("keep alive"), OFFSETS, LEASES),
    st.tuples(st.sampled_from(["acked", "acked", "rejected", "expire"]), OFFSETS),
    st.tuples(st.sampled_from(["tick", "tick", "send", "keep", "die", "die without checkpoint"])),
)


@example(
    # Refused twice more before the dead letter of the first refusal is written.
    steps=[("expire", 3), ("tick",), ("start", 3, 0, 1), ("start", 3, 0, 1), ("tick",)],
    is_kept=True,
)
@given(steps=st.lists(STEPS, max_size=40), is_kept=st.booleans())
def test_log_and_tracker_count_the_same_whatever_happens_between_decision_and_end(
    steps: list[tuple[str, ...]], *, is_kept: bool
) -> None:
    """Acks and STARTs behind the decision, trackers that die with it unsent, checkpoints that are gone."""
    tracked = Tracked(QueueRules(1, 3, dead_letters_expired=is_kept))
    for step in steps:
        tracked.take(*step)  # type: ignore[arg-type]  # as the strategy makes them
    tracked.send()
    for status in tracked.reported[-3:]:
        reported = Reported(0, status.next_marker_offset, status.in_flight, status.counters)
        evidence = Evidence(
            Dump("q", {0: tracked.log}), [], tracked.sessions, tracked.queue_rules, reported={0: reported}
        )
        found = check(evidence).violations
        # Of what the tracker did nothing is wrong; that nobody sent or handled anything does not count here.
        assert [each for each in found if each.invariant in {"I3", "I7", "I10"}] == []
