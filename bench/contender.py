"""
One consumer of the throughput benchmark, in a process of its own: `python -m bench.contender KIND {settings as JSON}`.

It reads a topic to its end, alone or with others, and prints when it had the first and when the last message was done
with, how many, and the CPU that this process used for it. Each contender looks at every value, so that all pay for the
same decoding.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from confluent_kafka import Consumer, ShareConsumer

from kmq_spark import QueueConsumer
from kmq_spark.local.jars import jar_paths
from kmq_spark.local.java import find_java

if TYPE_CHECKING:
    from collections.abc import Callable

    from kmq_spark import Message

QUIET_S = 0.5
"""
When as many were read as there are, a contender goes on until it got nothing for so long: some may have been read
twice, when its processes joined their group.
"""

STALLED_S = 30.0
"""A contender gives up that got nothing for so long, and had not all."""

BATCH = 2_000


class Work(NamedTuple):
    """The task of a contender."""

    bootstrap_servers: str
    topic: str
    group: str
    messages: int = 0
    """All that there are, for all its processes together."""
    board: str = ""
    """File with one count of messages for each process, 64 bits: so each knows what all have read."""
    place: int = 0
    """Of this process on the board."""


class Tally:
    """Counts messages and bytes, and knows when the first and the last came."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._counts = np.memmap(work.board, np.int64, "r+")
        self.messages = self.bytes = 0
        self.first_s = self.last_s = 0.0
        self._began_s = time.monotonic()

    def add(self, messages: int, size: int) -> None:
        """Count a batch that is done with."""
        self.last_s = time.monotonic()
        self.first_s = self.first_s or self.last_s
        self.messages += messages
        self.bytes += size
        self._counts[self._work.place] = self.messages

    def begin(self) -> None:
        """Note that the first batch came, before it is worked on."""
        self.first_s = self.first_s or time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether all is done, by whichever process, or nothing came for a while."""
        now = time.monotonic()
        if self._counts.sum() >= self._work.messages:
            return now - self.last_s >= QUIET_S
        return now - max(self.last_s, self._began_s) > STALLED_S


def of_group(work: Work) -> dict[str, Any]:
    """Return the settings of a plain consumer, tuned as ours is."""
    return {
        "bootstrap.servers": work.bootstrap_servers, "group.id": work.group, "auto.offset.reset": "earliest",
        "fetch.queue.backoff.ms": 2, "fetch.wait.max.ms": 10, "queued.max.messages.kbytes": 4_096,
        "fetch.message.max.bytes": 4_194_304,
    }  # fmt: skip


def of_share_group(work: Work) -> dict[str, Any]:
    """Return the settings of a share consumer that acknowledges explicitly; it allows fewer than a plain one."""
    return {
        "bootstrap.servers": work.bootstrap_servers, "group.id": work.group,
        "share.acknowledgement.mode": "explicit", "fetch.wait.max.ms": 10,
    }  # fmt: skip


def read_from_the_beginning(bootstrap_servers: str, group: str) -> None:
    """
    Let a share group begin at the beginning of its topic.

    By default it begins at the end, and the setting belongs to the group (KIP-932); librdkafka's admin client has no
    such resource type yet, so Kafka's own command sets it, from the broker's locked jars.
    """
    command = [
        *(str(find_java()), "-Xmx128m", "-cp", os.pathsep.join(map(str, jar_paths("broker")))),
        *("kafka.admin.ConfigCommand", "--bootstrap-server", bootstrap_servers, "--alter"),
        *("--entity-type", "groups", "--entity-name", group, "--add-config", "share.auto.offset.reset=earliest"),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def plain(work: Work, tally: Tally) -> None:
    """`confluent_kafka.Consumer.consume`, positions committed in the background."""
    consumer = Consumer(of_group(work))
    consumer.subscribe([work.topic])
    while not tally.is_over:
        messages = consumer.consume(1, 0.2)
        if not messages:
            continue
        tally.begin()
        messages += consumer.consume(BATCH - 1, 0)
        tally.add(len(messages), sum([len(message.value() or b"") for message in messages]))
    consumer.close()


def share(work: Work, tally: Tally) -> None:
    """Kafka's own share group, each message acknowledged explicitly."""
    consumer = ShareConsumer(of_share_group(work))
    consumer.subscribe([work.topic])
    while not tally.is_over:
        messages = [message for message in consumer.poll(0.2) if message.error() is None]
        if not messages:
            continue
        tally.begin()
        size = 0
        for message in messages:
            size += len(message.value() or b"")
            consumer.acknowledge(message)
        consumer.commit_async()
        tally.add(len(messages), size)
    consumer.commit_sync()
    consumer.close()


def ack(work: Work, tally: Tally) -> None:
    """Our consumer: `receive`, one `ack()` a message; START durable before, every END at last."""
    with _ours(work) as consumer:
        while not tally.is_over:
            messages = consumer.receive(BATCH, timeout=0.2)
            if not messages:
                continue
            tally.begin()
            size = 0
            for message in messages:
                size += len(message.value or b"")
                message.ack()
            tally.add(len(messages), size)
        began_s = time.monotonic()
        consumer.flush()
        tally.last_s += time.monotonic() - began_s


def batch(work: Work, tally: Tally) -> None:
    """Our consumer: `receive_batch`, the values of a batch, and one `ack()` a batch."""
    with _ours(work) as consumer:
        while not tally.is_over:
            messages = consumer.receive_batch(BATCH, timeout=0.2)
            if not messages:
                continue
            tally.begin()
            size = sum([len(value or b"") for value in messages.values()])
            messages.ack()
            tally.add(len(messages), size)
        began_s = time.monotonic()
        consumer.flush()
        tally.last_s += time.monotonic() - began_s


def run(work: Work, tally: Tally) -> None:
    """Our consumer: `run(handler)` with one handler thread."""
    sizes: list[int] = []

    def handler(message: Message) -> None:
        sizes.append(len(message.value or b""))

    def watch() -> None:
        seen = 0
        while not tally.is_over:
            time.sleep(0.01)
            count = len(sizes)  # once: the handler's thread keeps appending
            if count > seen:
                tally.begin()
                tally.add(count - seen, 0)
                seen = count
        consumer.stop()

    consumer = _ours(work)
    threading.Thread(target=watch).start()
    consumer.run(handler, concurrency=1)
    tally.bytes = sum(sizes)


def _ours(work: Work) -> QueueConsumer:
    return QueueConsumer(work.topic, bootstrap_servers=work.bootstrap_servers, max_in_flight=100_000)


CONTENDERS: dict[str, Callable[[Work, Tally], None]] = {
    "plain": plain, "share": share, "ack": ack, "batch": batch, "run": run
}  # fmt: skip


def main(kind: str, text: str) -> None:
    """Run one contender and print what it did as one JSON line."""
    values: dict[str, Any] = json.loads(text)
    # All alike, and as docs/performance.md advises: what was imported, and messages that live shortly, are no garbage.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
    work = Work(**values)
    tally = Tally(work)
    # Not from the start of the process: what Python imports has nothing to do with the number of messages.
    began_s = time.process_time()
    CONTENDERS[kind](work, tally)
    result = {
        "messages": tally.messages, "bytes": tally.bytes, "first_s": tally.first_s, "last_s": tally.last_s,
        "cpu_s": time.process_time() - began_s,
    }  # fmt: skip
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
