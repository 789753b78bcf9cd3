"""The contract of producers, consumers and redelivery: each test runs on a queue in memory and on a broker."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka.serialization import StringDeserializer, StringSerializer
from pydantic import BaseModel

from kmq_spark import (
    BatchFailed,
    ConfigError,
    JsonDeserializer,
    JsonSerializer,
    KafkaClientError,
    LeaseLostError,
    MessageId,
    Reject,
    Retry,
    TopicError,
    TransactionError,
    UnreadableError,
    UsageError,
)
from tests.kafka.contract.conftest import World, is_empty, receive, send, soon
from tests.limits import COMES_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from kmq_spark import Batch, Message, QueueConsumer, RunSummary


WAIT_S = 1
"""How long a message is to wait; that it does is seen by the log's clock."""


def values(messages: list[Message]) -> list[bytes]:
    return [message.value or b"" for message in messages]


def in_ms(instant: datetime) -> int:
    return int(instant.timestamp() * 1000)


def run_until(
    consumer: QueueConsumer, handler: Callable[[Any], Any], is_done: Callable[[], bool], **options: Any
) -> RunSummary:
    """Run a handler until something is so."""

    def stop() -> None:
        until = time.monotonic() + COMES_S
        while not is_done() and time.monotonic() < until:
            time.sleep(0.01)
        consumer.stop()

    threading.Thread(target=stop, daemon=True).start()
    return consumer.run(handler, **options)


def test_message_arrives_as_it_was_sent(world: World) -> None:
    send(world, "a", key="k", headers=[("source", b"shop"), ("source", None)])
    with world.consumer() as consumer:
        (message,) = receive(consumer, 1)
        assert (message.value, message.key) == (b"a", b"k")
        assert message.headers == [("source", b"shop"), ("source", None)]
        assert (message.id, message.origin, message.delivery_count) == (MessageId(0, 0), MessageId(0, 0), 1)
        assert message.first_sent_at_ms == message.appended_at_ms
        assert message.is_held
        assert consumer.in_flight_count == 1
        message.ack()
        assert (message.is_settled, message.settled_by, consumer.in_flight_count) == (True, "ack", 0)
        assert is_empty(consumer)


def test_messages_of_a_partition_arrive_in_order_and_those_of_a_key_in_one_partition(
    make_world: Callable[..., World],
) -> None:
    world = make_world(partitions=3)
    send(world, *map(str, range(20)), key="k")
    send(world, *map(str, range(20)), partition=2)
    with world.consumer() as consumer:
        found = receive(consumer, 40)
        keyed = [message for message in found if message.key]
        assert values(keyed) == [b"%d" % number for number in range(20)]
        assert len({message.id.queue_partition for message in keyed}) == 1
        chosen = [message for message in found if not message.key]
        assert values(chosen) == values(keyed)
        assert {message.id.queue_partition for message in chosen} == {2}


def test_sender_learns_the_id_of_its_message(world: World) -> None:
    reports: list[Any] = []
    with world.producer() as producer:
        producer.send("a", on_delivery=lambda *report: reports.append(report))
        producer.flush()
    assert reports == [(MessageId(0, 0), None)]


def test_released_message_comes_again_and_counts(world: World) -> None:
    send(world, "a")
    with world.consumer() as consumer:
        receive(consumer, 1)[0].release()
        consumer.flush()
        world.pass_time(0)
        (again,) = receive(consumer, 1)
        assert (again.delivery_count, again.origin, again.id) == (2, MessageId(0, 0), MessageId(0, 1))
        due_ms = in_ms(soon(world, WAIT_S))
        again.release(delay=WAIT_S)
        consumer.flush()
        world.pass_time(WAIT_S)
        (last,) = receive(consumer, 1)
        assert last.delivery_count == 3
        assert last.appended_at_ms >= due_ms


def test_rejected_message_is_a_dead_letter_with_all_that_it_had(world: World) -> None:
    send(world, "a", key="k", headers={"source": b"shop"})
    with world.consumer() as consumer:
        receive(consumer, 1)[0].reject("no such customer")
        consumer.flush()
        (letter,) = world.dead_letters()
        assert (letter.value, letter.key, letter.reason) == (b"a", b"k", "no such customer")
        assert (letter.delivery_count, letter.origin) == (1, MessageId(0, 0))
        assert ("source", b"shop") in letter.headers
        assert is_empty(consumer)


def test_message_that_fails_at_each_delivery_is_a_dead_letter_with_its_last_error(
    make_world: Callable[..., World],
) -> None:
    world = make_world(max_deliveries=2)
    send(world, "a")
    with world.consumer() as consumer:
        for error in (KeyError("order"), ValueError("no such order")):
            receive(consumer, 1)[0].fail(error)
            consumer.flush()
            world.pass_time(0)
        (letter,) = world.dead_letters()
        assert letter.delivery_count == 2
        assert letter.reason == "delivery limit reached: 2 of 2; last error: ValueError: no such order"


def test_failed_message_waits_for_the_backoff(make_world: Callable[..., World]) -> None:
    world = make_world(backoff="constant", backoff_initial=WAIT_S, backoff_max=WAIT_S)
    send(world, "a")
    with world.consumer() as consumer:
        (message,) = receive(consumer, 1)
        due_ms = in_ms(soon(world, WAIT_S))
        message.fail("later")
        consumer.flush()
        world.pass_time(WAIT_S)
        (again,) = receive(consumer, 1)
        assert again.delivery_count == 2
        assert again.appended_at_ms >= due_ms


def test_delayed_messages_come_when_they_are_due_and_others_before(world: World) -> None:
    due_ms = in_ms(soon(world, WAIT_S))
    send(world, "after a delay", delay=WAIT_S)
    send(world, "at an instant", at=soon(world, WAIT_S))
    send(world, "now")
    with world.consumer() as consumer:
        assert values(receive(consumer, 1)) == [b"now"]
        world.pass_time(WAIT_S + 1)
        delayed = receive(consumer, 2)
        assert sorted(values(delayed)) == [b"after a delay", b"at an instant"]
        assert [message.delivery_count for message in delayed] == [1, 1]
        assert min(message.appended_at_ms for message in delayed) >= due_ms


@pytest.mark.parametrize("expired", ["drop", "dead-letter"])
def test_expired_message_is_not_delivered(make_world: Callable[..., World], expired: str) -> None:
    world = make_world(expired=expired)
    send(world, "short", ttl=0.5)
    send(world, "long", ttl=60)
    with world.consumer() as consumer:
        world.pass_time(1)
        (message,) = receive(consumer, 1)
        assert message.value == b"long"
        assert message.expires_at_ms == message.appended_at_ms + 60_000
        assert is_empty(consumer)
        consumer.flush()
        assert len(world.dead_letters()) == (expired == "dead-letter")


def test_logical_queues_of_a_topic_are_apart(world: World) -> None:
    send(world, "email", logical_queue="emails")
    send(world, "plain")
    with world.consumer() as plain, world.consumer(logical_queue="emails") as emails:
        (mail,) = receive(emails, 1)
        assert mail.value == b"email"
        assert values(receive(plain, 1)) == [b"plain"]
        mail.release()
        emails.flush()
        world.pass_time(0)
        assert is_empty(plain)
        assert receive(emails, 1)[0].delivery_count == 2


def test_each_subscription_sees_every_message_and_has_its_own_redeliveries(world: World) -> None:
    world.subscribe("billing")
    send(world, "a")
    with world.consumer() as consumer, world.consumer(subscription="billing") as billing:
        receive(consumer, 1)[0].reject("not ours")
        receive(billing, 1)[0].release()
        consumer.flush()
        billing.flush()
        world.pass_time(0, "billing")
        assert receive(billing, 1)[0].delivery_count == 2
        assert len(world.dead_letters()) == 1
        assert world.dead_letters("billing") == []
        assert is_empty(consumer)


def test_message_whose_lease_runs_out_comes_again_and_its_holder_learns_it(world: World) -> None:
    send(world, "a")
    with world.consumer(lease=1, max_lease=1) as slow, world.consumer() as other:
        (lost,) = receive(slow, 1)
        assert is_empty(other)
        world.pass_time(1.5)
        (again,) = receive_from_either(slow, other)
        assert again.delivery_count == 2
        assert not lost.is_held
        with pytest.raises(LeaseLostError, match="lease of message 0:0 is lost"):
            lost.ack()


def receive_from_either(*consumers: QueueConsumer) -> list[Message]:
    """Receive one message from whichever consumer gets it: the broker assigns the partition to one."""
    until = time.monotonic() + COMES_S
    while time.monotonic() < until:
        for consumer in consumers:
            if found := consumer.receive(1, timeout=0.2):
                return found
    return []


def test_lease_is_renewed_while_its_consumer_lives_and_extended_on_demand(world: World) -> None:
    send(world, "kept", "extended")
    with world.consumer(lease=1) as living, world.consumer(lease=1, max_lease=1) as limited:
        found = receive_from_either(living, limited)
        holder = living if living.in_flight_count else limited
        found += receive(holder, 1)
        if holder is limited:
            found[0].extend(30)
        found[1].extend(30)
        holder.flush()
        world.pass_time(2)
        assert [message.is_held for message in found] == [True, True]
        for message in found:
            message.ack()
        holder.flush()
        world.pass_time(0)
        assert is_empty(living)
        assert is_empty(limited)


def test_closed_consumer_gives_back_what_it_holds(world: World) -> None:
    send(world, "a", "b")
    with world.consumer() as consumer:
        held = receive(consumer, 2)
    assert [message.is_held for message in held] == [False, False]
    world.pass_time(0)
    with world.consumer() as consumer:
        assert [message.delivery_count for message in receive(consumer, 2)] == [2, 2]


def test_consumer_holds_no_more_than_it_may(world: World) -> None:
    send(world, *map(str, range(5)))
    with world.consumer(max_in_flight=2) as consumer:
        first = receive(consumer, 2)
        assert is_empty(consumer)
        first[0].ack()
        assert values(receive(consumer, 1)) == [b"2"]


def test_batch_is_settled_as_one_and_its_failures_alone(world: World) -> None:
    send(world, *map(str, range(10)))
    with world.consumer() as consumer:
        batch = consumer.receive_batch(4)
        assert list(batch.values()) == [b"0", b"1", b"2", b"3"]
        batch.ack()
        assert consumer.in_flight_count == 0
        rest = consumer.receive_batch(10)
        rest[0].release()
        rest.ack()
        consumer.flush()
        world.pass_time(0)
        # A batch may be smaller than asked for.
        assert values(receive(consumer, 7 - len(rest)))[-1] == b"4"


@pytest.mark.parametrize("is_coroutine", [False, True])
def test_run_handles_each_message_by_its_result(world: World, *, is_coroutine: bool) -> None:
    send(world, "good", "bad", "later", "unlucky", "never")
    handled: list[bytes | None] = []

    def handle(message: Message) -> None:
        handled.append(message.value)
        if message.value == b"bad":
            raise Reject("bad input")
        if message.value == b"later":
            raise Retry(delay=30)
        if message.value == b"unlucky":
            raise TimeoutError("no answer")
        if message.value == b"never":
            raise ValueError("no number")

    async def handle_in_loop(message: Message) -> None:
        await asyncio.sleep(0)
        handle(message)

    retry = {TimeoutError: 30, ValueError: Reject}
    handler = handle_in_loop if is_coroutine else handle
    summary = run_until(world.consumer(), handler, lambda: len(handled) == 5, retry=retry)
    assert (summary.acked, summary.rejected, summary.released) == (1, 2, 2)
    assert sorted(letter.reason for letter in world.dead_letters()) == ["ValueError: no number", "bad input"]
    with world.consumer() as consumer:
        assert is_empty(consumer)


def test_run_of_batches_releases_what_failed(make_world: Callable[..., World]) -> None:
    world = make_world(backoff="constant", backoff_initial=WAIT_S, backoff_max=WAIT_S)
    send(world, *map(str, range(10)))
    handled: list[bytes | None] = []

    def store(batch: Batch) -> None:
        handled.extend(batch.values())
        raise BatchFailed({index: "unlucky" for index, value in enumerate(batch.values()) if value == b"7"})

    summary = run_until(world.consumer(), store, lambda: len(handled) >= 10, batch=5, concurrency=2)
    assert (summary.acked, summary.released) == (9, 1)
    world.pass_time(WAIT_S)
    with world.consumer() as consumer:
        assert values(receive(consumer, 1)) == [b"7"]


def test_program_with_an_event_loop_sends_receives_and_settles(world: World) -> None:
    async def main() -> list[bytes | None]:
        async with world.async_producer() as producer:
            assert await producer.send("a") == MessageId(0, 0)
            await producer.send("b")
        found = []
        async with world.async_consumer() as consumer:
            async for message in consumer:
                found.append(message.value)
                message.ack()
                if len(found) == 2:
                    consumer.stop()
        return found

    assert asyncio.run(asyncio.wait_for(main(), COMES_S)) == [b"a", b"b"]
    world.pass_time(0)
    with world.consumer() as consumer:
        assert is_empty(consumer)


def test_results_and_acks_of_a_block_stand_together_or_not_at_all(make_world: Callable[..., World]) -> None:
    world = make_world()
    invoices = make_world(beside=world)
    send(world, "a", "b")
    with world.consumer() as consumer, invoices.consumer() as reader:
        first, second = receive(consumer, 2)
        with consumer.transaction() as tx:
            tx.send(invoices.name, "invoice of a", key="k")
            tx.ack(first)
        with contextlib.suppress(KeyError), consumer.transaction() as tx:
            tx.send(invoices.name, "invoice of b")
            tx.ack(second)
            raise KeyError
        assert (first.settled_by, second.is_held) == ("ack", True)
        (invoice,) = receive(reader, 1)
        assert (invoice.value, invoice.key) == (b"invoice of a", b"k")
        assert is_empty(reader)

        def write_too_much() -> None:
            with consumer.transaction() as too_much:
                too_much.send(invoices.name, "small")
                too_much.send(invoices.name, b"x" * 3_000_000)
                too_much.ack(second)

        with pytest.raises(TransactionError, match="nothing was written"):
            write_too_much()
        assert second.is_held
        assert is_empty(reader)
        with pytest.raises(TopicError), consumer.transaction() as tx:
            tx.send("no-such-topic-anywhere", "x")
        with pytest.raises(UsageError, match="ended"):
            tx.ack(second)


class Order(BaseModel):
    """What a program sends."""

    number: int
    lines: list[str] = []


def test_values_are_objects_where_a_program_says_how(world: World) -> None:
    with world.producer(serializer=JsonSerializer()) as producer:
        producer.send(Order(number=1, lines=["ä"]), headers={"source": b"shop"})
        producer.send({"number": 2})
    with world.producer(serializer=StringSerializer("utf-16")) as producer:
        producer.send("text")
    with world.consumer(deserializer=JsonDeserializer(Order)) as consumer:
        first, second, text = receive(consumer, 3)
        assert first.headers == [("source", b"shop"), ("content-type", b"application/json")]
        assert first.value == '{"number":1,"lines":["ä"]}'.encode()
        assert [first.data, second.data] == [Order(number=1, lines=["ä"]), Order(number=2)]
        with pytest.raises(
            UnreadableError, match="value cannot be read: ValidationError: 1 validation error for Order"
        ):
            text.data  # noqa: B018  # a property that raises
    world.pass_time(0)
    with world.consumer(deserializer=StringDeserializer("utf-16")) as consumer:
        assert [message.data for message in receive(consumer, 3) if message.value == text.value] == ["text"]


def test_message_that_cannot_be_read_is_a_dead_letter_with_its_bytes(world: World) -> None:
    send(world, "{", '"x"', headers={"content-type": "text/plain"})
    send(world, "{", "null", '{"number": "seven"}')
    send(world, '{"number": 7}', headers={"content-type": "application/json; charset=utf-8"})
    with world.producer() as producer:
        producer.send(b"\xff")
    numbers: list[int] = []
    consumer = world.consumer(deserializer=JsonDeserializer(Order))
    summary = run_until(
        consumer,
        lambda message: numbers.append(message.data.number),
        lambda: bool(numbers) and len(world.dead_letters()) == 6,
    )
    assert numbers == [7]
    assert (summary.acked, summary.rejected) == (1, 6)
    letters = world.dead_letters()
    unreadable = [b'"x"', b"null", b"{", b"{", b'{"number": "seven"}', b"\xff"]
    assert sorted(letter.value or b"" for letter in letters) == unreadable
    assert sum("content-type is 'text/plain'; expected application/json" in letter.reason for letter in letters) == 2
    assert all(letter.reason.startswith("UnreadableError: value cannot be read: ") for letter in letters)


def write_in_two_lines(_value: object, _context: object) -> bytes:
    raise ValueError("no such\nfield")


def test_value_that_cannot_be_written_is_not_sent(world: World) -> None:
    with world.producer(serializer=JsonSerializer()) as producer:
        for value in (object(), float("nan"), {1, 2}):
            with pytest.raises(ConfigError, match="value cannot be written: got "):
                producer.send(value)
    with (
        world.producer(serializer=write_in_two_lines) as producer,
        pytest.raises(ConfigError, match=r"got str \(ValueError: no such field\); nothing was sent"),
    ):
        producer.send("a")
    with (
        world.producer(serializer=lambda _value, _context: "text") as producer,
        pytest.raises(ConfigError, match="serializer returned the wrong type: got str; expected bytes"),
    ):
        producer.send("a")
    with world.consumer() as consumer:
        assert is_empty(consumer)
        send(world, "1")
        with pytest.raises(UsageError, match="consumer has no deserializer"):
            receive(consumer, 1)[0].data  # noqa: B018  # a property that raises


def test_suspect_is_handed_out_alone(world: World) -> None:
    send(world, "suspect")
    with world.consumer(lease=1, max_lease=1) as silent:
        for _ in range(2):
            receive(silent, 1)
            world.pass_time(1.5)
        send(world, "other")
    with world.consumer(isolate_after=2) as consumer:
        (suspect,) = receive(consumer, 1)
        assert (suspect.value, suspect.delivery_count) == (b"suspect", 3)
        assert is_empty(consumer)
        suspect.ack()
        assert values(receive(consumer, 1)) == [b"other"]


def test_message_is_settled_once(world: World) -> None:
    send(world, "a")
    with world.consumer() as consumer:
        (message,) = receive(consumer, 1)
        message.ack()
        message.ack()
        with pytest.raises(UsageError, match="message 0:0 is already settled: got release after ack"):
            message.release()


def test_wrong_input_is_refused_before_anything_happens(world: World) -> None:
    with world.producer() as producer:
        with pytest.raises(ConfigError, match="header name is reserved"):
            producer.send("a", headers={"kmq-origin": b"0:0"})
        with pytest.raises(ConfigError, match="two delivery times"):
            producer.send("a", delay=1, at=soon(world, 1))
        with pytest.raises(TopicError):
            producer.send("a", partition=7)
        with pytest.raises(KafkaClientError, match="message is too large"):
            producer.send("a" * 2_000_000)
    with pytest.raises(UsageError, match="producer is closed"):
        producer.send("a")
    with world.consumer() as consumer:
        with pytest.raises(ConfigError, match="max_messages=0"):
            consumer.receive(0)
        assert is_empty(consumer)
    with pytest.raises(UsageError, match="consumer is closed"):
        consumer.receive()
    with pytest.raises(ConfigError, match="lease"):
        world.consumer(lease=0.5)
