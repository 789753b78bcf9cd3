"""When an offset counts as confirmed by the group."""

from __future__ import annotations

import threading
from typing import Any

from confluent_kafka import KafkaError, TopicPartition

from kmq_spark.consumer.offsets import OffsetCommits
from kmq_spark.kafka.clock import now_s
from tests.limits import COMES_S


class Client:
    """Notes what is committed."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def commit(self, offsets: list[TopicPartition], **_options: bool) -> None:
        """Send a commit."""
        self.sent += [each.offset for each in offsets]


def test_offset_is_confirmed_when_no_older_commit_can_arrive_later() -> None:
    """The client sends a commit again whose connection broke, maybe after the next one: the group would go back."""
    offsets, client = OffsetCommits("orders"), Client()
    sending: Any = client
    for offset in (5, 9):
        offsets.add({0: offset}, within_s=0.0)
        offsets.send(sending)
    assert client.sent == [5, 9]
    offsets.on_commit(None, [TopicPartition("orders", 0, 9)])
    assert not offsets.are_confirmed({0: 5})
    offsets.on_commit(None, [TopicPartition("orders", 0, 5)])
    assert offsets.are_confirmed({0: 9})


def test_offset_that_another_thread_adds_during_a_commit_is_sent_after_it() -> None:
    """That thread does not wait, and the order is kept."""
    offsets = OffsetCommits("orders")

    class Slow(Client):
        def commit(self, offsets: list[TopicPartition], **options: bool) -> None:
            """Let another thread add an offset during the first commit."""
            if not self.sent:
                other = threading.Thread(target=add, args=(9,), daemon=True)
                other.start()
                other.join(COMES_S)
                assert not other.is_alive()
            super().commit(offsets, **options)

    client: Any = Slow()

    def add(offset: int) -> None:
        offsets.add({0: offset}, within_s=0.0)
        offsets.send(client)

    add(5)
    assert client.sent == [5, 9]


def test_refused_offset_is_sent_again_and_a_forgotten_one_stays_confirmed() -> None:
    offsets, client = OffsetCommits("orders"), Client()
    sending: Any = client
    offsets.add({0: 5, 1: 7}, within_s=0.0)
    offsets.send(sending)
    refused = KafkaError(KafkaError.REBALANCE_IN_PROGRESS)
    offsets.on_commit(refused, [TopicPartition("orders", 0, 5), TopicPartition("orders", 1, 7)])
    assert not offsets.are_confirmed({0: 5})
    assert offsets.is_failing
    offsets.send(sending)
    assert client.sent == [5, 7, 5, 7]
    offsets.on_commit(None, [TopicPartition("orders", 0, 5), TopicPartition("orders", 1, 7)])
    assert not offsets.is_failing
    offsets.forget({0})
    assert offsets.are_confirmed({0: 5, 1: 7})
    assert offsets.positions == {1: 7}


def test_only_a_commit_that_the_group_has_taken_says_that_it_knew_the_consumer_when_it_was_sent() -> None:
    offsets, client = OffsetCommits("orders"), Client()
    sending: Any = client
    created_at = offsets.accepted_at
    for error in (KafkaError(KafkaError.UNKNOWN_MEMBER_ID), None):
        assert offsets.accepted_at == created_at
        offsets.add({0: 5}, within_s=0.0)
        offsets.send(sending)
        sent_by = now_s()
        offsets.on_commit(error, [TopicPartition("orders", 0, 5)])
    assert created_at < offsets.accepted_at <= sent_by


def test_lock_that_an_interrupt_left_held_keeps_no_other_thread_waiting() -> None:
    offsets, client = OffsetCommits("orders"), Client()
    sending: Any = client
    offsets.add({0: 5}, within_s=0.0)
    for _ in range(2):
        offsets._changed.acquire()
    offsets.let_go()
    leaving = threading.Thread(target=offsets.send_revoked, args=(sending, [0]), daemon=True)
    leaving.start()
    leaving.join(COMES_S)
    assert client.sent == [5]
