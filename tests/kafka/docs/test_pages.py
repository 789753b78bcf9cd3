"""
The pages of docs, typed as they stand: each in a fresh folder, on a broker of its own.

The pages that are not here have no block that runs (`test_documents.py` counts them).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer
from dramatiq import Message as DramatiqMessage

from kmq_spark.consumer.consumer import QueueConsumer
from kmq_spark.core.markers import Marker, MarkerType, OffsetRange
from kmq_spark.kafka.settings import marker_producer_config
from kmq_spark.kafka.topics import create_queue_topics
from kmq_spark.local.broker import EmbeddedBroker
from kmq_spark.local.probe import free_port
from kmq_spark.producer.producer import QueueProducer
from kmq_spark.wire.codec import encode_marker
from tests.brokers import quick_broker
from tests.kafka.conftest import Queue, ended, receive_all, seen
from tests.kafka.documents import Reader, make_reader
from tests.kafka.letters import Letters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["make_reader"]  # a fixture of this module

pytestmark = pytest.mark.kafka


@pytest.fixture
def own_broker() -> Iterator[EmbeddedBroker]:
    """A broker of the test's own: documents name their queues `orders`."""
    with quick_broker() as running:
        yield running


def test_dead_letters_page_runs_as_typed(own_broker: EmbeddedBroker, make_reader: Callable[[int], Reader]) -> None:
    """One letter of a missing customer, two of a timeout: the two are redriven, the one is shown."""
    servers = own_broker.bootstrap_servers
    create_queue_topics("orders", bootstrap_servers=servers, partitions=2)
    letters = Letters(Queue("orders", servers))
    letters.bury(b'{"order": 1041, "customer": 7}', key=b"customer-7", reason="no such customer: 7")
    letters.bury(b"a", b"b", key=b"customer-9", reason="timeout after 5 s", partition=1)
    reader = make_reader(own_broker.port)
    reader.read("docs/dead_letters.md")
    assert letters.open_values() == [b'{"order": 1041, "customer": 7}']


def test_delivery_control_page_runs_as_typed(own_broker: EmbeddedBroker, make_reader: Callable[[int], Reader]) -> None:
    reader = make_reader(own_broker.port)
    reader.read("docs/delivery_control.md")
    assert "10" in reader.run("kmq queue describe orders -o json")


def test_producing_page_runs_as_typed(own_broker: EmbeddedBroker, make_reader: Callable[[int], Reader]) -> None:
    """Its first block sends three messages; the import copies three lines, and nothing when it runs again."""
    create_queue_topics("orders", bootstrap_servers=own_broker.bootstrap_servers, partitions=1)
    make_reader(own_broker.port).read("docs/producing.md")
    assert seen(Queue("orders", own_broker.bootstrap_servers))[3:] == [b"anna", b"bert", b"carl"]


def test_consuming_page_runs_as_typed(own_broker: EmbeddedBroker, make_reader: Callable[[int], Reader]) -> None:
    """Of 1,113 messages ten of the batches fail, and one of the loop; one is rejected, and one has a result."""
    create_queue_topics("orders", bootstrap_servers=own_broker.bootstrap_servers, partitions=2)
    queue = Queue("orders", own_broker.bootstrap_servers)
    reader = make_reader(own_broker.port)
    # 100 + 1 + 1 + 1,000 - 10
    reader.read("docs/consuming.md", until={"consumer.run(store": lambda _written: len(ended(queue)) == 1_092})
    assert len(ended(queue)) == 1_092 + 9 + 1
    assert seen(Queue("invoices", own_broker.bootstrap_servers)) == [b"invoice for order 42"]


def test_testing_page_s_tests_pass(make_reader: Callable[[int], Reader]) -> None:
    """They need no broker."""
    reader = make_reader(free_port())
    reader.read("docs/testing.md")
    assert "3 passed" in reader.run("python -m pytest -p no:kmq_spark -p kmq_spark.testing.plugin block_1.py")


def test_dramatiq_page_runs_as_typed(own_broker: EmbeddedBroker, make_reader: Callable[[int], Reader]) -> None:
    make_reader(own_broker.port).read("docs/dramatiq.md")
    sent = {DramatiqMessage.decode(value).args for value in seen(Queue("tasks", own_broker.bootstrap_servers))}
    assert sent == {("anna",), ("bert",)}


@pytest.mark.slow  # its tutorial takes a while
def test_coordination_page_runs_as_typed(own_broker: EmbeddedBroker, make_reader: Callable[[int], Reader]) -> None:
    """In the tutorial each task is run by one process at a time, and anna's tasks by the other two after her death."""
    reader = make_reader(own_broker.port)
    reader.read("docs/coordination.md")
    before, _, after = reader.printed["block_2.py"].partition("anna is killed\n")
    runs = [line.split(" runs ") for line in before.splitlines()]
    tasks = {f"task-{number}" for number in range(10)}
    assert {run.partition(",")[0] for _, run in runs} == tasks
    assert {name for name, _ in runs} == {"anna", "bert", "carl"}
    last_by_task = {run.partition(",")[0]: name for name, run in runs}
    orphans = {task for task, name in last_by_task.items() if name == "anna"}
    again = {line.split(" runs ")[1].partition(",")[0] for line in after.splitlines() if " runs " in line}
    assert orphans
    assert orphans <= again
    assigned = [line.split(" is assigned to ") for line in after.splitlines() if " is assigned to " in line]
    assert {task for task, _ in assigned} == tasks
    assert {name for _, name in assigned} == {"bert", "carl"}


@pytest.mark.spark
@pytest.mark.slow  # a JVM for each of the ledger's commands
@pytest.mark.timeout(900)
def test_operations_page_runs_as_typed(own_broker: EmbeddedBroker, make_reader: Callable[[int], Reader]) -> None:
    """The worker of the guided fault hangs after forty messages, and is killed when all its handlers hang."""
    queue = fill_and_hold(own_broker.bootstrap_servers)
    reader = make_reader(own_broker.port)

    def all_hang(_: str) -> bool:
        return len(queue.markers(MarkerType.END)) > 0 and len(ended(queue)) == 40

    reader.read("docs/operations.md", until={"threading.Event().wait()": all_hang}, kills={"threading.Event().wait()"})


@pytest.mark.slow  # three brokers
def test_security_page_runs_as_typed(make_reader: Callable[[int], Reader]) -> None:
    reader = make_reader(free_port())
    reader.read("docs/security.md")
    listed = reader.run("kmq queue list -o json --command-config cluster/admin.properties")
    assert [(row["queue"], row["ready"]) for row in json.loads(listed)] == [("orders", 0)]
    reader.stop()


@pytest.mark.spark
@pytest.mark.slow  # a tracker's JVM
@pytest.mark.timeout(900)
def test_go_workers_page_runs_as_typed(own_broker: EmbeddedBroker, make_reader: Callable[[int], Reader]) -> None:
    reader = make_reader(own_broker.port)
    reader.read("docs/go_workers.md")
    reader.stop()


@pytest.mark.spark
@pytest.mark.slow  # a JVM for each command that writes
@pytest.mark.timeout(1800)
def test_ledger_page_runs_as_typed(own_broker: EmbeddedBroker, make_reader: Callable[[int], Reader]) -> None:
    """Of the first queue one message is acknowledged, one rejected and one forgotten."""
    servers = own_broker.bootstrap_servers
    for name in ("orders", "emails"):
        create_queue_topics(name, bootstrap_servers=servers, partitions=2)
        with QueueConsumer(name, bootstrap_servers=servers) as consumer:
            with QueueProducer(name, bootstrap_servers=servers) as producer:
                for value in "abc":
                    producer.send(value, key="customer-9")
            done, dead, _ = receive_all(consumer, 3)
            done.ack()
            dead.reject("no such customer")
    Letters(Queue("orders", servers)).bury(b"d", key=b"customer-7", reason="no such customer")
    make_reader(own_broker.port).read("docs/ledger.md")


def fill_and_hold(servers: str) -> Queue:
    """Return the queue `orders` with 200 messages; four of partition 1 are started under a long lease."""
    create_queue_topics("orders", bootstrap_servers=servers, partitions=4)
    queue = Queue("orders", servers)
    with QueueProducer("orders", bootstrap_servers=servers) as producer:
        for number in range(200):
            producer.send(f"order {number}", key=str(number))
    held = Marker(
        MarkerType.START, 1, (OffsetRange(20, 4),), redeliver_after_ms=600_000, delivery_count=1, consumer_id="holder"
    )
    client = Producer(marker_producer_config(servers, extra={}))
    client.produce("orders.markers", encode_marker(held), partition=1)
    assert client.flush(10) == 0
    return queue
