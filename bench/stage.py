"""What the benchmarks of the tracker share: a broker, a Spark session, a tracker in this process."""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from array import array
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from kmq_spark.config import load_settings
from kmq_spark.core.in_flight import ranges_of
from kmq_spark.core.markers import Marker, MarkerType
from kmq_spark.kafka.queue_rules import checked_rules, read_rules, write_rules
from kmq_spark.kafka.topics import create_queue_topics
from kmq_spark.local.broker import EmbeddedBroker
from kmq_spark.local.jars import jar_paths
from kmq_spark.spark.session import build_session, session_settings
from kmq_spark.tracker.queue_tracker import QueueTracker
from kmq_spark.wire.codec import encode_marker

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from kmq_spark.kafka.queue_topics import QueueTopics

MESSAGE_BYTES = 200
PARTITIONS = 4
_SHARES = {"p50": 50, "p99": 99, "max": 100}
QUEUED, QUEUED_KIB = 250_000, 131_072
"""Messages, and KiB of them, that a sender gives to its client before it waits."""
SENT_AT_ONCE = 10_000
JOINED_TOGETHER = {"group.initial.rebalance.delay.ms": "1000"}
"""
Kafka's default is 3 s, the embedded broker's 0. Processes that start at a time get their partitions at a time, so that
what is measured is how fast they read and not how long their heartbeats take to notice a rebalance: up to 3 s.
"""
PER_MARKER = 500
"""Messages that one marker covers, as a busy consumer's do."""


class Bench:
    """A broker and a Spark session that live through all measurements of one run."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.broker = self._stack.enter_context(EmbeddedBroker(extra=JOINED_TOGETHER))
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self.spark = build_session("kmq-bench", master="local[2]", settings=session_settings(jar_paths("spark")))

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *_error: object) -> None:
        """End both."""
        self.spark.stop()
        self._stack.close()

    def queue(self, name: str, partitions: int = PARTITIONS) -> QueueTopics:
        """Make a queue."""
        return create_queue_topics(name, bootstrap_servers=self.broker.bootstrap_servers, partitions=partitions).topics

    def remove(self, queue: QueueTopics) -> None:
        """Delete the topics of a queue: payloads of a whole run would fill a disk."""
        admin = AdminClient({"bootstrap.servers": self.broker.bootstrap_servers})
        for future in admin.delete_topics([queue.queue_topic, queue.markers_topic]).values():
            future.result(30)

    @contextmanager
    def tracking(
        self,
        queue: QueueTopics,
        max_deliveries: int = 0,
        **settings: Any,  # of [tracker]
    ) -> Iterator[QueueTracker]:
        """Run a tracker for the time of a block; *max_deliveries* is of a queue that has no rules yet."""
        servers = self.broker.bootstrap_servers
        if read_rules(queue.queue, bootstrap_servers=servers) is None:
            rules = checked_rules({"max_deliveries": max_deliveries})
            write_rules(queue.queue, rules, expected_version=0, bootstrap_servers=servers)
        flags: dict[str, dict[str, Any]] = {
            "kafka": {"bootstrap_servers": self.broker.bootstrap_servers},
            "tracker": {"checkpoint_dir": str(self.folder), **settings},
        }
        tracker = QueueTracker(self.spark, queue.queue, load_settings(None, flags))
        thread = threading.Thread(target=tracker.run)
        thread.start()
        try:
            if not tracker.wait_ready(120):
                message = "the tracker did not get ready in 120 s"
                raise TimeoutError(message)
            yield tracker
        finally:
            tracker.stop()
            thread.join()

    def send(self, topic: str, count: int, size: int = MESSAGE_BYTES, partitions: int = PARTITIONS) -> None:
        """Send plain messages, evenly over the partitions, and wait for them."""
        refused: list[str] = []
        producer = Producer(
            {
                "bootstrap.servers": self.broker.bootstrap_servers, "linger.ms": 20, "batch.size": 500_000,
                "queue.buffering.max.messages": 2 * QUEUED, "queue.buffering.max.kbytes": 2 * QUEUED_KIB,
                "delivery.report.only.error": True, "on_delivery": lambda error, _: refused.append(error.str()),
            }
        )  # fmt: skip
        most = min(QUEUED, QUEUED_KIB * 1024 // max(size, 1))
        value = bytes(size)
        for partition, at in itertools.product(range(partitions), range(0, count, SENT_AT_ONCE * partitions)):
            left = (count - at - partition + partitions - 1) // partitions
            messages = [{"value": value}] * min(SENT_AT_ONCE, left)
            while len(producer) > most:
                producer.poll(0.02)
            producer.produce_batch(topic, messages, partition=partition)
        producer.flush()
        self._check_all_arrived(topic, refused)

    def write(self, topic: str, markers: Iterable[Marker]) -> None:
        """Write markers, each to the partition of its messages, and wait for them."""
        records = ((encode_marker(marker), marker.queue_partition) for marker in markers)
        refused: list[str] = []
        producer = Producer(
            {
                "bootstrap.servers": self.broker.bootstrap_servers, "linger.ms": 5,
                "delivery.report.only.error": True, "on_delivery": lambda error, _: refused.append(error.str()),
            }
        )  # fmt: skip
        for value, partition in records:
            while True:
                try:
                    producer.produce(topic, value, partition=partition)
                    break
                except BufferError:
                    producer.poll(0.1)
        producer.flush()
        self._check_all_arrived(topic, refused)

    @staticmethod
    def _check_all_arrived(topic: str, refused: Sequence[str]) -> None:
        """Raise RuntimeError where records did not arrive."""
        if refused:
            message = f"{len(refused)} records for {topic} did not arrive: got {refused[0]}; measure again"
            raise RuntimeError(message)


def markers_of(
    kind: MarkerType, count: int, lease_ms: int = 0, *, gap: int = 1, first: int = 0, partitions: int = PARTITIONS
) -> Iterator[Marker]:
    """
    Yield markers that cover *count* messages, evenly over the partitions, from offset *first* of each.

    With a *gap* above 1 no two messages are neighbours: the next one is 2 to *gap* offsets further.
    """
    each = count // partitions
    gaps = np.ones(each, np.int64) if gap == 1 else np.random.default_rng(1).integers(2, gap + 1, each)
    offsets = first + np.cumsum(gaps) - gaps[:1]
    for at in range(0, each, PER_MARKER):
        ranges = ranges_of(offsets[at : at + PER_MARKER])
        for partition in range(partitions):
            yield Marker(kind, partition, ranges, redeliver_after_ms=lease_ms)


def every_lateness(tracker: QueueTracker) -> array[int]:
    """Return what fills with the lateness of every redelivery from now on, ms; a tracker itself keeps the newest."""
    found: array[int] = array("q")
    tracker.on_batch = lambda _, sent: found.extend(sent.lateness_ms)
    return found


def acked_of(tracker: QueueTracker) -> int:
    """Return how many acknowledged messages a tracker has counted."""
    return sum(status.counters["acked"] for status in list(tracker.stats.statuses.values()))


def spread(values: Sequence[float] | npt.NDArray[np.int64]) -> dict[str, int]:
    """Return the median, the 99th percentile and the largest; nothing where there are no values."""
    return {name: int(np.percentile(values, share)) for name, share in _SHARES.items()} if len(values) else {}


def wait_until(what: str, condition: Any, timeout_s: float = 180.0) -> None:  # noqa: ANN401  # a callable without arguments
    """Wait for a condition."""
    began_s = time.monotonic()
    while not condition():
        if time.monotonic() - began_s > timeout_s:
            message = f"{what} did not come within {timeout_s:g} s"
            raise TimeoutError(message)
        time.sleep(0.01)
