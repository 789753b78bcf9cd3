"""Consuming a topic with claims, on a real broker: at least once, at most once, in any order of acknowledgements."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterable
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from kmq_spark.coordination import Batch, Claim, Consumption, Coordinator
from kmq_spark.coordination import consumption as consumption_module
from kmq_spark.errors import ClaimLostError, ConfigError, KafkaClientError, TopicError, UsageError
from kmq_spark.kafka.settings import reader_config
from tests.kafka.conftest import delete_topics, wait_until
from tests.kafka.coordination.conftest import Make
from tests.limits import COMES_S

pytestmark = pytest.mark.kafka

PARTITIONS = 3


class Clicks:
    """A topic of one test, and members of one group that consume it."""

    def __init__(self, bootstrap_servers: str, make: Make) -> None:
        self.servers, self._make = bootstrap_servers, make
        self.topic = self.group = f"clicks-{time.time_ns()}"
        admin = AdminClient({"bootstrap.servers": bootstrap_servers})
        (made,) = admin.create_topics([NewTopic(self.topic, PARTITIONS, 1)]).values()
        made.result()

    def send(self, *numbers: int) -> None:
        """Send numbers, each to the partition `number % 3`."""
        producer = Producer({"bootstrap.servers": self.servers})
        for number in numbers:
            producer.produce(self.topic, str(number), partition=number % PARTITIONS)
        assert producer.flush(10) == 0

    def create_again(self) -> None:
        """Delete the topic, and create it under the same name."""
        admin = AdminClient({"bootstrap.servers": self.servers})
        delete_topics(self.servers, self.topic)
        admin.create_topics([NewTopic(self.topic, PARTITIONS, 1)])[self.topic].result()

    def member(self, client_id: str) -> Coordinator:
        """Join."""
        return self._make(client_id, group=self.group)

    def consume(
        self, member: Coordinator, count: float = math.inf, *, idle: float = COMES_S, **options: Any
    ) -> list[int]:
        """Consume until so many have come, or nothing arrives for a while; return the numbers."""
        found = list[int]()
        with Consumption(member, self.topic, idle=idle, **options) as batches:
            for batch in batches:
                batch.check()
                found += numbers_of(batch)
                if len(found) >= count:
                    break
        return found

    def committed(self) -> list[int]:
        """Return the offsets of the Kafka group."""
        client = Consumer(reader_config(self.servers, f"kmq.coordination.{self.group}"))
        places = [TopicPartition(self.topic, partition) for partition in range(PARTITIONS)]
        offsets = [place.offset for place in client.committed(places, timeout=10)]
        client.close()
        return offsets


def numbers_of(batch: Batch) -> list[int]:
    """Return the numbers in a batch."""
    return [int(message.value() or b"") for message in batch]


@pytest.fixture
def clicks(bootstrap_servers: str, make: Make) -> Clicks:
    """A topic of this test."""
    return Clicks(bootstrap_servers, make)


@pytest.mark.parametrize("mode", ["at-least-once", "at-most-once"])
def test_topic_is_consumed_once_and_in_order_where_nothing_fails(clicks: Clicks, mode: str) -> None:
    """The next owner begins at the position; Kafka's own offsets show it too."""
    clicks.send(*range(30))
    first = clicks.member("a")
    found = clicks.consume(first, 30, mode=mode, max_messages=4)
    assert sorted(found) == list(range(30))
    for partition in range(PARTITIONS):
        assert [number for number in found if number % PARTITIONS == partition] == list(range(partition, 30, 3))
    first.close()
    clicks.send(*range(30, 36))
    assert sorted(clicks.consume(clicks.member("b"), 6, mode=mode)) == list(range(30, 36))
    assert clicks.committed() == [12] * PARTITIONS


@pytest.mark.parametrize(("mode", "count"), [("at-least-once", 60), ("at-most-once", 6)])
def test_topic_that_was_created_again_is_consumed_from_its_beginning(
    clicks: Clicks, mode: str, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it has more messages than the position of the old one, or less; and the new position stands."""
    clicks.send(*range(30))
    member = clicks.member("a")
    assert len(clicks.consume(member, 30, mode=mode)) == 30
    clicks.create_again()
    clicks.send(*range(count))
    assert sorted(clicks.consume(member, count, mode=mode)) == list(range(count))
    assert "was deleted and created again" in caplog.text
    assert clicks.consume(member, mode=mode, idle=1) == []


def test_topic_that_is_created_again_while_it_is_consumed_loses_no_message(
    clicks: Clicks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumption notices it and begins anew, or ends with an error that says so."""
    monkeypatch.setattr(consumption_module, "_CHECK_TOPIC_EVERY_S", 1.0)
    clicks.send(*range(30))
    member, found, again = clicks.member("a"), set[int](), set(range(100, 190))
    with contextlib.suppress(KafkaClientError), Consumption(member, clicks.topic, idle=15) as batches:
        for batch in batches:
            found.update(numbers_of(batch))
            if found == set(range(30)):
                batches._done()
                clicks.create_again()
                clicks.send(*again)
            if found >= again:
                break
    if not found >= again:  # it has ended with an error
        found.update(clicks.consume(member, idle=2))
    assert found >= again


def test_messages_that_were_deleted_before_they_were_consumed_are_named(
    clicks: Clicks, caplog: pytest.LogCaptureFixture
) -> None:
    """The consumption goes on with the first one that is left."""
    clicks.send(*range(0, 15, 3))
    member = clicks.member("a")
    assert len(clicks.consume(member, 5)) == 5
    clicks.send(*range(15, 30, 3))
    admin = AdminClient({"bootstrap.servers": clicks.servers})
    (done,) = admin.delete_records([TopicPartition(clicks.topic, 0, 8)]).values()
    done.result()
    assert clicks.consume(member, 2) == [24, 27]
    assert f"messages 5 to 7 of partition 0 of {clicks.topic} were deleted" in caplog.text


def test_position_past_the_end_of_the_topic_is_an_error(clicks: Clicks) -> None:
    """The broker has lost messages, or an operator has mistyped: nothing is passed over or repeated in silence."""
    clicks.send(0)
    member, operator = clicks.member("a"), clicks.member("o")
    operator.pause(60)
    operator.set_position(f"{clicks.topic}/0", 9)
    operator.resume()
    with pytest.raises(
        TopicError, match=r"position is past the end of partition 0 of clicks-.*: got 9; expected 0 to 1"
    ):
        clicks.consume(member)


def test_members_share_the_partitions(clicks: Clicks) -> None:
    """Each partition has one owner; a member takes at most `most_claims`."""
    clicks.send(*range(30))
    first, second = clicks.member("a"), clicks.member("b")
    with Consumption(first, clicks.topic, most_claims=2) as batches:
        batch = next(iter(batches))
        others = clicks.consume(second, 10)
        assert clicks.consume(second, idle=1) == []
        assert len(first.claims) == 2
        assert {number % PARTITIONS for number in others} == set(range(PARTITIONS)) - {*partitions_of(first)}
        batch.check()


def partitions_of(member: Coordinator) -> list[int]:
    """Return the partitions that a member holds."""
    return [int(name.rpartition("/")[2]) for name in member.claims if "/waits/" not in name]


def follow(batches: Iterable[Batch], found: list[int]) -> threading.Thread:
    """Consume in a thread, up to a negative number."""

    def run() -> None:
        for batch in batches:
            found.extend(numbers_of(batch))
            if found[-1] < 0:
                return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_each_member_gets_its_share_whoever_comes_first(clicks: Clicks) -> None:
    """A member that comes later is given a partition, and it returns when that one is gone; each message comes once."""
    first, second, found = clicks.member("a"), clicks.member("b"), list[int]()

    def has(*counts: int) -> bool:
        return wait_until(lambda: (len(partitions_of(first)), len(partitions_of(second))) == counts)

    clicks.send(*range(30))
    with Consumption(first, clicks.topic) as batches:
        thread = follow(batches, found)
        assert has(3, 0)
        with Consumption(second, clicks.topic) as others:
            other = follow(others, found)
            assert has(2, 1)
            clicks.send(*range(30, 60))
            assert wait_until(lambda: len(found) == 60)
            clicks.send(partitions_of(second)[0] - PARTITIONS)
            other.join(COMES_S)
        assert has(3, 0)
        clicks.send(-PARTITIONS)
        thread.join(COMES_S)
    assert sorted(found)[2:] == list(range(60))


def test_partition_is_given_away_when_its_messages_are_acknowledged(clicks: Clicks) -> None:
    """Not before: the other member would get them too."""
    clicks.send(*range(30))
    first, second, found = clicks.member("a"), clicks.member("b"), list[int]()
    with (
        Consumption(first, clicks.topic, auto_ack=False, max_messages=5) as batches,
        Consumption(second, clicks.topic) as others,
    ):
        iterator = iter(batches)
        mine = [next(iterator) for _ in range(6)]
        threads = [follow(iterator, []), follow(others, found)]
        assert wait_until(lambda: len(batches._leaving) == 1)
        assert (len(first.claims), list(second.claims)) == (3, [f"{clicks.topic}/waits/b"])
        for batch in mine:
            batch.ack()
        assert wait_until(lambda: len(partitions_of(second)) == 1)
        (theirs,) = partitions_of(second)
        clicks.send(30 + theirs)
        for partition in range(PARTITIONS):
            clicks.send(partition - PARTITIONS)
        for thread in threads:
            thread.join(COMES_S)
    assert found == [30 + theirs, theirs - PARTITIONS]


def test_messages_that_are_not_acknowledged_are_delivered_again(clicks: Clicks) -> None:
    """The lowest gap counts, whatever was acknowledged behind it."""
    clicks.send(0, 3, 6, 9, 12)
    first = clicks.member("a")
    found = 0
    with Consumption(first, clicks.topic, auto_ack=False, idle=COMES_S) as batches:
        for batch in batches:
            found += len(batch)
            for message in reversed(batch.messages):
                if message.value() != b"6":
                    batch.ack(message)
            if found == 5:
                break
    assert found == 5
    assert clicks.consume(clicks.member("b"), 3) == [6, 9, 12]


def test_batch_of_a_handler_that_failed_is_delivered_again(clicks: Clicks) -> None:
    """At least once: its position did not move."""
    clicks.send(0, 3)
    first = clicks.member("a")

    def fail() -> None:
        with Consumption(first, clicks.topic) as batches:
            assert len(next(iter(batches))) > 0
            message = "a bad message"
            raise RuntimeError(message)

    with pytest.raises(RuntimeError, match="a bad message"):
        fail()
    assert clicks.consume(clicks.member("b"), 2) == [0, 3]


def test_second_consumption_of_a_topic_by_one_member_is_refused(clicks: Clicks) -> None:
    """Both would read the partitions that the member has claimed."""
    member = clicks.member("a")
    with (
        Consumption(member, clicks.topic),
        pytest.raises(UsageError, match=f"topic '{clicks.topic}' is consumed already"),
    ):
        Consumption(member, clicks.topic)
    Consumption(member, clicks.topic).close()


def test_batch_that_is_refused_while_its_claim_stands_is_fetched_again(
    clicks: Clicks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pause of the group refuses it, for a moment; the batches behind it would move the position past it."""
    clicks.send(*range(0, 60, 3))
    claim_messages, refused = Claim.claim_messages, list[int]()

    def refuse_twice(claim: Claim, end: int, **options: Any) -> None:
        if len(refused) < 2:
            refused.append(end)
            message = "messages changed nothing: group_paused; stop working on it"
            raise ClaimLostError(message, resource=claim.resource, epoch=claim.epoch)
        claim_messages(claim, end, **options)

    monkeypatch.setattr(Claim, "claim_messages", refuse_twice)
    found = clicks.consume(clicks.member("a"), 20, mode="at-most-once", max_messages=4)
    assert (found, len(refused)) == (list(range(0, 60, 3)), 2)


def test_batch_whose_claim_could_not_be_written_is_fetched_again(
    clicks: Clicks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that goes on after the error gets every message."""
    clicks.send(*range(0, 60, 3))
    claim_messages, failed, found = Claim.claim_messages, list[int](), list[int]()

    def fail_twice(claim: Claim, end: int, **options: Any) -> None:
        if len(failed) < 2:
            failed.append(end)
            raise KafkaClientError("cannot write: Queue full; check the broker", code="_QUEUE_FULL", retriable=True)
        claim_messages(claim, end, **options)

    monkeypatch.setattr(Claim, "claim_messages", fail_twice)
    with Consumption(clicks.member("a"), clicks.topic, mode="at-most-once", max_messages=4, idle=COMES_S) as batches:
        while len(found) < 20:
            with contextlib.suppress(KafkaClientError):
                found += numbers_of(next(iter(batches)))
    assert (sorted(found), len(failed)) == (list(range(0, 60, 3)), 2)


def test_messages_behind_a_failure_of_a_fetch_are_handed_out(clicks: Clicks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition that may not be read is an error; the others, fetched with it, are not skipped."""

    class Denied:
        def error(self) -> KafkaError:
            return KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)

        def partition(self) -> int:
            return 1

    clicks.send(*range(0, 60, 3))
    found = list[int]()
    with Consumption(clicks.member("a"), clicks.topic, max_messages=4, idle=COMES_S) as batches:
        client = batches._client
        failing = FailingOnce(client, Denied())
        monkeypatch.setattr(batches, "_client", failing)
        while len(found) < 20:
            with contextlib.suppress(KafkaClientError):
                found += numbers_of(next(iter(batches)))
        monkeypatch.setattr(batches, "_client", client)
    assert (sorted(found), failing.is_done) == (list(range(0, 60, 3)), True)


class FailingOnce:
    """A client whose first messages come behind a failure."""

    def __init__(self, client: Consumer, failure: object) -> None:
        self._client, self._failure, self.is_done = client, failure, False
        self._held: list[Any] = []

    def __getattr__(self, name: str) -> object:
        """Pass on all else."""
        return getattr(self._client, name)

    def poll(self, timeout: float) -> object:
        """Return the failure in place of the first message, which follows it."""
        found = self._client.poll(timeout)
        if found is None or self.is_done:
            return found
        self.is_done = True
        self._held.append(found)
        return self._failure

    def consume(self, count: int, timeout: float) -> list[Any]:
        """Return the message that the failure came before, and what follows."""
        held, self._held = self._held, []
        return [*held, *self._client.consume(count - len(held), timeout)]


def test_partitions_of_a_member_that_is_stuck_go_to_another(clicks: Clicks) -> None:
    """Also those of which it has no message: its thread does not come back. What it held is delivered again."""
    stuck, other = clicks.member("a"), clicks.member("b")
    clicks.send(0)
    with Consumption(stuck, clicks.topic, release_if_behind=1) as batches:
        batch = next(iter(batches))
        clicks.send(1, 2, 3)
        assert sorted(clicks.consume(other, 4)) == [0, 1, 2, 3]
        with pytest.raises(ClaimLostError):
            batch.check()


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "exactly-once"},
        {"max_messages": 0},
        {"release_if_behind": float("nan")},
    ],
)
def test_options_out_of_bounds_are_refused(clicks: Clicks, options: dict[str, Any]) -> None:
    """Before anything is claimed."""
    with pytest.raises(ConfigError):
        Consumption(clicks.member("a"), clicks.topic, **options)


def test_topic_that_does_not_exist_is_refused(clicks: Clicks) -> None:
    """A wrong name is an error, not an endless wait."""
    with (
        pytest.raises(TopicError, match="topic 'no-such-topic' does not exist"),
        Consumption(clicks.member("a"), "no-such-topic") as batches,
    ):
        next(iter(batches))
