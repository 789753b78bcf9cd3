"""Settings reach the clients that are made from them."""

from __future__ import annotations

import time

import pytest

from kmq_spark import consumer_from, create_queue, load_settings, producer_from, run_worker
from kmq_spark.consumer.message import Message
from kmq_spark.kafka.log_reader import read_committed
from kmq_spark.kafka.settings import reader_config
from kmq_spark.wire.codec import decode_marker
from tests.limits import COMES_S

pytestmark = pytest.mark.kafka


@pytest.mark.parametrize("group_protocol", ["classic", "eager", "consumer"])
def test_worker_runs_as_the_settings_say(bootstrap_servers: str, group_protocol: str) -> None:
    """The START has the lease of the queue's own settings; `run_worker` ends when the handler raises SystemExit."""
    queue = f"configured.{time.time_ns()}"
    layout = create_queue(queue, bootstrap_servers=bootstrap_servers, partitions=1)
    settings = load_settings(
        None,
        {
            "kafka": {"bootstrap_servers": bootstrap_servers},
            "consumer": {"group_protocol": group_protocol, "concurrency": 1},
            "queues": {queue: {"lease_ms": 7_000}},
        },
    )
    with producer_from(settings, queue) as producer:
        producer.send("a")

    def handle(_message: Message) -> None:
        raise SystemExit

    with pytest.raises(SystemExit):
        run_worker(settings, queue, handle)
    config = reader_config(bootstrap_servers, "test")
    (start, *_) = [decode_marker(record.value()) for record in read_committed(config, layout.topics.markers_topic, [0])]
    assert start.redeliver_after_ms == 7_000


def test_consumer_takes_its_limit_from_the_settings(bootstrap_servers: str) -> None:
    """`[consumer] max_in_flight` limits the number of held messages."""
    queue = f"configured.{time.time_ns()}"
    create_queue(queue, bootstrap_servers=bootstrap_servers, partitions=1)
    settings = load_settings(
        None, {"kafka": {"bootstrap_servers": bootstrap_servers}, "consumer": {"max_in_flight": 2}}
    )
    with producer_from(settings, queue) as producer:
        for number in range(5):
            producer.send(str(number))
    with consumer_from(settings, queue) as consumer:
        held: list[Message] = []
        while len(held) < 2:
            held += consumer.receive(5, timeout=COMES_S)
        assert (len(held), consumer.receive(5, timeout=0.5)) == (2, [])
