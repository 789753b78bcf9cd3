"""The producer: durable, bounded, and no failure swallowed."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer

from kmq_spark.core.markers import MessageId
from kmq_spark.errors import ConfigError, KafkaClientError, KmqError, TopicError
from kmq_spark.kafka.settings import make_client, producer_config
from kmq_spark.producer import producer as producer_module
from kmq_spark.producer.producer import QueueProducer
from tests.brokers import quick_broker
from tests.kafka.conftest import Queue, add_partitions, read_all, wait_until
from tests.limits import COMES_S, ENDS_S

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.kafka


def test_callback_is_called_while_the_sender_is_idle(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report waits neither for the next send nor for the end of a rest."""
    monkeypatch.setattr(producer_module, "REST_S", 2 * COMES_S)
    answers: list[MessageId | None] = []
    with QueueProducer(queue.name, bootstrap_servers=queue.bootstrap_servers) as producer:
        assert wait_until(lambda: producer._is_resting)
        producer.send("x", on_delivery=lambda place, _error: answers.append(place))
        until = time.monotonic() + COMES_S
        while not answers and time.monotonic() < until:
            time.sleep(0.01)
        assert answers == [MessageId(0, 0)]


def test_burst_without_keys_is_spread_over_the_partitions(make_queue: Callable[..., Queue]) -> None:
    """One worker would do all of it otherwise."""
    queue = make_queue(partitions=4)
    queue.send(*map(str, range(100)))
    counts = Counter(record.partition() for record in read_all(queue.bootstrap_servers, queue.name))
    assert min(counts[partition] for partition in range(4)) >= 5  # of 25; fewer once in ten million


def test_messages_without_a_key_reach_partitions_that_came_later(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_module, "PARTITIONS_READ_EVERY_S", 0.0)
    with QueueProducer(queue.name, bootstrap_servers=queue.bootstrap_servers) as producer:
        add_partitions(queue.bootstrap_servers, 2, queue.name)
        places: list[MessageId | None] = []

        def has_come() -> bool:
            producer.send("x", on_delivery=lambda place, _error: places.append(place))
            producer.flush()
            return any(place is not None and place.queue_partition == 1 for place in places)

        assert wait_until(has_come)


SENDS_AND_ENDS = """
import sys
from kmq_spark import QueueProducer
producer = QueueProducer(sys.argv[1], bootstrap_servers=sys.argv[2])
for number in range(50):
    producer.send(str(number), partition=0)
raise SystemExit(3)
"""


def test_script_that_sends_and_ends_with_an_error_loses_nothing(queue: Queue) -> None:
    """It does not close its producer."""
    command = [sys.executable, "-c", SENDS_AND_ENDS, queue.name, queue.bootstrap_servers]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ENDS_S)
    assert (done.returncode, done.stderr) == (3, "")
    assert [record.value() for record in read_all(queue.bootstrap_servers, queue.name)] == [
        b"%d" % number for number in range(50)
    ]


def test_producer_that_is_dropped_sends_what_it_has_and_its_thread_ends(queue: Queue) -> None:
    threads = threading.active_count()
    producer = QueueProducer(queue.name, bootstrap_servers=queue.bootstrap_servers)
    producer.send("x")
    del producer
    assert wait_until(lambda: threading.active_count() == threads)
    assert len(read_all(queue.bootstrap_servers, queue.name)) == 1


def test_end_of_a_process_says_what_was_not_sent(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker is away, and some messages have failed before."""
    monkeypatch.setattr(producer_module, "EXIT_TIMEOUT_S", 0.1)
    client = make_client(Producer, producer_config("127.0.0.1:1"))
    client.produce("orders", b"x")
    errors: list[KmqError] = [KafkaClientError("too late")]
    producer_module._send_the_rest(client, producer_module.Reports("orders"), errors, producer_module.forks())
    assert "a producer of orders was not closed: 2 messages were not sent, the first error: too late" in caplog.text
    client.purge()


def test_callback_that_raises_stops_nothing(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_place: MessageId | None, _error: KmqError | None) -> None:
        raise RuntimeError("boom")

    queue.send("x", on_delivery=fail)
    assert "delivery callback raised" in caplog.text
    assert len(read_all(queue.bootstrap_servers, queue.name)) == 1


def test_largest_message_fits_into_the_topic(queue: Queue) -> None:
    """Whatever the client takes, the broker takes: otherwise a send would fail long after it returned."""
    with QueueProducer(queue.name, bootstrap_servers=queue.bootstrap_servers) as producer:

        def is_taken(size: int) -> bool:
            try:
                producer.send(bytes(size))
            except KafkaClientError:
                return False
            return True

        largest = next(filter(is_taken, range(1_048_576, 1_048_476, -1)))
        assert largest < 1_048_576
        # Raises where the broker refused it.
        producer.flush()


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"kmq-origin": b"1:2"}, "header name is reserved: got 'kmq-origin'"),
        ([("a", 1)], "header has the wrong type: expected a str name and a bytes, str or None value, got 'a'"),
    ],
)
def test_header_that_is_reserved_or_of_another_type_is_refused(queue: Queue, headers: Any, message: str) -> None:  # noqa: ANN401  # wrong on purpose
    with (
        QueueProducer(queue.name, bootstrap_servers=queue.bootstrap_servers) as producer,
        pytest.raises(ConfigError, match=message),
    ):
        producer.send("x", headers=headers)


def test_missing_queue_is_reported_with_the_command(bootstrap_servers: str) -> None:
    with pytest.raises(TopicError, match="run `kmq queue create not-there`"):
        QueueProducer("not-there", bootstrap_servers=bootstrap_servers)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"enable.idempotence": "false"}, "setting enable.idempotence would break a guarantee: got 'false'"),
        ({"plugin.library.paths": "x.so"}, "loads a library"),
        ({"transactional.id": "mine"}, "kmq-spark sets it itself"),
        ({"linger.msx": "5"}, "unknown Kafka client setting: got 'linger.msx' .* did you mean 'linger.ms'?"),
        ({"linger.ms": "soon"}, "Kafka client setting queue.buffering.max.ms is not allowed"),
    ],
)
def test_setting_that_breaks_a_guarantee_or_is_unknown_is_refused(extra: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QueueProducer("orders", bootstrap_servers="127.0.0.1:1", extra=extra, timeout=1)


def test_refused_setting_does_not_show_a_password() -> None:
    extra = {"sasl.password": "canary-7f", "linger.ms": "soon"}
    with pytest.raises(ConfigError) as raised:
        QueueProducer("orders", bootstrap_servers="127.0.0.1:1", extra=extra, timeout=1)
    assert "canary" not in f"{raised.value!r} {raised.value.__cause__!r}"


@pytest.mark.slow
def test_failed_message_without_a_callback_is_raised_by_the_next_call() -> None:
    with quick_broker() as broker:
        from kmq_spark.kafka.topics import create_queue_topics  # noqa: PLC0415

        create_queue_topics("lost", bootstrap_servers=broker.bootstrap_servers, partitions=1)
        producer = QueueProducer("lost", bootstrap_servers=broker.bootstrap_servers, delivery_timeout=1)
        broker.kill()
        producer.send("x")
        with pytest.raises(KafkaClientError, match="_MSG_TIMED_OUT") as raised:
            producer.flush(10)
        assert raised.value.retriable
        producer.close()
