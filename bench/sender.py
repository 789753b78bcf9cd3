"""
One producer of the producers' benchmark, in a process of its own: `python -m bench.sender KIND {settings as JSON}`.

It sends messages and prints the seconds that took, from the first send until all are durable or committed, and the CPU
seconds of this process meanwhile. Each value begins with the time at which it was given to `send`, nanoseconds of the
machine's monotonic clock.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from confluent_kafka import Producer

from kmq_spark import QueueProducer, ResumingProducer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


COMMIT_EVERY_S = 0.1


class Work(NamedTuple):
    """The task of a producer."""

    bootstrap_servers: str
    topic: str
    messages: int
    size: int
    per_s: int = 0
    """Messages a second; 0 for as many as it can."""


class Spent(NamedTuple):
    """Seconds by the clock, and CPU seconds of this process with all its threads."""

    seconds: float
    cpu_s: float

    @classmethod
    def now(cls) -> Spent:
        """Return both clocks."""
        return cls(time.monotonic(), time.process_time())

    def since(self, began: Spent) -> Spent:
        """Return what was spent since then."""
        return Spent(self.seconds - began.seconds, self.cpu_s - began.cpu_s)


def values(work: Work) -> Iterator[bytes]:
    """Yield the values, at the rate that is asked for."""
    rest = bytes(work.size - 20)
    began_s = time.monotonic()
    for number in range(work.messages):
        if work.per_s:
            time.sleep(max(0.0, began_s + number / work.per_s - time.monotonic()))
            yield b"%020d" % time.monotonic_ns() + rest
        else:
            yield b"%020d" % number + rest


def plain(work: Work) -> Spent:
    """`confluent_kafka.Producer`, idempotent, with the settings of ours and a report of each message."""
    refused: list[str] = []

    def on_delivery(error: Any, _: object) -> None:  # noqa: ANN401  # a KafkaError or None
        if error is not None:
            refused.append(error.str())

    producer = Producer(
        {
            "bootstrap.servers": work.bootstrap_servers, "enable.idempotence": True, "acks": "all", "linger.ms": 5,
            "partitioner": "murmur2_random",
        }
    )  # fmt: skip
    producer.list_topics(work.topic, timeout=30)
    began = Spent.now()
    for number, value in enumerate(values(work)):
        while True:
            try:
                producer.produce(work.topic, value, on_delivery=on_delivery)
                break
            except BufferError:
                producer.poll(0.05)
        if number % 100 == 0 or work.per_s:
            producer.poll(0)
    producer.flush()
    if refused:
        raise RuntimeError(refused[0])
    return Spent.now().since(began)


def ours(work: Work) -> Spent:
    """`QueueProducer` without an id."""
    with QueueProducer(work.topic, bootstrap_servers=work.bootstrap_servers) as producer:
        began = Spent.now()
        for value in values(work):
            producer.send(value)
        producer.flush(120)
        return Spent.now().since(began)


def resuming(work: Work) -> Spent:
    """`ResumingProducer`, committed every 100 ms."""
    with ResumingProducer(work.topic, "bench", bootstrap_servers=work.bootstrap_servers) as producer:
        began = Spent.now()
        commit_at_s = time.monotonic() + COMMIT_EVERY_S
        for number, value in enumerate(values(work), 1):
            producer.send(value)
            if (number % 100 == 0 or work.per_s) and time.monotonic() >= commit_at_s:
                producer.commit(number)
                commit_at_s = time.monotonic() + COMMIT_EVERY_S
        producer.commit(work.messages)
        return Spent.now().since(began)


SENDERS: dict[str, Callable[[Work], Spent]] = {"plain": plain, "ours": ours, "resuming": resuming}


if __name__ == "__main__":
    # All alike: what was imported is no garbage.
    gc.collect()
    gc.freeze()
    sys.stdout.write(json.dumps(SENDERS[sys.argv[1]](Work(**json.loads(sys.argv[2])))) + "\n")
