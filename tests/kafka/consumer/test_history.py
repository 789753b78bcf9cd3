"""A group without committed offsets on a queue with history: nothing that was started is delivered again or lost."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import ConsumerGroupState, ConsumerGroupTopicPartitions, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from kmq_spark.core.markers import Marker, MarkerType, OffsetRange
from kmq_spark.errors import KmqError, TopicError
from kmq_spark.failpoints import EXIT_CODE, VARIABLE
from kmq_spark.kafka.topics import create_queue_topics
from kmq_spark.wire.codec import encode_marker
from tests.kafka.conftest import (
    Queue,
    add_partitions,
    consumer_of,
    covered,
    delete_topics,
    ended,
    read_all,
    receive_all,
    remove_markers,
    seen,
    track,
    tracked,
    wait_until,
    write_markers,
)
from tests.kafka.consumer.test_interrupts import FILES, Interrupt
from tests.limits import COMES_S, ENDS_S

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.kafka


def finish(queue: Queue, count: int, /, **options: Any) -> list[bytes | None]:
    """Receive and acknowledge messages, leave the group, and return the values."""
    with consumer_of(queue, **options) as consumer:
        messages = receive_all(consumer, count)
        for message in messages:
            message.ack()
    return [message.value for message in messages]


def leftover(queue: Queue, /, **options: Any) -> list[bytes | None]:
    """Return what a consumer that comes now receives within some seconds, and give it back."""
    with consumer_of(queue, **options) as consumer:
        return [message.value for _ in range(3) for message in consumer.receive(100, timeout=1.0)]


def delete_group(queue: Queue, suffix: str = "") -> None:
    """Delete a consumer group, and with it its offsets."""
    admin = AdminClient({"bootstrap.servers": queue.bootstrap_servers})
    group = f"kmq.{queue.name}{suffix}"

    def is_deleted() -> bool:
        try:
            admin.delete_consumer_groups([group])[group].result(10)
        except KafkaException as error:
            if error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND:
                return True
            if error.args[0].code() != KafkaError.NON_EMPTY_GROUP:  # a closed member's leave is under way
                raise
        return False

    assert wait_until(is_deleted)


def test_group_that_has_lost_its_offsets_continues_with_the_first_message_that_was_never_started(
    make_queue: Callable[..., Queue],
) -> None:
    """Of several partitions and several batches, with messages of another logical queue between them."""
    queue = make_queue(partitions=2)
    for partition in range(2):
        queue.send(*map(str, range(20)), partition=partition)
        queue.send("vip", logical_queue="vip", partition=partition)
        queue.send("last", partition=partition)
    assert len(finish(queue, 42)) == 42
    assert finish(queue, 2, logical_queue="vip") == [b"vip"] * 2
    delete_group(queue)
    delete_group(queue, ".queue-vip")
    queue.send(*"abc", partition=0)
    queue.send("vip again", logical_queue="vip", partition=1)
    assert finish(queue, 3) == [b"a", b"b", b"c"]
    assert leftover(queue, logical_queue="vip") == [b"vip again"]
    assert leftover(queue) == []
    assert queue.committed() == {0: 25, 1: 23}


def test_first_consumers_receive_what_was_sent_before(queue: Queue) -> None:
    """Those of the queue, of a logical queue whose topic has a history of others, and of a subscription."""
    queue.send(*"abc")
    queue.send("vip", logical_queue="vip")
    create_queue_topics(f"{queue.name}@audit", bootstrap_servers=queue.bootstrap_servers, partitions=1)
    assert finish(queue, 3) == [b"a", b"b", b"c"]
    assert finish(queue, 1, logical_queue="vip") == [b"vip"]
    assert finish(queue, 3, subscription="audit") == [b"a", b"b", b"c"]


def test_topic_that_was_created_again_is_read_from_its_beginning(queue: Queue) -> None:
    """The STARTs of its markers topic are of other messages."""
    queue.send(*"abc")
    finish(queue, 3)
    delete_topics(queue.bootstrap_servers, queue.name)
    create_queue_topics(queue.name, bootstrap_servers=queue.bootstrap_servers, partitions=1)
    assert wait_until(lambda: not queue.committed())
    time.sleep(1.0)
    queue.send(*"defg")
    assert finish(queue, 4) == [b"d", b"e", b"f", b"g"]


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_topics_that_are_created_again_under_a_consumer_lose_no_message(queue: Queue, protocol: str) -> None:
    """What this consumer holds is gone: it says so, and the next one begins where the new topic begins."""
    options: Any = {"lease": 1, "max_lease": 1, "extra": {"group.protocol": protocol}}
    queue.send(*map(str, range(20)))
    found: set[bytes | None] = set()
    until = time.monotonic() + COMES_S
    with contextlib.suppress(TopicError), consumer_of(queue, **options) as consumer:
        for message in receive_all(consumer, 20)[:-1]:
            message.ack()
        consumer.flush()
        topics = AdminClient({"bootstrap.servers": queue.bootstrap_servers}).list_topics(timeout=10).topics
        delete_topics(queue.bootstrap_servers, *(name for name in topics if name.split(".")[0] == queue.name))
        create_queue_topics(queue.name, bootstrap_servers=queue.bootstrap_servers, partitions=1)
        queue.send(*map(str, range(100, 150)))
        while len(found) < 50 and time.monotonic() < until:
            found.update(message.value for message in consumer.receive(100))
    with consumer_of(queue, **options) as consumer:
        while len(found) < 50 and time.monotonic() < until:
            found.update(message.value for message in consumer.receive(100))
            # The first consumer may have started some before it saw that the topic is another.
            track(queue)
    assert found == {str(each).encode() for each in range(100, 150)}


@pytest.mark.parametrize(("offset", "expected"), [(0, [b"a", b"b", b"new"]), (2, [b"new"])])
def test_consumer_refuses_where_the_markers_are_removed_and_begins_where_an_operator_says(
    queue: Queue, offset: int, expected: list[bytes]
) -> None:
    queue.send(*"ab")
    finish(queue, 2)
    delete_group(queue)
    remove_markers(queue)
    queue.send("new")
    with consumer_of(queue) as consumer:
        with pytest.raises(KmqError, match=r"cannot tell whether message 0:0 .*--reset-offsets --execute") as raised:
            wait_until(lambda: bool(consumer.receive(10)))
        assert not raised.value.retriable
    assert queue.committed() == {}
    admin = AdminClient({"bootstrap.servers": queue.bootstrap_servers})
    wanted = ConsumerGroupTopicPartitions(f"kmq.{queue.name}", [TopicPartition(queue.name, 0, offset)])
    (future,) = admin.alter_consumer_group_offsets([wanted]).values()
    future.result(10)
    assert finish(queue, len(expected)) == expected


WORKER = """
import sys
from kmq_spark.consumer.consumer import QueueConsumer
queue, servers, count, session_ms = sys.argv[1:]
extra = {"session.timeout.ms": session_ms, "group.protocol": "classic"}
with QueueConsumer(queue, bootstrap_servers=servers, lease=1, max_lease=1, extra=extra) as consumer:
    while not (first := consumer.receive(1)):
        pass
    first[0].ack()
    consumer.flush()
    while True:
        consumer.receive(int(count))
"""


def worker(queue: Queue, count: int = 1, session_ms: int = 3_000) -> list[str]:
    """Return a program that acknowledges a message, and receives more."""
    return [sys.executable, "-c", WORKER, queue.name, queue.bootstrap_servers, str(count), str(session_ms)]


def die(queue: Queue, point: str, count: int) -> None:
    """Acknowledge a message, receive more, and die at a crash point."""
    environment = {**os.environ, VARIABLE: point}
    done = subprocess.run(worker(queue, count), env=environment, capture_output=True, timeout=ENDS_S, check=False)
    assert done.returncode == EXIT_CODE, done.stderr.decode()[-2_000:]


def starts(queue: Queue) -> list[int]:
    """Return the offsets of the messages that were started, each as often as it was."""
    return sorted(offset for each in queue.markers(MarkerType.START) for offset in covered(each.marker))


@pytest.mark.parametrize(("delay", "copies"), [(0.0, 0), (0.2, 1)])
def test_message_of_a_consumer_that_died_before_its_commit_has_one_result(
    queue: Queue, results: Queue, delay: float, copies: int
) -> None:
    """Whether the tracker has sent its copy before the next consumer comes, or sends it later."""
    queue.send("a")
    queue.send("b", delay=delay)
    die(queue, "consumer.start-durable:2", 1)
    assert queue.committed() == {0: 1}
    assert wait_until(lambda: not copies or track(queue).redelivered == copies)
    queue.send("c")
    with tracked(queue), consumer_of(queue) as consumer:

        def is_done() -> bool:
            for message in consumer.receive(1):
                with consumer.transaction() as tx:
                    tx.send(results.name, message.value)
                    tx.ack(message)
            sent = {record.offset() for record in read_all(queue.bootstrap_servers, queue.name)}
            return sent == {*ended(queue)}

        assert wait_until(is_done)
    assert sorted(seen(results)) == [b"b", b"c"]
    assert starts(queue) == sorted({*starts(queue)})


@pytest.mark.parametrize("point", ["consumer.start-durable:2", "consumer.commit-done:1", "consumer.commit-done:2"])
def test_what_consumers_that_died_had_started_is_not_started_again(queue: Queue, point: str) -> None:
    """Wherever the second one dies: in the middle of what the first one had started, or behind it."""
    queue.send(*map(str, range(40)))
    die(queue, "consumer.start-durable:2", 20)
    assert queue.committed()[0] < len(starts(queue)) < 40
    die(queue, point, 5)
    assert len(finish(queue, 40 - len(starts(queue)))) > 0
    assert starts(queue) == [*range(40)]


@pytest.mark.parametrize("has_offsets", [True, False])
def test_message_that_was_deferred_ahead_of_others_is_passed_over(queue: Queue, *, has_offsets: bool) -> None:
    """A consumer puts off what is to wait, and dies before it starts what came before that, or invents one."""
    queue.send(*"abcde")
    finish(queue, 1)
    of_no_message = OffsetRange(1_000_000, 1)
    deferral = Marker(MarkerType.START, 0, (OffsetRange(3, 1), of_no_message), 3_600_000, never_handed_out=True)
    write_markers(queue, encode_marker(deferral))
    if not has_offsets:
        delete_group(queue)
    assert finish(queue, 3) == [b"b", b"c", b"e"]
    assert starts(queue) == [*range(5), of_no_message.first]
    assert queue.committed() == {0: 5}


@pytest.mark.parametrize("has_offsets", [True, False])
def test_what_others_have_started_is_passed_over_again_after_an_interrupt(queue: Queue, *, has_offsets: bool) -> None:
    queue.send(*map(str, range(40)))
    die(queue, "consumer.start-durable:2", 20)
    if not has_offsets:
        delete_group(queue)
    known = starts(queue)
    with consumer_of(queue) as consumer:
        interrupt = Interrupt(1, FILES, lambda frame: frame.f_code.co_name == "_wait_until_durable")
        with pytest.raises(KeyboardInterrupt), interrupt:
            receive_all(consumer, 40)
        assert interrupt.at
        found = receive_all(consumer, 40 - len(known))
        for message in found:
            message.ack()
    assert sorted([*known, *(message.id.message_offset for message in found)]) == [*range(40)]


def test_group_that_has_lost_its_offsets_begins_in_each_partition_where_it_should(
    make_queue: Callable[..., Queue],
) -> None:
    """What was fetched of one partition waits while messages of another one are started, one by one."""
    queue, counts = make_queue(partitions=4), (3, 15, 3, 15)
    for partition, count in enumerate(counts):
        queue.send(*map(str, range(count)), partition=partition)
    finish(queue, sum(counts))
    delete_group(queue)
    for partition in range(4):
        queue.send("new", "new", partition=partition)
    values: list[bytes | None] = []
    with consumer_of(queue) as consumer:

        def has_all() -> bool:
            for message in consumer.receive(1):
                values.append(message.value)
                message.ack()
            return len(values) >= 8

        assert wait_until(has_all)
        assert consumer.receive(10, timeout=1.0) == []
    assert values == [b"new"] * 8
    assert queue.committed() == {partition: count + 2 for partition, count in enumerate(counts)}


@pytest.mark.parametrize("has_looked", [False, True])
def test_consumer_that_slept_for_a_session_does_not_start_what_others_have_done(
    queue: Queue, *, has_looked: bool
) -> None:
    """What it had fetched before: its client learns only later that the group has given the partition away."""
    queue.send("0")
    if not has_looked:
        finish(queue, 1)
        queue.send(*map(str, range(1, 20)))
    environment = {**os.environ, VARIABLE: f"consumer.fetched:{1 + has_looked}:stop"}
    with subprocess.Popen(worker(queue, 5), env=environment, stderr=subprocess.DEVNULL) as sleeper:
        try:
            if has_looked:
                assert wait_until(lambda: queue.committed() == {0: 1})
                queue.send(*map(str, range(1, 20)))
            assert wait_until(lambda: os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOHANG) is not None)
            finish(queue, 19)
            sleeper.send_signal(signal.SIGCONT)
            queue.send("new")
            assert wait_until(lambda: 20 in starts(queue))
        finally:
            sleeper.kill()
    assert starts(queue) == [*range(21)]


def test_consumer_goes_on_while_its_group_waits_for_another_member(make_queue: Callable[..., Queue]) -> None:
    """Until that one has joined again, or its session is over, the broker answers no commit of those that have."""
    queue = make_queue(partitions=2)
    for partition in range(2):
        queue.send("first", partition=partition)
    finish(queue, 2)
    admin, group = AdminClient({"bootstrap.servers": queue.bootstrap_servers}), f"kmq.{queue.name}"

    def is_waiting() -> bool:
        state = admin.describe_consumer_groups([group])[group].result().state
        return bool(state is ConsumerGroupState.PREPARING_REBALANCING)

    extra = {"group.protocol": "classic", "session.timeout.ms": "2000"}
    program = worker(queue, session_ms=30_000)
    with subprocess.Popen(program, stderr=subprocess.DEVNULL) as sleeper, contextlib.ExitStack() as ends:
        ends.callback(sleeper.kill)
        consumer = ends.enter_context(consumer_of(queue, extra=extra))
        assert wait_until(lambda: not consumer.receive(1, timeout=0.1) and len(consumer._pipeline.owned) == 1)
        sleeper.send_signal(signal.SIGSTOP)
        with consumer_of(queue, extra=extra):
            assert wait_until(is_waiting)
            time.sleep(1.5)  # half a session and more
            queue.send("a", partition=min(consumer._pipeline.owned))
            receive_all(consumer, 1)[0].ack()
            assert is_waiting()
            sleeper.send_signal(signal.SIGCONT)


def test_what_the_group_has_passed_meanwhile_is_not_started(queue: Queue) -> None:
    """Another consumer has gone on, while this one had no answer to a START; then it looks again."""
    queue.send(*map(str, range(20)))
    with consumer_of(queue) as consumer:
        receive_all(consumer, 1)
        assert wait_until(lambda: queue.committed() == {0: 1})
        fetcher = consumer._pipeline._fetcher
        (place,) = fetcher.client.committed([TopicPartition(queue.name, 0)], COMES_S)
        place.offset = 10
        fetcher.client.commit(offsets=[place], asynchronous=False)
        fetcher.unchecked.add(0)
        found = receive_all(consumer, 10)
        assert consumer.receive(10, timeout=1.0) == []
    assert [message.id.message_offset for message in found] == [*range(10, 20)]


def test_own_record_reaches_a_partition_that_was_added(queue: Queue) -> None:
    """A consumer may be given the partition before its producer of markers knows of it."""
    with consumer_of(queue) as consumer:
        producer = consumer._producer
        assert producer.append_own([0], COMES_S).keys() == {0}
        add_partitions(queue.bootstrap_servers, 2, f"{queue.name}.markers", queue.name)
        assert producer.append_own([0, 1], COMES_S).keys() == {0, 1}
