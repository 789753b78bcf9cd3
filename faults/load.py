"""What is sent to a queue: steady messages by senders, and markers as clients would write them, or never would."""

from __future__ import annotations

import random
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from confluent_kafka import Producer

from faults.events import EventFile
from faults.processes import SECRET
from kmq_spark.core.markers import Marker, MarkerType, OffsetRange
from kmq_spark.errors import KmqError
from kmq_spark.kafka.settings import marker_producer_config, producer_config
from kmq_spark.producer.producer import QueueProducer
from kmq_spark.wire import headers as ours
from kmq_spark.wire.codec import encode_marker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from faults.stage import Stage
    from kmq_spark.core.markers import MessageId

LARGEST_BYTES = 2_000
LOGICAL_QUEUE = "emails"
DELAYED, EXPIRING, NAMED = 0.05, 0.05, 0.3
"""Shares of mixed messages: with a delay, with a time to live, of the logical queue."""

SHORTEST_S, LONGEST_S = 0.5, 3.0
"""Of delays and times to live."""

MESSAGES_PER_MARKER = 200
"""What a consumer's `receive` typically covers."""


class Asked(NamedTuple):
    """What a message asks for: arguments of `send`, and the headers that it must have."""

    options: dict[str, Any]
    headers: dict[str, str]


def nothing(_generator: random.Random) -> Asked:
    """Ask for nothing."""
    return Asked({}, {})


def mixed(generator: random.Random) -> Asked:
    """Ask for a logical queue, a delay, a time to live, or none of these."""
    wanted, headers = dict[str, Any](), dict[str, str]()
    if generator.random() < NAMED:
        wanted["logical_queue"] = headers[ours.LOGICAL_QUEUE] = LOGICAL_QUEUE
    seconds, share = round(generator.uniform(SHORTEST_S, LONGEST_S), 3), generator.random()
    if share < DELAYED:
        wanted["delay"], headers[ours.DELAY_MS] = seconds, str(round(1000 * seconds))
    elif share < DELAYED + EXPIRING:
        wanted["ttl"], headers[ours.TTL_MS] = seconds, str(round(1000 * seconds))
    return Asked(wanted, headers)


class Sender(threading.Thread):
    """Sends *count* messages, 0 for no end, at *rate* a second, 0 for no limit; writes down the answer to each."""

    def __init__(
        self, stage: Stage, *, rate: float, count: int, ask: Callable[[random.Random], Asked], least_bytes: int = 0
    ) -> None:
        super().__init__(name=f"sender-{stage.queue}", daemon=True)
        self._producer = QueueProducer(stage.queue, bootstrap_servers=stage.bootstrap_servers, extra=SECRET)
        at = time.time_ns()
        self._prefix, self._events = f"{stage.queue}-{at}", EventFile.of(stage.folder, f"sender-{at}")
        self._rate, self._count, self._ask, self._least_bytes = rate, count, ask, least_bytes
        self._random = random.Random(f"{stage.seed}:{rate}:{count}")  # noqa: S311  # repeatable
        self._stopping = threading.Event()

    def run(self) -> None:
        """Send; called by `start`."""
        number, began_s = 0, time.monotonic()
        while not self._stopping.is_set() and (not self._count or number < self._count):
            self._send(f"{self._prefix}-{number}", number)
            number += 1
            if self._rate:
                self._stopping.wait(max(0.0, number / self._rate - (time.monotonic() - began_s)))
        try:
            self._producer.close()
        except KmqError as error:
            self._events.write("send_incomplete", error=str(error))
        self._events.close()

    def stop(self) -> None:
        """Stop sending, and wait until everything sent is durable."""
        self._stopping.set()
        self.join()

    def _send(self, name: str, number: int) -> None:
        value = name.encode() + b"|" + self._random.randbytes(self._least_bytes + self._random.randrange(LARGEST_BYTES))
        headers: list[tuple[str, bytes | str | None]] = [
            ("traceparent", f"00-{number:032x}-{number:016x}-01"), ("twice", b"1"), ("twice", None),
        ]  # fmt: skip
        asked = self._ask(self._random)
        self._events.write("send", id=name, asked=asked.headers)
        report = partial(self._report, name)
        self._producer.send(value, key=str(number % 97), headers=headers, on_delivery=report, **asked.options)

    def _report(self, name: str, place: MessageId | None, error: KmqError | None) -> None:
        if error is None:
            is_known = place is not None and place.message_offset >= 0
            self._events.write("sent", id=name, place=place if is_known else None)
        else:
            self._events.write("send_failed", id=name, error=str(error))


def finished_messages(stage: Stage, count: int) -> None:
    """Write *count* messages with a START of the shortest lease and an END each."""
    for partition, part in _sent(stage, count):
        write(stage, Marker(MarkerType.START, partition, (part,), redeliver_after_ms=1), is_flushed=False)
        write(stage, Marker(MarkerType.END, partition, (part,)), is_flushed=False)
    stage.markers.flush()


def messages_in_flight(stage: Stage, count: int, lease_ms: int) -> None:
    """Write *count* messages with a START each."""
    for partition, part in _sent(stage, count):
        write(stage, Marker(MarkerType.START, partition, (part,), redeliver_after_ms=lease_ms), is_flushed=False)
    stage.markers.flush()


def write(
    stage: Stage,
    marker: Marker | bytes | None,
    partition: int = -1,
    *,
    times: int = 1,
    is_hostile: bool = False,
    is_flushed: bool = True,
) -> None:
    """
    Write a marker, or any bytes, to a markers partition, by default that of its messages.

    The stage notes that the injector wrote it. If it is hostile, the verdict must be the same as without it.
    """
    notes = stage.hostile if is_hostile else stage.injected_markers
    if isinstance(marker, Marker):
        partition = marker.queue_partition if partition < 0 else partition
        marker = encode_marker(marker)

    def note(_error: object, record: Any) -> None:  # noqa: ANN401  # the client's Message
        notes.add((record.partition(), record.offset()))

    for _ in range(times):
        stage.markers.produce(f"{stage.queue}.markers", marker, partition=partition, on_delivery=note)
        stage.markers.poll(0)
    if is_flushed:
        stage.markers.flush()


def marker_producer(bootstrap_servers: str) -> Producer:
    """Return a producer of markers as a consumer has it."""
    return Producer(marker_producer_config(bootstrap_servers))


def _sent(stage: Stage, count: int) -> Iterator[tuple[int, OffsetRange]]:
    """Send empty messages, evenly, and return the ranges that they took."""
    producer = Producer(producer_config(stage.bootstrap_servers))
    offsets: dict[int, list[int]] = {partition: [] for partition in range(stage.partitions)}

    def note(_error: object, record: Any) -> None:  # noqa: ANN401  # the client's Message
        offsets[record.partition()].append(record.offset())

    for number in range(count):
        while True:
            try:
                producer.produce(stage.queue, b"", partition=number % stage.partitions, on_delivery=note)
                break
            except BufferError:
                producer.poll(0.05)
        if number % 1_000 == 0:
            producer.poll(0)
    producer.flush()
    for partition, taken in offsets.items():
        first, last = min(taken, default=0), max(taken, default=-1)
        for at in range(first, last + 1, MESSAGES_PER_MARKER):
            yield partition, OffsetRange(at, min(MESSAGES_PER_MARKER, last + 1 - at))
