"""What the documents show works: the notebook's cells and every block of README and docs, typed as they stand."""

from __future__ import annotations

import json
import shutil
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer

from kmq_spark.core.markers import Marker, MarkerType, OffsetRange
from kmq_spark.kafka.consumer import QueueConsumer
from kmq_spark.kafka.producer import QueueProducer
from kmq_spark.kafka.settings import marker_producer_config
from kmq_spark.kafka.topics import create_queue
from kmq_spark.ledger.sample import write_sample
from kmq_spark.local.broker import EmbeddedBroker
from kmq_spark.wire.codec import encode_marker
from tests.kafka.conftest import Queue, ended, read_all, receive_all
from tests.kafka.documents import LANGUAGES, Block, Reader, blocks_of
from tests.kafka.letters import Letters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.kafka

ROOT = Path(__file__).parents[2]


def test_notebook_runs_from_its_first_cell_to_its_last() -> None:
    """A reader who runs all cells sees what the text says."""
    notebook = json.loads((ROOT / "notebooks" / "queue_by_hand.ipynb").read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)  # noqa: S102  # our own notebook
    assert names["decisions"] == [(4, "DEAD_LETTER", "no such customer"), (5, "REDELIVER", "")]


DOCUMENTS = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]

NOT_RUN = {"README.md": 1, "docs/deployment.md": 2, "docs/faults.md": 1, "docs/ledger.md": 1}
"""Blocks with a reason why they are not run, by document: one more is a decision."""

OUTPUT = {"README.md": 2, "docs/commands.md": 1, "docs/design.md": 1, "docs/ledger.md": 2}
"""Blocks of `text`: output and drawings."""


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_block_of_a_document_runs_or_says_why_not(document: str) -> None:
    """So that none escapes in silence: each has a language that is known, and the exceptions are counted."""
    blocks = blocks_of(document)
    assert (ROOT / document).read_text(encoding="utf-8").count("```") == 2 * len(blocks)
    assert {block.language for block in blocks} <= LANGUAGES
    assert sum(bool(block.reason) for block in blocks) == NOT_RUN.get(document, 0)
    assert sum(block.language == "text" for block in blocks) == OUTPUT.get(document, 0)


@pytest.fixture
def own_broker() -> Iterator[EmbeddedBroker]:
    """A broker of the test's own: documents name their queues `orders`."""
    with EmbeddedBroker() as running:
        yield running


@pytest.fixture
def make_reader(tmp_path: Path) -> Iterator[Callable[[int], Reader]]:
    """Make somebody who types in a fresh folder."""
    readers: list[Reader] = []

    def make(port: int) -> Reader:
        folder = tmp_path / "fresh"
        folder.mkdir()
        readers.append(Reader(folder, port, free_port()))
        return readers[-1]

    yield make
    for reader in readers:
        reader.kill()


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def has_handled_all(written: str) -> bool:
    """Return whether the README's worker has printed 99 of 100 messages: one was rejected."""
    return written.count("b'order ") == 99


@pytest.mark.spark
@pytest.mark.timeout(900)
def test_readme_runs_as_typed(make_reader: Callable[[int], Reader]) -> None:
    """In order, from `kmq up` to the ledger; what runs on ends with SIGTERM, well."""
    port = free_port()
    reader = make_reader(port)
    reader.read("README.md", until={"consumer.run(handle": has_handled_all})
    servers = f"127.0.0.1:{port}"
    assert [record.value() for record in read_all(servers, "sent-emails")] == [b"hello"]
    assert [record.value() for record in read_all(servers, "orders.dlq")] == [b"order 13"]
    reader.stop()


@pytest.mark.timeout(400)
def test_dead_letters_page_runs_as_typed(own_broker: EmbeddedBroker, make_reader: Callable[[int], Reader]) -> None:
    """One letter of a missing customer, two of a timeout: the two are redriven, the one is shown."""
    servers = own_broker.bootstrap_servers
    create_queue("orders", bootstrap_servers=servers, partitions=2)
    letters = Letters(Queue("orders", servers))
    letters.bury(b'{"order": 1041, "customer": 7}', key=b"customer-7", reason="no such customer: 7")
    letters.bury(b"a", b"b", key=b"customer-9", reason="timeout after 5 s", partition=1)
    reader = make_reader(own_broker.port)
    reader.read("docs/dead_letters.md")
    assert letters.open_values() == [b'{"order": 1041, "customer": 7}']


@pytest.mark.timeout(400)
def test_commands_page_runs_as_typed(own_broker: EmbeddedBroker, make_reader: Callable[[int], Reader]) -> None:
    """A queue with messages, some of them in somebody's hands."""
    fill_and_hold(own_broker.bootstrap_servers)
    make_reader(own_broker.port).read("docs/commands.md")


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


@pytest.mark.spark
@pytest.mark.timeout(900)
def test_go_workers_page_runs_as_typed(own_broker: EmbeddedBroker, make_reader: Callable[[int], Reader]) -> None:
    reader = make_reader(own_broker.port)
    reader.read("docs/go_workers.md")
    reader.stop()


@pytest.mark.spark
@pytest.mark.slow  # a JVM for each command that writes
@pytest.mark.timeout(900)
def test_ledger_page_runs_as_typed(
    own_broker: EmbeddedBroker, make_reader: Callable[[int], Reader], spark: SparkSession
) -> None:
    """First on queues of its own, then on the made-up hour that the page asks."""
    servers = own_broker.bootstrap_servers
    for name in ("orders", "emails"):
        create_queue(name, bootstrap_servers=servers, partitions=1)
        with QueueConsumer(name, bootstrap_servers=servers) as consumer:
            Queue(name, servers).send("a", "b")
            for message in receive_all(consumer, 2):
                message.ack()
    reader = make_reader(own_broker.port)

    def make_up_the_hour(block: Block) -> None:
        if block.language == "python" and "ledger.connect" in block.text:
            reader.stop()
            shutil.rmtree(reader.folder / "ledger")
            write_sample(spark, str(reader.folder / "ledger"), time.time_ns() // 1_000_000)

    reader.read("docs/ledger.md", before=make_up_the_hour)


def fill_and_hold(servers: str) -> Queue:
    """Return the queue `orders` with 200 messages; four of partition 1 are started under a long lease."""
    create_queue("orders", bootstrap_servers=servers, partitions=4)
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
