"""
Exactly once under stalls, lost answers and two trackers: the real fold and the real sender on a scripted broker.

The broker keeps one markers partition with transactions, producer epochs and a last stable offset. Each call of a
tracker's producer may be interrupted: the other tracker takes over, a consumer writes, time passes, the answer is lost,
the broker gives the transaction up. What was carried out in the end is judged by the campaign's oracle.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException, Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from faults.checker import follow
from faults.evidence import Evidence
from faults.topics import Dump
from kmq_spark.core.events import LoggedMarker
from kmq_spark.core.fold import PartitionState, fold
from kmq_spark.core.markers import Marker, MarkerType, OffsetRange, Outcome
from kmq_spark.core.outcome import PartitionOutcome
from kmq_spark.errors import FencedError, KafkaClientError
from kmq_spark.kafka import transaction
from kmq_spark.kafka.payloads import PayloadSlice
from kmq_spark.kafka.positions import LogBeginning, Position, ResumePoint
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.topics import QueueLayout
from kmq_spark.tracker.sender import redelivery
from kmq_spark.tracker.sender.limits import SenderLimits
from kmq_spark.wire.codec import decode_marker, encode_marker
from tests.examples import examples

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kmq_spark.kafka.queue_rules import RulesReader

    Steps = list[tuple[tuple[Any, ...], list[tuple[Any, ...]]]]

TOPICS = QueueTopics("orders")
LAYOUT = QueueLayout(TOPICS, 1, 1)
FENCED = KafkaError(KafkaError._FENCED, "fenced", fatal=True)
LOST = KafkaError(KafkaError._TIMED_OUT, "no answer")


@dataclass
class Appended:
    """A record of the markers topic."""

    at_ms: int
    value: bytes
    transaction: int = 0


@dataclass
class Broker:
    """One markers partition, the transactions of one transactional id, and what its tests do at the next calls."""

    log: list[Appended | None] = field(default_factory=list)  # None: the end of a transaction
    now_ms: int = 1_000
    epoch: int = 0
    aborted: set[int] = field(default_factory=set)
    committed: set[int] = field(default_factory=lambda: {0})
    open: int = 0
    transactions: int = 0
    positions: dict[int, Position] = field(default_factory=dict)
    script: list[tuple[Any, ...]] = field(default_factory=list)
    trackers: list[Tracker] = field(default_factory=list)
    is_interrupted: bool = False

    def write(self, marker: Marker) -> None:
        """Append what no transaction holds."""
        self.log.append(Appended(self.now_ms, encode_marker(marker)))

    def end(self, *, is_commit: bool) -> None:
        """End the open transaction."""
        if self.open:
            (self.committed if is_commit else self.aborted).add(self.open)
            self.log.append(None)
            self.open = 0

    def readable(self) -> list[LoggedMarker]:
        """Return what is below the last stable offset and was not aborted."""
        found = []
        for offset, record in enumerate(self.log):
            if record is not None and record.transaction == self.open and self.open:
                break
            if record is not None and record.transaction not in self.aborted:
                found.append(LoggedMarker(offset, record.at_ms, decode_marker(record.value)))
        return found

    def called(self) -> str:
        """Do what the script says before the next call is answered; return what becomes of the call."""
        step = self.script.pop(0) if self.script else ("",)
        if step[0] in {"lost", "done and lost"}:
            return str(step[0])
        if not self.is_interrupted and step[0]:
            self.is_interrupted = True
            rest, self.script = self.script, []
            do(self, *step)
            self.script, self.is_interrupted = rest, False
        return ""


class Producer:
    """The part of confluent-kafka's producer that a transaction uses."""

    def __init__(self, broker: Broker) -> None:
        self._broker, self._epoch, self._transaction = broker, -1, 0
        self._offsets: list[Any] = []

    def __len__(self) -> int:
        return 0

    def _check(self) -> None:
        if self._epoch != self._broker.epoch:
            raise KafkaException(FENCED)

    def list_topics(self, *_: object, **__: object) -> None:
        """Connect."""

    def init_transactions(self, _: float) -> None:
        """End what is open, fence older producers."""
        if self._broker.called() == "lost":
            raise KafkaException(LOST)
        self._broker.end(is_commit=False)
        self._broker.epoch += 1
        self._epoch = self._broker.epoch

    def begin_transaction(self) -> None:
        """Begin; the broker hears of it with the first record."""
        self._transaction, self._offsets = 0, []

    def produce(self, topic: str, value: bytes, _key: object, partition: int, report: Any, *_: object) -> None:  # noqa: ANN401
        """Append to the open transaction."""
        self._broker.called()
        self._check()
        if not self._transaction:
            self._broker.transactions += 1
            self._broker.open = self._transaction = self._broker.transactions
        if topic == TOPICS.markers_topic:
            self._broker.log.append(Appended(self._broker.now_ms, value, self._transaction))
        if report is not None:
            report(None, Message(topic=topic, partition=partition, offset=0, timestamp=(2, self._broker.now_ms)))

    def poll(self, _: float) -> int:
        """Nothing waits."""
        return 0

    def send_offsets_to_transaction(self, positions: list[Any], *_: object) -> None:
        """Keep them for the commit."""
        self._check()
        self._offsets = positions

    def commit_transaction(self, _: float) -> None:
        """Commit, unless the script loses the request or its answer."""
        what = self._broker.called()
        if what == "lost":
            raise KafkaException(LOST)
        self._check()
        self._broker.end(is_commit=True)
        for at in self._offsets:
            position = Position.from_topic_partition(at)
            assert position is not None
            self._broker.positions[at.partition] = position
        if what:
            raise KafkaException(LOST)

    def abort_transaction(self, _: float) -> None:
        """Abort."""
        self._check()
        self._broker.end(is_commit=False)

    def purge(self) -> None:
        """Nothing is kept."""


class Positions:
    """The committed offsets of the tracker's group."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def beginning(self) -> LogBeginning:
        """The topic begins at 0."""
        return LogBeginning({0: 0}, "id")

    def committed(self) -> Mapping[int, Position]:
        """Return the positions."""
        return self._broker.positions

    def resume_point(self, _: LogBeginning) -> ResumePoint:
        """Return where a tracker begins."""
        at = self._broker.positions.get(0, Position(0, 0))
        return ResumePoint({0: at}, {0: at.needed_offset}, topic_id="id")

    def group_metadata(self) -> object:
        """Any object will do."""
        return object()

    def close(self) -> None:
        """Nothing is open."""


class Payloads:
    """Every message is there."""

    def read_slices(self, wanted: Mapping[int, Sequence[int]]) -> Iterator[PayloadSlice]:
        """Yield them."""
        for partition, offsets in wanted.items():
            messages: list[Message | None] = [
                Message(topic="orders", partition=partition, offset=each, key=b"k", value=b"v", timestamp=(2, 1))
                for each in offsets
            ]
            yield PayloadSlice(partition, 0, messages)

    def close(self) -> None:
        """Nothing is open."""


@contextlib.contextmanager
def answered() -> Iterator[None]:
    """Let a call fail as a tracker expects it: it ends for a newer one, and starts again after any other failure."""
    try:
        yield
    except FencedError:
        pass
    except KafkaClientError as error:
        if not error.retriable:
            raise


@dataclass
class Tracker:
    """A tracker: its sender, its fold, and the term that its ticker names."""

    broker: Broker
    sender: redelivery.RedeliverySender | None = None
    state: PartitionState = field(default_factory=PartitionState.empty)
    read_to: int = 0
    ticks_in: int = 0
    ids: set[str] = field(default_factory=set)
    is_stalled: bool = False
    """A call of its producer has not been answered: it does nothing else."""

    def open(self, is_new: bool, keeps_state: bool) -> None:  # noqa: FBT001  # as the strategy makes them
        """Start, as a new process or after a failure of the query; with its checkpoint, or from the log."""
        self.sender = None
        limits = SenderLimits(timeout=0.2, commit_interval=0)
        reader = cast("RulesReader", SimpleNamespace(is_unauthorized=False, refresh=lambda: None, close=lambda: None))
        sender = redelivery.RedeliverySender(LAYOUT, bootstrap_servers="-", limits=limits, rules_reader=reader)
        try:
            resume = sender.open(() if is_new else self.ids)
        except (FencedError, KafkaClientError):
            return
        self.ids.add(sender.tracker_id)
        self.sender = sender
        if not keeps_state:
            self.state, self.read_to = PartitionState.empty(), resume.starting_offsets[0]
        self.ticks_in = sender.term

    def do(self, what: str, *arguments: Any) -> None:  # as the strategy makes them
        """Let it do one thing."""
        if what == "open":
            self.open(*arguments)
        elif what == "batch":
            self.batch(*arguments)
        elif self.sender is not None:
            with answered():
                self.sender.tend({})

    def batch(self, count: int, dies: bool) -> None:  # noqa: FBT001  # as above
        """Fold some markers and carry out what they decide; a tracker that dies has not kept its state."""
        sender = self.sender
        markers = [each for each in self.broker.readable() if each.marker_offset >= self.read_to][:count]
        if sender is None or not markers:
            return
        result = fold(self.state, markers)
        self.sender = None
        with answered():
            sender.deliver([PartitionOutcome(0, result.status, result.decisions)])
            self.sender = None if dies else sender
        if self.sender is None:
            return
        self.state, self.read_to = PartitionState.from_bytes(result.state.to_bytes()), markers[-1].marker_offset + 1
        self.ticks_in = sender.term


def do(broker: Broker, what: str, *arguments: Any) -> None:  # as the strategy makes them
    """Let one thing happen."""
    match what:
        case "open" | "batch" | "tend":
            tracker = broker.trackers[arguments[0]]
            if not tracker.is_stalled:
                tracker.is_stalled = True
                tracker.do(what, *arguments[1:])
                tracker.is_stalled = False
        case "tick":
            broker.write(Marker(MarkerType.TICK, term=broker.trackers[arguments[0]].ticks_in))
        case "pass":
            broker.now_ms += arguments[0]
        case "give up":
            broker.end(is_commit=False)
            broker.epoch += 1
        case _:
            consume(broker, what, *arguments)


def consume(broker: Broker, what: str, message: int, lease_ms: int) -> None:
    """Write what a consumer writes."""
    covered = (OffsetRange(message, 1),)
    match what:
        case "start":
            broker.write(Marker(MarkerType.START, 0, covered, redeliver_after_ms=lease_ms))
        case "renew":
            broker.write(Marker(MarkerType.KEEPALIVE, 0, covered, redeliver_after_ms=lease_ms))
        case "ack" | "reject":
            outcome = Outcome.ACKED if what == "ack" else Outcome.REJECTED
            broker.write(Marker(MarkerType.END, 0, covered, outcome=outcome))


TRACKER = st.integers(0, 1)
OPEN = st.tuples(st.just("open"), TRACKER, st.booleans(), st.booleans())
BATCH = st.tuples(st.just("batch"), TRACKER, st.sampled_from([2, 100, 100, 100]), st.sampled_from([False, False, True]))
TICK = st.tuples(st.just("tick"), TRACKER)
CONSUMED = st.tuples(
    st.sampled_from(["start", "start", "renew", "ack", "reject"]), st.integers(0, 2), st.sampled_from([0, 15])
)
OTHER = st.one_of(st.tuples(st.just("tend"), TRACKER), st.tuples(st.just("pass"), st.sampled_from([1, 50])))
PLAIN = st.one_of(BATCH, BATCH, BATCH, TICK, TICK, OPEN, CONSUMED, CONSUMED, OTHER)
FAILED = st.sampled_from([("lost",), ("done and lost",), ("give up",)])
# What happens within the calls of a step: for some calls nothing, then up to three things.
SCRIPTS = st.builds(
    lambda calls, things: [("",)] * calls + things,
    st.integers(0, 3),
    st.lists(st.one_of(FAILED, OPEN, BATCH, TICK, CONSUMED), max_size=3),
)
STEPS = st.lists(st.tuples(PLAIN, SCRIPTS), min_size=10, max_size=30)


@contextlib.contextmanager
def scripted() -> Iterator[Broker]:
    """Yield a broker that all clients of the senders use."""
    broker = Broker()
    broker.trackers = [Tracker(broker), Tracker(broker)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(transaction, "make_client", lambda *_: Producer(broker))
        patched.setattr(redelivery, "make_client", lambda *_: None)
        patched.setattr(redelivery, "TrackerPositions", lambda *_: Positions(broker))
        patched.setattr(redelivery, "PayloadReader", lambda *_: Payloads())
        patched.setattr(redelivery, "FENCED_WAIT_S", 0.0)
        yield broker


def run(broker: Broker, steps: Steps) -> None:
    """Let things happen, 5 ms apart, to a queue that a tracker has and that holds two messages."""
    for step in (("open", 0, True, False), ("start", 0, 15), ("start", 1, 0)):
        do(broker, *step)
    for step, script in steps:
        broker.script, broker.now_ms = list(script), broker.now_ms + 5
        do(broker, *step)


def finish(broker: Broker) -> None:
    """Let a last tracker start, without failures, and carry out what is due."""
    broker.script = []
    last = Tracker(broker)
    last.open(True, False)  # noqa: FBT003
    broker.now_ms += 1_000
    broker.trackers.append(last)
    for _ in range(3):
        do(broker, "tick", 2)
        last.batch(10_000, False)  # noqa: FBT003


def judged(broker: Broker) -> list[str]:
    """Return what is wrong with what was carried out, and what is left."""
    log = broker.readable()
    found = follow(Evidence(Dump("orders", {0: log}), []), 0)
    wrong = [
        f"{end.marker.outcome.name} of {end.message} at {end.offset}: {end.wrong or end.intruder}"
        for end in found.ends
        if end.decided is None or end.intruder
    ]
    return wrong + [f"{message} is left" for message in found.oracle.in_flight]


@settings(max_examples=examples(1.5), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(STEPS)
def test_what_is_carried_out_is_what_the_log_decides(
    steps: list[tuple[tuple[Any, ...], list[tuple[Any, ...]]]],
) -> None:
    """Nothing twice, nothing after an acknowledgement, nothing early, nothing never."""
    with scripted() as broker:
        run(broker, steps)
        finish(broker)
        assert judged(broker) == []


def test_tracker_whose_producer_could_not_be_replaced_starts_again() -> None:
    """The periodic work fails to replace it. The batch that follows finds none, and must not end the tracker."""
    with scripted() as broker:
        run(broker, [(("tend", 0), [("lost",), ("lost",)]), (("tick", 0), []), (("batch", 0, 100, False), [])])
        finish(broker)
        assert judged(broker) == []
