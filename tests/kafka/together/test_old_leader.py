"""
A leader that was suspended and deposed answers with its log as it was: who fences reads up to an own record instead.

In each test the first answers come from a log that is empty. With an end that the broker was asked for, each of them
does a thing twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kmq_spark.consumer import history
from kmq_spark.errors import ConfigError
from kmq_spark.kafka import log_reader
from kmq_spark.kafka.log_reader import LogReader
from kmq_spark.kafka.lookups import EARLIEST, Bounds
from kmq_spark.producer.resuming import ResumingProducer
from tests.kafka.consumer.test_history import delete_group, finish
from tests.kafka.letters import Letters
from tests.kafka.stage import put_rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from confluent_kafka import Message

    from tests.kafka.conftest import Queue

pytestmark = pytest.mark.kafka


@pytest.fixture
def answer_from_an_old_log(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Return what lets every end be 0, and the first read of a topic find nothing; that returns the topics read so."""

    def begin(topic: str) -> list[str]:
        read, old = LogReader.read, list[str]()

        def read_old_log_first(reader: LogReader, starts: Mapping[int, int]) -> Iterator[Message]:
            if reader._topic == topic and not old:
                old.append(reader._topic)
                reader.positions |= starts
                return iter(())
            return read(reader, starts)

        monkeypatch.setattr(LogReader, "read", read_old_log_first)
        monkeypatch.setattr(log_reader, "bounds_of", lambda *_: Bounds(0, 0))
        monkeypatch.setattr(history, "LATEST", EARLIEST)
        return old

    return begin


def test_redrive_sends_no_letter_twice(
    make_queue: Callable[..., Queue],
    answer_from_an_old_log: Callable[[str], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    letters = Letters(make_queue(partitions=2))
    letters.bury(b"a", b"b")
    assert letters.redrive(all=True, limit=1).done == 1
    old = answer_from_an_old_log(letters.topics.redrive_topic)
    assert letters.redrive(all=True).done == 1
    assert old
    monkeypatch.undo()
    assert letters.back() == [b"a", b"b"]


def test_new_life_of_a_producer_goes_on_where_the_older_one_ended(
    queue: Queue, answer_from_an_old_log: Callable[[str], list[str]]
) -> None:
    with ResumingProducer(queue.name, "copier", bootstrap_servers=queue.bootstrap_servers) as producer:
        producer.send("a")
        producer.commit(7)
    old = answer_from_an_old_log(f"{queue.name}.producers")
    with ResumingProducer(queue.name, "copier", bootstrap_servers=queue.bootstrap_servers) as producer:
        assert (producer.position, producer.sequence) == (7, 1)
    assert old


def test_writer_of_rules_sees_the_newest_version(
    queue: Queue, answer_from_an_old_log: Callable[[str], list[str]]
) -> None:
    put_rules(queue.name, queue.bootstrap_servers, 0, max_deliveries=3)
    old = answer_from_an_old_log("kmq.queues")
    with pytest.raises(ConfigError, match="got version 1, expected 0"):
        put_rules(queue.name, queue.bootstrap_servers, 0, max_deliveries=4)
    assert old


def test_group_without_offsets_starts_nothing_again(
    queue: Queue, answer_from_an_old_log: Callable[[str], list[str]]
) -> None:
    queue.send(*"abc")
    finish(queue, 3)
    delete_group(queue)
    old = answer_from_an_old_log(f"{queue.name}.markers")
    queue.send("new")
    assert finish(queue, 1) == [b"new"]
    assert old
