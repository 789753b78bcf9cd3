"""The tracker's sender on a real broker: what a transaction contains; nothing is lost, sent twice or seen early."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from confluent_kafka import Producer, TopicPartition

from kmq_spark.core.decisions import Decision
from kmq_spark.core.markers import Marker, MarkerType, Outcome
from kmq_spark.core.outcome import PartitionOutcome
from kmq_spark.core.policy import DecisionAction
from kmq_spark.core.state import Status
from kmq_spark.errors import FencedError
from kmq_spark.kafka.settings import reader_config
from kmq_spark.kafka.topics import QueueLayout, create_queue_topics
from kmq_spark.tracker.sender.attempts import Attempt
from kmq_spark.wire.codec import decode_marker
from kmq_spark.wire.headers import DLQ_MESSAGE, ORIGIN
from tests.builders import decisions_of
from tests.kafka.conftest import add_partitions, delete_topics, read_all, set_topic
from tests.kafka.tracker.senders import new_sender
from tests.limits import COMES_S

if TYPE_CHECKING:
    from confluent_kafka import Message

    from kmq_spark.tracker.sender.redelivery import RedeliverySender

pytestmark = pytest.mark.kafka

DEADLINE_MS = 1_000


class Committed(NamedTuple):
    """What a tracker group has committed of one partition."""

    next_offset: int
    needed_offset: int
    tracker_id: str


class Place:
    """A queue of one test, and senders on it."""

    def __init__(self, bootstrap_servers: str, layout: QueueLayout) -> None:
        self.bootstrap_servers = bootstrap_servers
        self.layout = layout
        self._senders: list[RedeliverySender] = []

    def sender(self, **limits: Any) -> RedeliverySender:
        """Return a new sender, opened."""
        sender = new_sender(self.layout, self.bootstrap_servers, **limits)
        self._senders.append(sender)
        sender.open()
        return sender

    def close(self) -> None:
        """Close every sender."""
        for sender in self._senders:
            sender.close()

    def send(
        self, *values: bytes, partition: int = 0, headers: Sequence[tuple[str, bytes]] = (("app", b"x"),)
    ) -> list[int]:
        """Write messages as a plain producer does, any size; return their offsets."""
        offsets: list[int] = []
        client = Producer(
            {"bootstrap.servers": self.bootstrap_servers, "message.max.bytes": 10_000_000, "linger.ms": 0}
        )
        for value in values:
            client.produce(
                self.layout.topics.queue_topic, value, key=b"k", partition=partition, headers=list(headers),
                on_delivery=lambda error, record: offsets.append(record.offset() or 0) if error is None else None,
            )  # fmt: skip
            client.flush(10)
        assert len(offsets) == len(values)
        return offsets

    def messages(self) -> list[Message]:
        """Return what the tracker has sent to the queue topic."""
        found = read_all(self.bootstrap_servers, self.layout.topics.queue_topic)
        return [record for record in found if ORIGIN in dict(record.headers() or [])]

    def dead_letters(self) -> list[Message]:
        """Return the dead-letter topic."""
        return read_all(self.bootstrap_servers, self.layout.topics.dead_letter_topic)

    def ends(self) -> list[Marker]:
        """Return the ENDs of the markers topic."""
        found = read_all(self.bootstrap_servers, self.layout.topics.markers_topic)
        markers = [decode_marker(record.value()) for record in found if (record.value() or b"?")[:1] != b"?"]
        return [marker for marker in markers if marker.type is MarkerType.END]

    def committed(self, partition: int = 0) -> Committed:
        """Return the position of the tracker's group."""
        from confluent_kafka import Consumer  # noqa: PLC0415  # only here

        client = Consumer(reader_config(self.bootstrap_servers, self.layout.topics.tracker_group))
        (found,) = client.committed([TopicPartition(self.layout.topics.markers_topic, partition)], timeout=10)
        client.close()
        metadata = json.loads(found.metadata or "")
        return Committed(found.offset, metadata["needed"], metadata["by"])


def reason_of(record: Message) -> str:
    """Return why a dead letter is one."""
    reason = dict(record.headers() or [])[DLQ_MESSAGE]
    return reason.decode() if isinstance(reason, bytes) else ""


def due(*message_offsets: int, partition: int = 0) -> list[Decision]:
    """Return decisions to redeliver messages."""
    redeliver = DecisionAction.REDELIVER
    return [Decision(partition, offset, 1, redeliver, DEADLINE_MS, 9, 2_000, 3, "") for offset in message_offsets]


def outcome(
    decisions: Sequence[Decision] = (),
    *,
    next_offset: int = 10,
    needed_offset: int = 4,
    partition: int = 0,
    message_counts: Sequence[int] = (),
) -> PartitionOutcome:
    """Return the outcome of one markers partition."""
    return PartitionOutcome(
        partition,
        Status(next_offset, 2_000, 0, needed_offset, None, {}),
        decisions_of(decisions, message_counts),
    )


@pytest.fixture
def make_place(bootstrap_servers: str, request: pytest.FixtureRequest) -> Iterator[Callable[..., Place]]:
    """Make queues named after the test."""
    made: list[Place] = []

    def make(partitions: int = 1, max_message_bytes: int = 1_048_576) -> Place:
        name = f"{request.node.name[:60]}-{time.time_ns()}".replace("[", "-").replace("]", "")
        layout = create_queue_topics(
            name, bootstrap_servers=bootstrap_servers, partitions=partitions, max_message_bytes=max_message_bytes
        )
        made.append(Place(bootstrap_servers, layout))
        return made[-1]

    yield make
    for place in made:
        place.close()


@pytest.fixture
def place(make_place: Callable[..., Place]) -> Place:
    """A queue of one partition."""
    return make_place()


def test_transaction_holds_message_end_and_offsets(place: Place) -> None:
    """All three are visible or none is; key, value and headers are kept."""
    (offset,) = place.send(b"value")
    sender = place.sender()
    sent = sender.deliver([outcome(due(offset))])
    (message,), (end,) = place.messages(), place.ends()
    assert (message.key(), message.value(), next(iter(message.headers() or []))) == (b"k", b"value", ("app", b"x"))
    assert (end.outcome, end.ranges) == (Outcome.REDELIVERED, ((offset, 1),))
    assert place.committed() == Committed(10, 4, sender.tracker_id)
    assert (sent.redelivered, sent.dead_lettered) == (1, 0)
    assert sent.lateness_ms == [message.timestamp()[1] - DEADLINE_MS]


def test_run_of_decisions_is_cut_where_a_transaction_is_full(place: Place) -> None:
    """By messages and by bytes; the ENDs show where the transactions begin, and the offsets go last."""
    first, *_ = place.send(*(b"%d" % number for number in range(25)))
    batch = [outcome(due(first), message_counts=[25])]
    assert place.sender(max_transaction_messages=10).deliver(batch).redelivered == 25
    assert [record.value() for record in place.messages()] == [b"%d" % number for number in range(25)]
    assert [end.ranges for end in place.ends()] == [((0, 10),), ((10, 10),), ((20, 5),)]
    assert place.committed().next_offset == 10
    first, *_ = place.send(*(b"x" * 1_000 for _ in range(9)))
    place.sender(max_transaction_bytes=2_500).deliver([outcome(due(first), message_counts=[9])])
    assert [end.ranges for end in place.ends()[3:]] == [((first + at, 3),) for at in (0, 3, 6)]


def test_newer_tracker_shuts_the_older_one_out(place: Place) -> None:
    """The older one's next batch sends nothing, and the first one with the newer one's TERM ends it."""
    (offset,) = place.send(b"value")
    older = place.sender()
    newer = place.sender()
    assert older.deliver([outcome(due(offset), next_offset=99)]).redelivered == 0
    taken_over = replace(outcome(), status=replace(outcome().status, term=newer.term, term_by=newer.tracker_id))
    with pytest.raises(FencedError) as raised:
        older.deliver([taken_over])
    assert f"was fenced: newer tracker {newer.tracker_id} has taken over; this one ends" in str(raised.value)
    assert (place.messages(), place.ends()) == ([], [])
    assert place.committed().tracker_id == newer.tracker_id
    assert newer.deliver([outcome(due(offset))]).redelivered == 1


def test_batch_of_messages_that_are_too_large_does_not_stand_still(
    make_place: Callable[..., Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client reports about three refusals per attempt: that must not lead to one attempt for every three."""
    place = make_place(max_message_bytes=10_000)
    offsets = place.send(*(b"x" * (10_000 + 16 * 1024 - 110 - number % 7) for number in range(60)))
    sender, attempts = place.sender(), list[Attempt]()

    def attempt(*arguments: Any, **options: Any) -> Attempt:
        attempts.append(Attempt(*arguments, **options))
        return attempts[-1]

    monkeypatch.setattr("kmq_spark.tracker.sender.redelivery.Attempt", attempt)
    sent = sender.deliver([outcome(due(*offsets))])
    assert (sent.redelivered, sent.dead_lettered) == (0, 60)
    assert len(attempts) < 10


@pytest.mark.slow
def test_small_message_that_is_too_large_for_its_topic_is_found_by_the_second_term(place: Place) -> None:
    """
    In the first attempt it has no delivery report: small messages are rejected only where the limit is tiny. The
    attempt of the next term has one for each message. On a slow machine the broker gives the first transaction up
    before the tracker does: then the next term begins some batches later.
    """
    first, *_ = place.send(b"0", b"x" * 400, b"2", b"3")
    set_topic(place.bootstrap_servers, place.layout.topics.queue_topic, "max.message.bytes", "450")
    place.layout = replace(place.layout, max_message_bytes=450)
    sender = place.sender(transaction_timeout=3)
    assert sender.deliver([outcome(due(first), message_counts=[4])]).redelivered == 0
    until = time.monotonic() + COMES_S
    while True:
        sender.deliver([outcome([])])  # a batch without decisions, which every new term has first
        sent = sender.deliver([outcome(due(first), message_counts=[4])])
        if sent.redelivered or time.monotonic() > until:
            break
    (letter,) = place.dead_letters()
    assert (letter.value(), reason_of(letter)[:22]) == (b"x" * 400, "too large to redeliver")
    assert [record.value() for record in place.messages()] == [b"0", b"2", b"3"]
    assert (sent.redelivered, sent.dead_lettered, len(sent.lateness_ms)) == (3, 1, 3)


def test_payload_that_fits_nowhere_stays_and_its_dead_letter_names_the_place(
    make_place: Callable[..., Place],
) -> None:
    place = make_place(max_message_bytes=10_000)
    large = b"x" * (10_000 + 16 * 1024 - 110)
    (offset,) = place.send(large)
    set_topic(place.bootstrap_servers, place.layout.topics.dead_letter_topic, "max.message.bytes", "5000")
    sent = place.sender().deliver([outcome(due(offset))])
    (letter,) = place.dead_letters()
    assert letter.value() is None
    place_of_payload = f"the payload stays at {place.layout.topics.queue_topic}[0]@{offset}"
    assert reason_of(letter).endswith(place_of_payload)
    assert (sent.redelivered, sent.dead_lettered) == (0, 1)


def test_partition_that_came_while_the_tracker_ran_is_served(place: Place) -> None:
    """Its messages, ENDs and offset, by a client with older metadata."""
    sender = place.sender(commit_interval=0)
    (first,) = place.send(b"old")
    sender.deliver([outcome(due(first))])
    topics = place.layout.topics
    add_partitions(place.bootstrap_servers, 3, topics.queue_topic, topics.markers_topic)
    time.sleep(0.5)
    (offset,) = place.send(b"new", partition=2)
    before, batch = sender.term, [outcome(due(offset, partition=2), partition=2, next_offset=3)]
    # No TERM stood in the new partition: a new term begins, and the fold decides under it.
    assert (sender.deliver(batch).redelivered, sender.term != before) == (0, True)
    assert sender.deliver(batch).redelivered == 1
    assert [(record.partition(), record.value()) for record in place.messages()] == [(0, b"old"), (2, b"new")]
    assert place.committed(2)[:2] == (3, 4)


def test_topic_made_anew_under_a_living_tracker_is_reported_by_its_id(place: Place) -> None:
    """The old tracker commits its offset for the new topic, which is longer: only the topic id shows the difference."""
    topics, servers = place.layout.topics, place.bootstrap_servers
    write_unreadable(place, 5)
    old = place.sender(commit_interval=0)
    old.deliver([outcome(next_offset=5, needed_offset=5)])
    delete_topics(servers, *topics.all_topics)
    create_queue_topics(topics.queue_topic, bootstrap_servers=servers, partitions=1)
    write_unreadable(place, 20)
    old.tend({0: 5})
    sender = new_sender(place.layout, servers)
    try:
        resume = sender.open()
    finally:
        sender.close()
    assert resume.is_other_topic
    assert dict(resume.starting_offsets) == {0: 0}


def write_unreadable(place: Place, count: int) -> None:
    """Write records to the markers topic."""
    client = Producer({"bootstrap.servers": place.bootstrap_servers})
    for _ in range(count):
        client.produce(place.layout.topics.markers_topic, b"?")
    client.flush(10)
