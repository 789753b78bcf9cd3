"""A producer with an id: messages and source position in one transaction, and one life after the other."""

from __future__ import annotations

import threading
import urllib.request
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from kmq_spark.core.markers import MessageId
from kmq_spark.core.producing import ProducerState
from kmq_spark.errors import ConfigError, FencedError, KafkaClientError, KmqError, TopicError, UsageError
from kmq_spark.producer.producer import QueueProducer
from kmq_spark.wire.headers import Sender, sender_of
from kmq_spark.wire.position import decode_state
from tests.kafka.conftest import Queue, read_all, seen, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.kafka

NEVER_MS = 3_600_000
"""Automatic commits so far apart that none falls into a test."""


def producer_of(queue: Queue, producer_id: str = "copier", **options: Any) -> QueueProducer:
    """Return a producer with an id."""
    return QueueProducer(queue.name, bootstrap_servers=queue.bootstrap_servers, producer_id=producer_id, **options)


def sent_by(queue: Queue) -> list[tuple[bytes, Sender | None]]:
    """Return what a reader of committed records sees, with who sent it."""
    return [(record.value(), sender_of(record.headers())) for record in read_all(queue.bootstrap_servers, queue.name)]


def newest_state(queue: Queue) -> ProducerState:
    """Return the newest position record of a queue with one producer."""
    return decode_state(read_all(queue.bootstrap_servers, f"{queue.name}.producers")[-1].value())


def test_messages_carry_producer_generation_and_sequence(queue: Queue) -> None:
    with producer_of(queue) as producer:
        assert (producer.position, producer.sequence, producer.generation) == (None, 0, 1)
        producer.send("a", position=1, headers={"mine": "x"})
        producer.send("b", position=2)
    assert sent_by(queue) == [(b"a", Sender("copier", 1, 1)), (b"b", Sender("copier", 1, 2))]
    first, _ = read_all(queue.bootstrap_servers, queue.name)
    assert first.headers()[0] == ("mine", b"x")
    state = newest_state(queue)
    assert (state.generation, state.sequence, state.position) == (1, 2, 2)


def test_next_life_goes_on_with_position_and_sequence(queue: Queue) -> None:
    with producer_of(queue) as producer:
        producer.send("a", position={"file": "x", "line": 1})
    with producer_of(queue) as producer:
        assert (producer.position, producer.sequence, producer.generation) == ({"file": "x", "line": 1}, 1, 2)
        producer.send("b", position={"file": "x", "line": 2})
    assert sent_by(queue) == [(b"a", Sender("copier", 1, 1)), (b"b", Sender("copier", 2, 2))]


def test_commit_makes_messages_visible_and_moves_the_position(queue: Queue) -> None:
    with producer_of(queue, commit_every_ms=NEVER_MS) as producer:
        producer.send("a", position=b"\x00 1")
        assert (producer.position, seen(queue)) == (None, [])
        producer.commit()
        assert (producer.position, seen(queue)) == (b"\x00 1", [b"a"])


def test_messages_are_committed_by_themselves_after_a_while(queue: Queue) -> None:
    with producer_of(queue) as producer:
        producer.send("a", position=1)
        assert wait_until(lambda: producer.position == 1)
        assert seen(queue) == [b"a"]


def test_messages_are_committed_by_themselves_at_a_count(queue: Queue) -> None:
    with producer_of(queue, commit_every=10, commit_every_ms=NEVER_MS) as producer:
        for number in range(25):
            producer.send(str(number), position=number)
        assert wait_until(lambda: producer.position == 19)
        assert len(seen(queue)) == 20
    assert len(seen(queue)) == 25


def test_block_that_raises_commits_nothing_more(queue: Queue) -> None:
    def fail() -> None:
        with producer_of(queue, commit_every_ms=NEVER_MS) as producer:
            producer.send("a", position=1)
            producer.commit()
            producer.send("b", position=2)
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        fail()
    with producer_of(queue) as producer:
        assert (producer.position, producer.sequence) == (1, 1)
    assert seen(queue) == [b"a"]


def test_older_life_is_fenced_and_nothing_of_it_is_visible(queue: Queue) -> None:
    older = producer_of(queue, commit_every_ms=NEVER_MS)
    older.send("a", position=1)
    older.commit()
    older.send("lost", position=2)
    with producer_of(queue) as newer:
        assert (newer.position, newer.generation) == (1, 2)
        with pytest.raises(FencedError, match=r"generation 2 by kmq-producer-.* has taken over from generation 1"):
            older.commit()
        for call in (partial(older.send, "more", position=3), older.commit, older.flush):
            with pytest.raises(FencedError):
                call()
        newer.send("b", position=2)
    with pytest.raises(FencedError):
        older.close()
    assert sent_by(queue) == [(b"a", Sender("copier", 1, 1)), (b"b", Sender("copier", 2, 2))]


def test_producers_with_other_ids_are_left_alone(queue: Queue) -> None:
    with producer_of(queue, "one") as one, producer_of(queue, "two") as two:
        one.send("1", position=1)
        two.send("2", position=7)
        one.commit()
        two.commit()
        assert (one.position, two.position) == (1, 7)
    with producer_of(queue, "one") as one:
        assert (one.position, one.generation) == (1, 2)


def test_commit_never_parts_the_messages_of_one_source_record(queue: Queue) -> None:
    """A crash between them would send the first ones again."""
    with producer_of(queue, commit_every_ms=1) as producer:
        producer.send("1a", position=1)
        assert wait_until(lambda: producer.position == 1)
        producer.send("2a")
        producer.send("2b")
        assert not wait_until(lambda: producer.sequence > 1, 0.5)
        producer.send("2c", position=2)
        assert wait_until(lambda: producer.position == 2)
        assert (producer.sequence, seen(queue)) == (4, [b"1a", b"2a", b"2b", b"2c"])


def test_too_many_messages_without_a_position_are_an_error_at_once(queue: Queue) -> None:
    with producer_of(queue, commit_every=2) as producer:
        producer.send("1", position=1)
        producer.commit()
        producer.send("2a")
        producer.send("2b")
        with pytest.raises(UsageError, match="messages without a position are too many: got 2"):
            producer.send("2c", position=2)
        producer.commit()
    assert seen(queue) == [b"1", b"2a", b"2b"]


def test_producer_that_gives_no_positions_goes_on_by_its_sequence(queue: Queue) -> None:
    with producer_of(queue) as producer:
        producer.send("a")
        assert wait_until(lambda: producer.sequence == 1)
    with producer_of(queue) as producer:
        assert (producer.position, producer.sequence) == (None, 1)
        producer.send("b")
    assert sent_by(queue) == [(b"a", Sender("copier", 1, 1)), (b"b", Sender("copier", 2, 2))]


def test_first_position_of_a_later_life_is_refused_until_the_source_position_is_stated(queue: Queue) -> None:
    """Whatever the messages without a position were, the source would send them again."""
    with producer_of(queue) as producer:
        producer.send("a")
    with producer_of(queue) as producer:
        with pytest.raises(UsageError, match=r"copier has sent 1 message\(s\) without a position in earlier lives"):
            producer.send("b", position=2)
        producer.commit(position=1)
        assert producer.position == 1
        producer.send("b", position=2)
    assert seen(queue) == [b"a", b"b"]


def test_position_moves_without_a_message(queue: Queue) -> None:
    """A source record that makes no message is not read again."""
    with producer_of(queue) as producer:
        producer.commit(position=10)
        assert (producer.position, producer.sequence) == (10, 0)
        producer.commit()
    with producer_of(queue) as producer:
        assert (producer.position, producer.sequence) == (10, 0)
    assert seen(queue) == []


def test_callback_is_called_once_after_the_commit(queue: Queue) -> None:
    answers: list[tuple[MessageId | None, KmqError | None, list[bytes]]] = []
    with producer_of(queue) as producer:
        producer.send("a", position=1, on_delivery=lambda place, error: answers.append((place, error, seen(queue))))
        producer.send("b", position=2)
    assert answers == [(MessageId(0, 0), None, [b"a", b"b"])]


def test_callback_of_a_message_that_was_dropped_gets_an_error(queue: Queue) -> None:
    answers: list[KmqError | None] = []

    def fail() -> None:
        with producer_of(queue, commit_every_ms=NEVER_MS) as producer:
            producer.send("a", position=1, on_delivery=lambda _place, error: answers.append(error))
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        fail()
    (error,) = answers
    assert "message is not sent" in str(error)


def test_many_threads_send_in_one_sequence(make_queue: Callable[..., Queue]) -> None:
    queue = make_queue(partitions=3)
    with producer_of(queue, commit_every=100) as producer:

        def send_300() -> None:
            for number in range(300):
                producer.send("x", key=str(number))

        threads = [threading.Thread(target=send_300) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    senders = [sender for _, sender in sent_by(queue) if sender is not None]
    assert sorted(sender.sequence for sender in senders) == list(range(1, 1_201))


def test_message_that_is_too_large_is_an_error_at_once_and_the_others_are_sent(queue: Queue) -> None:
    with producer_of(queue) as producer:
        producer.send("a", position=1)
        with pytest.raises(KafkaClientError, match="message is too large: got a value of 1048577 bytes"):
            producer.send(bytes(1_048_577), position=2)
        producer.send(bytes(1_048_576 - 200), position=3)
    assert [sender.sequence for _, sender in sent_by(queue) if sender] == [1, 2]


def test_message_that_the_broker_refuses_is_named_and_nothing_of_its_transaction_is_visible(queue: Queue) -> None:
    """The topic's limit is smaller than the producer's `max_message_bytes`."""
    with producer_of(queue, commit_every_ms=NEVER_MS) as producer:
        producer.send("a", position=1)
    producer = producer_of(queue, max_message_bytes=4_000_000, commit_every_ms=NEVER_MS)
    answers: list[KmqError | None] = []
    producer.send("b", position=2, on_delivery=lambda _place, error: answers.append(error))
    producer.send(bytes(3_000_000), position=3)
    with pytest.raises(
        KafkaClientError, match=r"rejected the message of sequence 3, 30000\d\d bytes: .*MSG_SIZE"
    ) as raised:
        producer.commit()
    assert raised.value.code == "MSG_SIZE_TOO_LARGE"
    assert answers == [raised.value]
    with pytest.raises(KafkaClientError, match="sequence 3"):
        producer.close()
    with producer_of(queue) as producer:
        assert (producer.position, producer.sequence) == (1, 1)
    assert seen(queue) == [b"a"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"producer_id": "x" * 300}, r"producer name is not allowed: got .*\(300 characters\), 1 to 100"),
        ({"producer_id": ""}, "producer name is not allowed: got ''"),
        ({"commit_every_ms": 0}, "commit_every_ms is out of bounds: got 0, 1 to 3600000"),
        ({"commit_every_ms": 1.5}, "commit_every_ms is out of bounds: got 1.5"),
        ({"commit_every": 0}, "commit_every is out of bounds: got 0, 1 to 100000"),
        ({"commit_every": True}, "commit_every is out of bounds: got True"),
        ({"transaction_timeout_ms": 10}, "transaction_timeout_ms is out of bounds: got 10, 1000 to 900000"),
        ({"extra": {"transactional.id": "x"}}, "setting transactional.id is not allowed"),
    ],
)
def test_value_out_of_bounds_is_refused_before_anything_is_asked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QueueProducer("orders", bootstrap_servers="127.0.0.1:1", timeout=1, **{"producer_id": "p", **options})


@pytest.mark.parametrize("position", [b"x" * 5_000, (1, 2), object()])
def test_position_that_is_not_allowed_is_refused_and_its_message_is_not_sent(queue: Queue, position: Any) -> None:  # noqa: ANN401  # wrong on purpose
    with producer_of(queue) as producer:
        with pytest.raises(ConfigError, match="position is"):
            producer.send("a", position=position)
        with pytest.raises(ConfigError, match="position is"):
            producer.commit(position=position)
    assert seen(queue) == []


def test_partition_that_does_not_exist_is_refused_at_once(queue: Queue) -> None:
    with producer_of(queue) as producer:
        with pytest.raises(TopicError, match="got partition 9, 0 to 0"):
            producer.send("a", partition=9)
        producer.send("b", partition=0)
    assert seen(queue) == [b"b"]


def test_producer_without_an_id_has_no_position(queue: Queue) -> None:
    with QueueProducer(queue.name, bootstrap_servers=queue.bootstrap_servers) as producer:
        for name in ("position", "sequence", "generation"):
            with pytest.raises(UsageError, match="producer has no producer_id"):
                getattr(producer, name)
        for call in (producer.commit, partial(producer.send, "a", position=1)):
            with pytest.raises(UsageError, match="producer has no producer_id"):
                call()
        producer.send("b")
    ((value, sender),) = sent_by(queue)
    assert (value, sender) == (b"b", None)


def test_missing_queue_is_reported_with_the_command(bootstrap_servers: str) -> None:
    with pytest.raises(TopicError, match="run `kmq queue create not-there`"):
        QueueProducer("not-there", bootstrap_servers=bootstrap_servers, producer_id="p")


def test_closed_producer_refuses_to_send(queue: Queue) -> None:
    producer = producer_of(queue)
    producer.close()
    producer.close()
    for call in (partial(producer.send, "x"), producer.commit, producer.flush):
        with pytest.raises(UsageError, match="producer is closed"):
            call()


def test_metrics_count_what_is_committed_and_what_waits(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with producer_of(queue, commit_every_ms=NEVER_MS, metrics_port=0) as producer:
        port = int(caplog.text.partition("metrics on http://127.0.0.1:")[2].partition("/")[0])
        producer.send("a")
        producer.commit()
        producer.send("b")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            text = str(answer.read(), "utf-8")
    assert f'kmq_producer_messages_total{{queue="{queue.name}"}} 1.0' in text
    assert f'kmq_producer_uncommitted{{queue="{queue.name}"}} 1.0' in text
    assert f'kmq_producer_last_commit_timestamp_seconds{{queue="{queue.name}"}} 1.' in text
