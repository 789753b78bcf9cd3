"""One message through everything: redelivered, dead, redriven, done; its story, its headers, and the metrics."""

from __future__ import annotations

import json
import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from kmq_spark.cli.main import app
from kmq_spark.consumer.consumer import QueueConsumer
from kmq_spark.producer.producer import QueueProducer
from kmq_spark.tracker.metrics import TrackerMetrics
from tests.kafka.conftest import consumer_of, read_all, wait_until
from tests.kafka.stage import receive_all
from tests.limits import COMES_S

if TYPE_CHECKING:
    from tests.kafka.conftest import Queue
    from tests.kafka.stage import Stage

pytestmark = pytest.mark.kafka

TRACE = ("traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")


def kmq(stage: Stage, *arguments: str) -> str:
    """Run a command that must end well; return what it printed."""
    result = CliRunner().invoke(app, [*arguments, "--bootstrap-server", stage.bootstrap_servers])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def receive_one(stage: Stage, *, reject: str = "", ack: bool = False) -> list[tuple[str, bytes | None]]:
    """Receive one message, settle it or leave it to its lease; return its headers."""
    with stage.consumer() as consumer:
        (message,) = receive_all(consumer, 1)
        if reject:
            message.reject(reject)
        elif ack:
            message.ack()
        else:
            # Its consumer dies as far as the log knows: the close that follows must not give it back.
            message._lease.held.clear()
        return list(message.headers)


@pytest.mark.spark
def test_story_headers_and_metrics_of_a_message_that_died_and_was_redriven(stage: Stage) -> None:
    """`traceparent` is on every copy, dead letter included, so that a trace follows the message."""
    with QueueProducer(stage.queue, bootstrap_servers=stage.bootstrap_servers) as producer:
        producer.send("work", headers=[TRACE], partition=0)
    with stage.tracking() as tracker:
        metrics = TrackerMetrics([tracker], stage.settings())
        assert receive_one(stage) == [TRACE]
        assert receive_one(stage, reject="no such customer") == [TRACE]
        letters = f"{stage.queue}.dlq"
        assert wait_until(lambda: bool(read_all(stage.bootstrap_servers, letters)))
        (letter,) = read_all(stage.bootstrap_servers, letters)
        assert TRACE in letter.headers()
        kmq(stage, "dlq", "redrive", stage.queue, "--all", "--execute")
        assert receive_one(stage, ack=True) == [TRACE]
        inspector = metrics._inspector(stage.queue)
        metrics.check_topics(stage.queue, inspector)
        inspector.close()
        found = {(each.name, *each.labels[1:]): each.value for each in metrics.samples()}
    story = [json.loads(line) for line in kmq(stage, "message", "show", stage.queue, "0:0", "-o", "jsonl").splitlines()]
    assert [line["what"].split(",")[0] for line in story] == [
        "sent", "started", "redelivered", "sent again", "started", "rejected: no such customer",
        "dead-lettered: no such customer", "dead letter: no such customer", "redriven", "redriven", "started", "acked",
    ]  # fmt: skip
    assert found["kmq_redeliveries_total", "lease_over"] == 1
    assert found["kmq_dead_lettered_total", "rejected"] == 1
    assert found["kmq_messages_ready",] == 0
    assert found["kmq_dlq_depth",] == 0
    assert found["kmq_tracker_state_bytes",] > 0
    assert found["kmq_tracker_batch_duration_seconds",] > 0
    ((_, lateness),) = metrics.lateness()
    assert sum(lateness.counts) == 1


def test_worker_counts_what_it_has_done_in_the_default_registry(queue: Queue) -> None:
    """A second run adds to the first."""
    from prometheus_client import REGISTRY  # noqa: PLC0415  # of this test alone

    labels = {"component": "worker", "queue": queue.name}

    def has_counted(count: int) -> bool:
        names = ("kmq_deliveries_total", "kmq_acks_total")
        return all(REGISTRY.get_sample_value(name, labels) == count for name in names)

    for sent in (3, 5):
        queue.send("a", "b", "c") if sent == 3 else queue.send("d", "e")
        consumer: QueueConsumer = consumer_of(queue)
        thread = threading.Thread(target=consumer.run, args=(lambda _message: None,))
        thread.start()
        assert wait_until(partial(has_counted, sent))
        consumer.stop()
        thread.join(COMES_S)
        assert has_counted(sent)
