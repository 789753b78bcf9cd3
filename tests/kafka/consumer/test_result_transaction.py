"""Transactions of a consumer: results and ENDs appear together or not at all."""

# ruff: noqa: PT012  # the error comes at the end of a block, which holds what the block is for

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from kmq_spark.consumer.offsets import GATHER_FROM, OffsetCommits
from kmq_spark.core.markers import MarkerType
from kmq_spark.errors import LeaseLostError
from kmq_spark.kafka.transaction import TransactionalProducer
from kmq_spark.producer.producer import QueueProducer
from tests.kafka.conftest import Queue, consumer_of, ended, read_all, receive_all, seen, track, wait_until
from tests.kafka.consumer.test_ahead import MEMBERS
from tests.limits import COMES_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from kmq_spark.consumer.consumer import QueueConsumer

pytestmark = pytest.mark.kafka


def test_results_and_ends_appear_together(make_queue: Callable[..., Queue], results: Queue) -> None:
    """One transaction with messages of several partitions and several result topics."""
    queue, other = make_queue(partitions=2), make_queue()
    for partition in range(2):
        queue.send("a", "b", partition=partition)
    with consumer_of(queue, extra={"client.id": "worker-7"}) as consumer:
        messages = receive_all(consumer, 4)
        with consumer.transaction() as tx:
            for message in messages:
                tx.send(results.name, (message.value or b"") + b"!", key="k", headers=[("trace", "1")])
                tx.ack(message)
            tx.send(other.name, None, partition=0)
            assert (seen(results), ended(queue)) == ([], [])
            assert consumer.in_flight_count == 4
        assert sorted(seen(results)) == [b"a!", b"a!", b"b!", b"b!"]
        assert seen(other) == [None]
        assert ended(queue) == [0, 0, 1, 1]
        assert consumer.in_flight_count == 0
        assert [message.settled_by for message in messages] == ["ack"] * 4
        ends = queue.markers(MarkerType.END)
        assert {each.marker.consumer_id for each in ends} == {"worker-7"}
        assert all(each.marker_partition == each.marker.queue_partition for each in ends)
    record = read_all(results.bootstrap_servers, results.name)[0]
    assert (record.key(), record.headers()) == (b"k", [("trace", b"1")])
    # Nothing came after the ENDs: neither a second END nor a release at the end.
    assert ended(queue) == [0, 0, 1, 1]
    assert queue.markers(MarkerType.KEEPALIVE) == []


def test_answer_to_a_commit_comes_while_another_thread_commits(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client makes the commit wait until `consume` has ended, and the answer comes inside `consume`."""
    queue.send("a")
    with consumer_of(queue) as consumer:
        receive_all(consumer, 1)
        fetcher = consumer._pipeline._fetcher
        offsets, on_commit, receive = fetcher.offsets, fetcher.offsets.on_commit, consumer.receive

        def commit() -> None:
            offsets.add(offsets.positions, 0.0)
            offsets.send(fetcher.client)

        committing, receiving = (threading.Thread(target=each, daemon=True) for each in (commit, lambda: receive(1)))

        def answer(*of: Any) -> None:
            if committing.ident is None:
                committing.start()
                time.sleep(0.5)
            on_commit(*of)

        monkeypatch.setattr(offsets, "on_commit", answer)
        offsets.add(offsets.positions, 0.0)
        receiving.start()
        for each in (receiving, committing):
            each.join(COMES_S)
            assert not each.is_alive()


def test_message_whose_lease_ran_out_is_refused_before_anything_is_written(queue: Queue, results: Queue) -> None:
    queue.send("a", "b")
    with consumer_of(queue, lease=1, max_lease=1) as consumer:
        first, second = receive_all(consumer, 2)
        with pytest.raises(LeaseLostError, match="the lease ran out"), consumer.transaction() as tx:
            tx.send(results.name, "r")
            tx.ack(first)
            time.sleep(1.05)
        with pytest.raises(LeaseLostError, match="the lease ran out"), consumer.transaction() as tx:
            tx.ack(second)
    assert (seen(results), ended(queue)) == ([], [])


def test_lease_that_ends_while_the_results_are_sent_aborts_the_transaction(
    queue: Queue, results: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The END is on the broker, but it is unknown whether it came before the deadline: the transaction is aborted."""
    queue.send("a")
    with consumer_of(queue, lease=1, max_lease=1) as consumer:
        (message,) = receive_all(consumer, 1)
        slow_down(consumer, monkeypatch, 1.05)
        with pytest.raises(LeaseLostError, match="before the commit"), consumer.transaction() as tx:
            tx.send(results.name, "r")
            tx.ack(message)
    assert (seen(results), ended(queue)) == ([], [])
    assert seen_uncommitted(results) == [b"r"]


def test_host_that_slept_commits_no_result_of_a_lease_that_ran_out(queue: Queue, results: Queue) -> None:
    """Its clock stood still, the broker's went on: another consumer may have the message by now."""
    queue.send("a")
    with consumer_of(queue, lease=1, max_lease=1) as consumer:
        (message,) = receive_all(consumer, 1)
        message._lease.ends_at += 3_600
        time.sleep(1.05)
        assert message.is_held
        with (
            pytest.raises(LeaseLostError, match="before the commit: the lease ran out"),
            consumer.transaction() as tx,
        ):
            tx.send(results.name, "r")
            tx.ack(message)
    assert (seen(results), ended(queue)) == ([], [])
    assert seen_uncommitted(results) == [b"r"]


def slow_down(consumer: QueueConsumer, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let the consumer's transactions rest between the last delivery report and the commit."""
    with consumer.transaction() as tx:
        tx.send(consumer._topics.dead_letter_topic, "warm")
    assert consumer._transactions is not None
    producer = consumer._transactions._producer
    assert producer is not None
    drain = producer._drain

    def slow_drain() -> None:
        drain()
        time.sleep(seconds)

    monkeypatch.setattr(producer, "_drain", slow_drain)


def seen_uncommitted(topic: Queue) -> list[bytes]:
    """Return what a careless reader sees."""
    from confluent_kafka import Consumer, TopicPartition  # noqa: PLC0415  # ours reads committed records only

    client = Consumer(
        {"bootstrap.servers": topic.bootstrap_servers, "group.id": "careless", "isolation.level": "read_uncommitted"}
    )
    client.assign([TopicPartition(topic.name, 0, 0)])
    record = client.poll(5.0)
    client.close()
    return [] if record is None or record.error() else [record.value() or b""]


def test_message_is_kept_alive_while_its_commit_is_under_way(
    queue: Queue, results: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that takes longer than the lease succeeds while the lease is renewed; the message is never released."""
    queue.send("a")
    with consumer_of(queue, lease=1) as consumer:
        (message,) = receive_all(consumer, 1)
        slow_down(consumer, monkeypatch, 1.6)
        with consumer.transaction() as tx:
            tx.send(results.name, "r")
            tx.ack(message)
        assert len(queue.markers(MarkerType.KEEPALIVE)) >= 2
        assert message.settled_by == "ack"
        written = len(queue.markers(MarkerType.KEEPALIVE))
        time.sleep(0.8)
        assert len(queue.markers(MarkerType.KEEPALIVE)) == written
    assert (seen(results), ended(queue)) == ([b"r"], [0])


def test_close_waits_for_a_commit_that_is_under_way(
    queue: Queue, results: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of a running commit are not released."""
    queue.send("a")
    consumer = consumer_of(queue)
    (message,) = receive_all(consumer, 1)
    slow_down(consumer, monkeypatch, 0.6)

    def commit() -> None:
        with consumer.transaction() as tx:
            tx.send(results.name, "r")
            tx.ack(message)

    thread = threading.Thread(target=commit)
    thread.start()
    time.sleep(0.3)
    consumer.close()
    thread.join()
    assert (seen(results), ended(queue)) == ([b"r"], [0])
    assert queue.markers(MarkerType.KEEPALIVE) == []


def test_handlers_of_a_run_write_transactions_of_their_own(queue: Queue, results: Queue) -> None:
    """Their commits are serialized; a message that the handler has settled stays settled."""
    queue.send(*map(str, range(40)))
    consumer = consumer_of(queue)

    def handle(message: Any) -> None:  # noqa: ANN401  # a message
        with consumer.transaction() as tx:
            tx.send(results.name, message.value)
            tx.ack(message)

    def stop_when_done() -> None:
        wait_until(lambda: len(seen(results)) == 40)
        consumer.stop()

    thread = threading.Thread(target=stop_when_done)
    thread.start()
    summary = consumer.run(handle, concurrency=4)
    thread.join()
    assert (summary.acked, summary.failed, summary.lost) == (40, 0, 0)
    assert sorted(seen(results)) == sorted(str(number).encode() for number in range(40))
    assert ended(queue) == list(range(40))


OPTIONS: list[dict[str, Any]] = [
    {"logical_queue": "emails", "delay": timedelta(seconds=1.5), "ttl": 60, "headers": [("trace", b"1")]},
    {"at": datetime(2020, 1, 1, tzinfo=UTC)},
    {"delay": 0},
]


def test_results_take_the_options_of_a_producer(queue: Queue, make_queue: Callable[..., Queue]) -> None:
    by_producer, by_transaction = make_queue(), make_queue()
    with QueueProducer(by_producer.name, bootstrap_servers=queue.bootstrap_servers) as producer:
        for options in OPTIONS:
            producer.send("r", **options)
    queue.send("a")
    with consumer_of(queue) as consumer:
        (message,) = receive_all(consumer, 1)
        with consumer.transaction() as tx:
            for options in OPTIONS:
                tx.send(by_transaction.name, "r", **options)
            tx.ack(message)
    first, second = (
        [record.headers() for record in read_all(each.bootstrap_servers, each.name)]
        for each in (by_producer, by_transaction)
    )
    assert first == second
    assert len(second) == 3


def test_transaction_commits_only_after_the_offsets_of_its_messages(
    queue: Queue, results: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a consumer that is killed between the two leaves a message that the next one fetches and processes too."""
    queue.send(*map(str, range(3 * GATHER_FROM)))
    committed: list[dict[int, int]] = []
    run = TransactionalProducer.run

    def look_and_run(producer: TransactionalProducer, *arguments: Any, **options: Any) -> None:  # of `run`
        committed.append(queue.committed())
        run(producer, *arguments, **options)

    monkeypatch.setattr(TransactionalProducer, "run", look_and_run)
    with consumer_of(queue) as consumer:
        receive_all(consumer, 1)
        # As right after a commit: the offsets of large batches wait for the next one.
        consumer._pipeline._fetcher.offsets._committed_at = time.monotonic() + 3_600
        messages = receive_all(consumer, 3 * GATHER_FROM - 1, max_messages=3 * GATHER_FROM)
        assert queue.committed() == {0: 1}
        with consumer.transaction() as tx:
            tx.send(results.name, "r")
            for message in messages:
                tx.ack(message)
    assert committed == [{0: 3 * GATHER_FROM}]


@pytest.mark.parametrize("protocol", ["classic", pytest.param("consumer", marks=pytest.mark.slow)])
def test_consumer_that_has_left_its_group_without_its_offsets_commits_no_transaction(
    queue: Queue, results: Queue, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """The lease still holds the message, but another consumer passes it over: it is the tracker's."""
    queue.send("a", "b")
    extra = MEMBERS[protocol]
    with consumer_of(queue, extra=extra) as first:
        receive_all(first, 1)[0].ack()
        assert wait_until(lambda: queue.committed() == {0: 1})
        with monkeypatch.context() as patched:
            patched.setattr(OffsetCommits, "send_if_due", lambda *_: None)
            (message,) = receive_all(first, 1)
        queue.send("c")
        with consumer_of(queue, extra=extra) as second:
            (other,) = receive_all(second, 1)
            other.ack()
            assert other.value == b"c"
            assert message.is_held
            with pytest.raises(LeaseLostError, match="the group gave the partition"), first.transaction() as tx:
                tx.send(results.name, "first")
                tx.ack(message)
            message.release()
            first.flush()
            track(queue)
            (again,) = receive_all(second, 1)
            with second.transaction() as tx:
                tx.send(results.name, "second")
                tx.ack(again)
    assert (again.value, seen(results)) == (b"b", [b"second"])
