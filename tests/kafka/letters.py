"""Dead letters of one test: buried as the tracker does it, and what became of them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from confluent_kafka import Producer
from typer.testing import CliRunner, Result

from kmq_spark import RedriveSummary, list_dead_letters, purge, redrive
from kmq_spark.cli.main import app
from kmq_spark.core.markers import MarkerType, Outcome
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.wire.codec import decode_marker
from kmq_spark.wire.headers import Headers, dead_letter_headers
from tests.kafka.conftest import Queue, read_all
from tests.limits import ENDS_S


class Letters:
    """A queue of two partitions and what lies in its dead-letter topic."""

    def __init__(self, queue: Queue, name: str = "") -> None:
        self.queue = queue
        self.name = name or queue.name
        self.topics = QueueTopics.parse(self.name)
        self.bootstrap_servers = queue.bootstrap_servers
        self.arguments = (self.name, "--bootstrap-server", self.bootstrap_servers)

    def bury(
        self,
        *values: bytes | None,
        reason: str = "no such customer",
        key: bytes | None = b"k",
        partition: int = 0,
        headers: Headers | None = None,
        source_topic: str = "",
        sent_at_ms: int = 1_000,
    ) -> None:
        """Write dead letters as the tracker does, in order."""
        settings = {"message.max.bytes": 10_000_000, "enable.idempotence": True}  # in order, whatever is sent again
        client = Producer({"bootstrap.servers": self.bootstrap_servers, **settings})
        for number, value in enumerate(values):
            added = dead_letter_headers(
                [("app", b"x"), *(headers or [])], source_topic=source_topic or self.queue.name, group="g",
                delivery_count=5, queue_partition=partition, message_offset=number, sent_at_ms=sent_at_ms,
                reason=reason,
            )  # fmt: skip
            client.produce(self.topics.dead_letter_topic, value, key, partition, headers=[*added])
        assert client.flush(10) == 0

    def open_values(self, **options: Any) -> list[bytes | None]:
        """Return the values of the open letters."""
        found = list_dead_letters(self.name, bootstrap_servers=self.bootstrap_servers, **options)
        return [letter.value for letter in found]

    def redrive(self, **options: Any) -> RedriveSummary:
        """Redrive."""
        return redrive(self.name, bootstrap_servers=self.bootstrap_servers, **options)

    def purge(self, **options: Any) -> RedriveSummary:
        """Purge."""
        return purge(self.name, bootstrap_servers=self.bootstrap_servers, **options)

    def back(self) -> list[bytes | None]:
        """Return the values that lie in the queue topic."""
        return [record.value() for record in read_all(self.bootstrap_servers, self.queue.name)]

    def ends(self) -> list[tuple[Outcome, list[str]]]:
        """Return what the redrive topic says."""
        records = read_all(self.bootstrap_servers, self.topics.redrive_topic)
        markers = [decode_marker(record.value()) for record in records]
        assert {marker.type for marker in markers} <= {MarkerType.END, MarkerType.TICK}
        return [
            (m.outcome, [f"{m.queue_partition}:{first + n}" for first, count in m.ranges for n in range(count)])
            for m in markers
            if m.type is MarkerType.END
        ]

    def kmq(self, command: str, *arguments: str) -> Result:
        """Run a command of `kmq dlq` in this process."""
        return CliRunner().invoke(app, ["dlq", command, *self.arguments, *arguments], prog_name="kmq")

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `kmq dlq` as a process of its own, the first argument being its command."""
        command, *others = arguments
        return subprocess.run(
            [sys.executable, "-m", "kmq_spark.cli.main", "dlq", command, *self.arguments, *others],
            capture_output=True,
            text=True,
            check=False,
            timeout=ENDS_S,
            env={**os.environ, **environment},
        )
