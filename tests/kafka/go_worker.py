"""
A worker that speaks the wire of kafka-mq-go, so that its Go workers are tested where no Go program can be fetched.

Rule 1: written from its wire, with nothing of our codec: what both agree on was not agreed on by one piece of code.
Rule 2: one message at a time, as its consumer: filter by key, START durable, position committed, then the handler.

Source: kafka-mq-go `queue/internal/mqclient.go`, `queue/internal/markerproducer.go`, `queue/message.go` and
`queue/proto/kafka_mq_v1.proto`; `tests/unit/wire/test_go_wire.py` compares the bytes with those of the Go program.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from confluent_kafka import Consumer, KafkaException, Producer

from tests.limits import COMES_S

if TYPE_CHECKING:
    from types import TracebackType

    from confluent_kafka import Message

START, END, KEEPALIVE = 0, 1, 2

SESSION_TIMEOUT_MS = 10_000
"""How long a killed worker's partitions wait: the default of the client that it pins (confluent-kafka-go 1.5.2)."""


class GoMessage(NamedTuple):
    """A message as its handler has it, and where it lies."""

    payload: bytes
    partition: int
    offset: int
    record: Message


class GoWorker:
    """Its producer and its consumer of one of its queues."""

    def __init__(self, bootstrap_servers: str, queue: str, queue_id: str, lease_ms: int = 1_000) -> None:
        self._queue, self._key, self._lease_ms = queue, queue_id.encode(), lease_ms
        common = {"bootstrap.servers": bootstrap_servers}
        # No retries: a START must not come after its END.
        marking = {"acks": "all", "retries": 0, "linger.ms": 1, "partitioner": "murmur2_random"}
        self._markers = Producer({**common, **marking})
        self._messages = Producer({**common, "partitioner": "random"})
        self._consumer = Consumer(
            {
                **common,
                "group.id": group_of(queue_id),
                "auto.offset.reset": "earliest",
                "enable.auto.commit": "false",
                "session.timeout.ms": SESSION_TIMEOUT_MS,
            }
        )
        self._consumer.subscribe([queue])

    def __enter__(self) -> Self:
        """Return the worker."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Leave the group; what is held is not given back."""
        self._consumer.close()

    def send(self, payload: bytes) -> None:
        """Send a message to its queue."""
        _produce(self._messages, self._queue, self._key, payload)

    def receive(self, timeout_s: float = COMES_S) -> GoMessage | None:
        """Return the next message of its queue, started and committed; None where none comes in time."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            record = self._consumer.poll(0.1)
            if record is None:
                continue
            if record.error() is not None:
                raise KafkaException(record.error())
            if record.key() != self._key:
                continue  # of another of its queues
            message = GoMessage(record.value() or b"", record.partition() or 0, record.offset() or 0, record)
            self._mark(start_marker(message.partition, message.offset, self._lease_ms, self._key, message.payload))
            self._consumer.commit(asynchronous=False)
            return message
        return None

    def ack(self, message: GoMessage) -> None:
        """End it; its `Nack` does the same."""
        self._mark(end_marker(message.partition, message.offset))

    def _mark(self, value: bytes) -> None:
        _produce(self._markers, f"{self._queue}.markers", self._key, value)


def group_of(queue_id: str) -> str:
    """Return the Kafka group of one of its queues."""
    return f"kafka-mq-{queue_id}"


def start_marker(partition: int, offset: int, lease_ms: int, key: bytes, value: bytes) -> bytes:
    """Return its START: type 0 is left out, key and value of the message are in."""
    return _message_id(partition, offset) + _number(4, lease_ms) + _bytes(5, key) + _bytes(6, value)


def end_marker(partition: int, offset: int) -> bytes:
    """Return its END."""
    return _number(2, END) + _message_id(partition, offset)


def keep_alive_marker(partition: int, offset: int, lease_ms: int) -> bytes:
    """Return its KEEPALIVE."""
    return _number(2, KEEPALIVE) + _message_id(partition, offset) + _number(4, lease_ms)


def _message_id(partition: int, offset: int) -> bytes:
    # Written even where it is empty: it is a pointer that is set.
    inner = _number(1, partition) + _number(2, offset)
    return bytes([3 << 3 | 2]) + _varint(len(inner)) + inner


def _number(field: int, value: int) -> bytes:
    return bytes([field << 3]) + _varint(value) if value else b""


def _bytes(field: int, value: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(value)) + value if value else b""


def _varint(value: int) -> bytes:
    # Seven bits a byte, the lowest first; the eighth says that more follow.
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + _varint(value >> 7)


def _produce(producer: Producer, topic: str, key: bytes, value: bytes) -> None:
    failed: list[Any] = []
    delivered = threading.Event()

    def report(error: object, _message: object) -> None:
        failed.extend([error] if error is not None else [])
        delivered.set()

    producer.produce(topic, value, key, on_delivery=report)
    while not delivered.is_set():
        producer.poll(0.1)
    if failed:
        raise KafkaException(failed[0])
