"""A resuming producer: messages and source position in one transaction, and one life after the other."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from kmq_spark.core.producing import ProducerState
from kmq_spark.errors import ConfigError, FencedError, KafkaClientError, TopicError, UsageError
from kmq_spark.kafka.transaction import TransactionalProducer
from kmq_spark.producer import resuming
from kmq_spark.producer.resuming import ResumingProducer
from kmq_spark.wire.position import decode_state
from tests.kafka.conftest import Queue, read_all, seen, sender_of

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.kafka


def producer_of(queue: Queue, producer_id: str = "copier", **options: Any) -> ResumingProducer:
    """Return a resuming producer."""
    return ResumingProducer(queue.name, producer_id, bootstrap_servers=queue.bootstrap_servers, **options)


def sent_by(queue: Queue) -> list[tuple[bytes, str]]:
    """Return what a reader of committed records sees, with who sent it."""
    return [(record.value(), sender_of(record)) for record in read_all(queue.bootstrap_servers, queue.name)]


def newest_state(queue: Queue) -> ProducerState:
    """Return the newest position record of a queue with one producer."""
    return decode_state(read_all(queue.bootstrap_servers, f"{queue.name}.producers")[-1].value())


def test_commit_makes_messages_visible_with_their_position_and_numbers(queue: Queue) -> None:
    with producer_of(queue) as producer:
        assert (producer.position, producer.sequence) == (None, 0)
        producer.send("a", headers={"mine": "x"}, logical_queue="emails")
        producer.send("b", key="k")
        assert (producer.position, seen(queue)) == (None, [])
        producer.commit(b"\x00 2")
        assert (producer.position, producer.sequence) == (b"\x00 2", 2)
    assert sent_by(queue) == [(b"a", "copier 1 1"), (b"b", "copier 1 2")]
    first, second = read_all(queue.bootstrap_servers, queue.name)
    assert first.headers()[:2] == [("mine", b"x"), ("kmq-logical-queue", b"emails")]
    assert second.key() == b"k"
    state = newest_state(queue)
    assert (state.generation, state.sequence, state.position) == (1, 2, b"\x00 2")


def test_next_life_goes_on_with_position_and_sequence(queue: Queue) -> None:
    with producer_of(queue) as producer:
        producer.send("a")
        position = {"file": "x", "line": 1}
        producer.commit(position)
        position["line"] = 7  # what was committed is a copy
        assert producer.position == {"file": "x", "line": 1}
    with producer_of(queue) as producer:
        assert (producer.position, producer.sequence) == ({"file": "x", "line": 1}, 1)
        producer.send("b")
        producer.commit({"file": "x", "line": 2})
    assert sent_by(queue) == [(b"a", "copier 1 1"), (b"b", "copier 2 2")]


def test_position_moves_without_a_message(queue: Queue) -> None:
    """A source record that makes no message is not read again."""
    with producer_of(queue) as producer:
        producer.commit(10)
        producer.commit(10)
    with producer_of(queue) as producer:
        assert (producer.position, producer.sequence) == (10, 0)
    assert seen(queue) == []


@pytest.mark.parametrize("messages", [[], ["a"]])
def test_commit_whose_answer_is_lost_is_not_repeated(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    """The position tells it: without messages the sequence is the same before and after."""
    with producer_of(queue) as producer:
        run = TransactionalProducer.run

        def without_answer(client: TransactionalProducer, *work: Any, **options: Any) -> None:
            monkeypatch.setattr(TransactionalProducer, "run", run)
            run(client, *work, **options)
            raise KafkaClientError("no answer", code="_TIMED_OUT", retriable=True)

        monkeypatch.setattr(TransactionalProducer, "run", without_answer)
        for message in messages:
            producer.send(message)
        producer.commit(7)
        assert (producer.position, producer.sequence) == (7, len(messages))
    written = [record.value() or b"" for record in read_all(queue.bootstrap_servers, f"{queue.name}.producers")]
    assert [b'"position":7' in value for value in written].count(True) == 1
    assert len(seen(queue)) == len(messages)


def test_messages_after_the_last_commit_are_dropped_and_reported(queue: Queue) -> None:
    """Committed at the close, the first half of a source record would be sent again by the next life."""
    producer = producer_of(queue)
    producer.send("1")
    producer.commit(1)
    producer.send("2a")
    producer.send("2b")
    with pytest.raises(UsageError, match=r"closed with messages that are not committed: got 2, which are dropped"):
        producer.close()
    producer.close()
    with producer_of(queue) as producer:
        assert (producer.position, producer.sequence) == (1, 1)
    assert seen(queue) == [b"1"]


def test_block_that_raises_commits_nothing_more(queue: Queue) -> None:
    def fail() -> None:
        with producer_of(queue) as producer:
            producer.send("a")
            producer.commit(1)
            producer.send("b")
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        fail()
    assert seen(queue) == [b"a"]


def test_older_life_is_fenced_and_nothing_of_it_is_visible(queue: Queue) -> None:
    older = producer_of(queue)
    older.send("a")
    older.commit(1)
    older.send("lost")
    with producer_of(queue) as newer, producer_of(queue, "other") as other:
        assert newer.position == 1
        with pytest.raises(FencedError, match=r"generation 2 by kmq-producer-.* has taken over from generation 1"):
            older.commit(2)
        for call in (partial(older.send, "more"), partial(older.commit, 3)):
            with pytest.raises(FencedError):
                call()
        newer.send("b")
        newer.commit(2)
        other.commit(7)  # another id is left alone
    older.close()
    assert sent_by(queue) == [(b"a", "copier 1 1"), (b"b", "copier 2 2")]


def test_many_threads_send_in_one_sequence(make_queue: Callable[..., Queue]) -> None:
    queue = make_queue(partitions=3)
    with producer_of(queue) as producer:

        def send_300() -> None:
            for number in range(300):
                producer.send("x", key=str(number))
                if number % 100 == 0:
                    producer.commit(number)

        threads = [threading.Thread(target=send_300) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        producer.commit(300)
    assert sorted(int(sender.split()[2]) for _, sender in sent_by(queue)) == list(range(1, 1_201))


def test_too_many_uncommitted_messages_are_an_error_at_once(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "MAX_UNCOMMITTED", 2)
    with producer_of(queue) as producer:
        producer.send("a")
        producer.send("b")
        with pytest.raises(UsageError, match=r"too many messages are not committed: got 2 .*; call commit"):
            producer.send("c")
        producer.commit(2)
    assert seen(queue) == [b"a", b"b"]


def test_message_that_cannot_be_sent_is_an_error_at_once_and_the_others_are_sent(queue: Queue) -> None:
    with producer_of(queue) as producer:
        producer.send("a")
        with pytest.raises(KafkaClientError, match="message is too large: got a value of 1048577 bytes"):
            producer.send(bytes(1_048_577))
        with pytest.raises(ConfigError, match="message has the wrong type: got int; expected bytes, str or None"):
            producer.send(7)  # type: ignore[arg-type]  # wrong on purpose
        with pytest.raises(ConfigError, match="header name is reserved"):
            producer.send("x", headers={"kmq-sequence": b"1"})
        with pytest.raises(TopicError, match="got partition 9, expected 0 to 0"):
            producer.send("x", partition=9)
        producer.send(bytes(1_048_576 - 200), partition=0)
        producer.commit(2)
    assert [sender for _, sender in sent_by(queue)] == ["copier 1 1", "copier 1 2"]


def test_message_that_the_broker_refuses_is_named_and_nothing_of_its_transaction_is_visible(queue: Queue) -> None:
    """The topic's limit is smaller than the producer's `max_message_bytes`."""
    with producer_of(queue, max_message_bytes=4_000_000) as producer:
        producer.send("a")
        producer.commit(1)
        producer.send("b")
        producer.send(bytes(3_000_000))
        with pytest.raises(
            KafkaClientError, match=r"rejected the message of sequence 3, 30000\d\d bytes: .*MSG_SIZE"
        ) as raised:
            producer.commit(3)
        assert raised.value.code == "MSG_SIZE_TOO_LARGE"
        with pytest.raises(KafkaClientError, match="sequence 3"):
            producer.send("c")
    with producer_of(queue) as producer:
        assert (producer.position, producer.sequence) == (1, 1)
    assert seen(queue) == [b"a"]


def test_interrupted_commit_is_not_repeated(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been committed: written again, its messages would be doubled."""
    with producer_of(queue) as producer:
        producer.send("a")
        write = producer._life.write

        def interrupted(*arguments: Any) -> None:
            write(*arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(producer._life, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            producer.commit(1)
        with pytest.raises(UsageError, match="commit was interrupted: got KeyboardInterrupt"):
            producer.commit(1)
    with producer_of(queue) as producer:
        assert producer.position == 1
    assert seen(queue) == [b"a"]


@pytest.mark.parametrize(
    ("producer_id", "options", "message"),
    [
        ("x" * 300, {}, r"producer name is not allowed: got .*\(300 characters\), 1 to 100"),
        ("", {}, "producer name is not allowed: got ''"),
        ("jobs.slot-3", {}, "producer name is reserved"),
        ("p", {"timeout": 0}, "timeout is out of bounds: got 0"),
        ("p", {"extra": {"transactional.id": "x"}}, "setting transactional.id is not allowed"),
    ],
)
def test_value_out_of_bounds_is_refused_before_anything_is_asked(
    producer_id: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ResumingProducer("orders", producer_id, bootstrap_servers="127.0.0.1:1", **options)


def test_position_that_is_not_allowed_is_refused_and_its_messages_wait_for_the_next(queue: Queue) -> None:
    with producer_of(queue) as producer:
        producer.send("a")
        for position in (b"x" * 5_000, (1, 2), object(), None):
            with pytest.raises(ConfigError, match="position is"):
                producer.commit(position)  # type: ignore[arg-type]  # wrong on purpose
        assert seen(queue) == []
        producer.commit(1)
    assert seen(queue) == [b"a"]
