"""A queue of one test with trackers and consumers on it, for the tests that need all of them."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kmq_spark.config import Settings, load_settings
from kmq_spark.consumer.consumer import QueueConsumer
from kmq_spark.kafka.queue_rules import checked_rules, write_rules
from kmq_spark.kafka.topics import create_queue_topics
from kmq_spark.producer.producer import QueueProducer
from kmq_spark.tracker.queue_tracker import QueueTracker
from tests.kafka.conftest import wait_until
from tests.limits import COMES_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from kmq_spark.consumer.message import Message
    from kmq_spark.kafka.topics import QueueLayout

LEASE_MS = 3_000


class Stage:
    """One queue, and trackers and consumers on it."""

    def __init__(self, spark: SparkSession, bootstrap_servers: str, folder: Path, queue: str) -> None:
        self.spark = spark
        self.bootstrap_servers = bootstrap_servers
        self.folder = folder
        self.queue = queue
        self.layout: QueueLayout = create_queue_topics(queue, bootstrap_servers=bootstrap_servers, partitions=2)
        self._rules_version = 0
        self.put_rules(max_deliveries=3)

    def put_rules(self, **rules: object) -> None:
        """Write the next version of the queue's rules; those not named have their defaults."""
        put_rules(self.queue, self.bootstrap_servers, self._rules_version, **rules)
        self._rules_version += 1

    def settings(self, checkpoint: str = "checkpoint", **tracker: object) -> Settings:
        """Return the settings of a tracker of this queue."""
        return load_settings(
            None,
            {
                "kafka": {"bootstrap_servers": self.bootstrap_servers},
                "tracker": {
                    "checkpoint_dir": str(self.folder / checkpoint), "state_partitions": 2, "commit_interval": 0.5,
                    **tracker,
                },
            },
        )  # fmt: skip

    def send(self, *values: str) -> None:
        """Send messages and wait for them."""
        with QueueProducer(self.queue, bootstrap_servers=self.bootstrap_servers) as producer:
            for value in values:
                producer.send(value, key=value, headers=[("origin-app", b"tests")])

    def consumer(self, **options: object) -> QueueConsumer:
        """Return a consumer with a short lease and no keep-alive: what it does not settle falls due."""
        lease = options.pop("lease", LEASE_MS / 1000)
        defaults: dict[str, object] = {"lease": lease, "max_lease": lease}
        return QueueConsumer(self.queue, bootstrap_servers=self.bootstrap_servers, **{**defaults, **options})  # type: ignore[arg-type]

    @contextmanager
    def tracking(self, **tracker: object) -> Iterator[QueueTracker]:
        """Run a tracker in this process for the time of a block."""
        queue_tracker = QueueTracker(self.spark, self.queue, self.settings(**tracker))  # type: ignore[arg-type]
        failure: list[BaseException] = []

        def run() -> None:
            try:
                queue_tracker.run()
            except BaseException as error:  # noqa: BLE001  # passed on to the test
                failure.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            assert wait_until(lambda: bool(failure) or queue_tracker.wait_ready(0))
            assert not failure, failure
            yield queue_tracker
        finally:
            queue_tracker.stop()
            thread.join(COMES_S)
        assert not failure, failure


def put_rules(queue: str, bootstrap_servers: str, expected_version: int = 0, **rules: object) -> None:
    """Write rules of a queue; those not named have their defaults."""
    write_rules(queue, checked_rules(rules), expected_version=expected_version, bootstrap_servers=bootstrap_servers)


def receive_all(consumer: QueueConsumer, count: int, timeout_s: float = COMES_S, *, ack: bool = False) -> list[Message]:
    """Receive *count* messages, or as many as come in time; with *ack* each is acknowledged as it comes."""
    messages: list[Message] = []
    deadline_s = time.monotonic() + timeout_s
    while len(messages) < count and time.monotonic() < deadline_s:
        received = consumer.receive(count - len(messages), timeout=1.0)
        if ack:
            for message in received:
                message.ack()
        messages += received
    return messages
