"""
Measure how long a message takes from its `send` to the hands of its consumer, at a steady rate.

One producer process (`QueueProducer`) writes the monotonic time into each value; one consumer process, plain, share or
ours, reads it off its own monotonic clock, which is the same one on one machine. The first third is left out. Ours has
the tracker running beside it, and its START durable before the message is handed out.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from confluent_kafka import Consumer, ShareConsumer

from bench.contender import Work, of_group, of_share_group, read_from_the_beginning
from kmq_spark import QueueConsumer, QueueProducer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench.stage import Bench

KINDS = ("plain", "share", "receive", "run")
OURS = frozenset({"receive", "run"})
LAST = b"last"
_SHARES = {"p50": 50, "p95": 95, "p99": 99, "max": 100}
_numbers = itertools.count()


def measure(bench: Bench, *, rate_per_s: int, seconds: int, rounds: int) -> dict[str, Any]:
    """Return the latencies of each kind of consumer, milliseconds, medians of the rounds."""
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind in KINDS:
            found[kind].append(_one(bench, kind, rate_per_s, seconds))
            sys.stderr.write(f"{time.strftime('%H:%M:%S')}  latency, {kind}: {found[kind][-1]}\n")
    medians = {
        kind: {name: round(statistics.median(each[name] for each in rows), 2) for name in _SHARES}
        for kind, rows in found.items()
    }
    return {"per_s": rate_per_s, "ms": medians}


def _one(bench: Bench, kind: str, rate_per_s: int, seconds: int) -> dict[str, float]:
    queue = bench.queue(f"latency-{kind}-{next(_numbers)}")
    work = {"bootstrap_servers": bench.broker.bootstrap_servers, "topic": queue.queue, "group": f"{queue.queue}-group"}
    if kind == "share":
        read_from_the_beginning(work["bootstrap_servers"], work["group"])
    if kind not in OURS:
        return _latencies(work, kind, rate_per_s, seconds)
    with bench.tracking(queue):
        return _latencies(work, kind, rate_per_s, seconds)


def _latencies(work: dict[str, str], kind: str, rate_per_s: int, seconds: int) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.latency"]
    reader = subprocess.Popen([*command, kind, json.dumps(work)], stdout=subprocess.PIPE)
    sent = {**work, "rate_per_s": rate_per_s, "seconds": seconds}
    subprocess.run([*command, "send", json.dumps(sent)], check=True)
    result: dict[str, float] = json.loads(reader.communicate(timeout=120)[0])
    return result


def _send(work: dict[str, Any]) -> None:
    """Send at a steady rate, one message at a time."""
    time.sleep(5)  # the reader joins its group meanwhile
    with QueueProducer(work["topic"], bootstrap_servers=work["bootstrap_servers"]) as producer:
        began_s = time.monotonic()
        for number in range(work["rate_per_s"] * work["seconds"]):
            pause_s = began_s + number / work["rate_per_s"] - time.monotonic()
            if pause_s > 0:
                time.sleep(pause_s)
            producer.send(f"{time.monotonic_ns():<100}")
        producer.flush()
        for partition in range(4):
            producer.send(LAST, partition=partition)


def _plain(work: Work) -> Iterator[bytes | None]:
    consumer = Consumer(of_group(work))
    consumer.subscribe([work.topic])
    while True:
        for message in consumer.consume(1, 0.5) + consumer.consume(500, 0):
            yield message.value()


def _share(work: Work) -> Iterator[bytes | None]:
    consumer = ShareConsumer(of_share_group(work))
    consumer.subscribe([work.topic])
    while True:
        messages = [message for message in consumer.poll(0.5) if message.error() is None]
        for message in messages:
            yield message.value()
            consumer.acknowledge(message)
        if messages:
            consumer.commit_async()


def _receive(work: Work) -> Iterator[bytes | None]:
    consumer = QueueConsumer(work.topic, bootstrap_servers=work.bootstrap_servers)
    while True:
        for message in consumer.receive(500, timeout=0.5):
            yield message.value
            message.ack()


def _run(work: Work, note: Callable[[bytes | None], bool]) -> None:
    consumer = QueueConsumer(work.topic, bootstrap_servers=work.bootstrap_servers)
    consumer.run(lambda message: consumer.stop() if note(message.value) else None, concurrency=1)


def _read(kind: str, work: Work) -> dict[str, float]:
    """Read to the end and return the spread of the latencies, milliseconds."""
    taken_ns: list[int] = []

    def note(value: bytes | None) -> bool:
        if value == LAST:
            return True
        taken_ns.append(time.monotonic_ns() - int(value or b"0"))
        return False

    if kind == "run":
        _run(work, note)
    else:
        any(map(note, {"plain": _plain, "share": _share, "receive": _receive}[kind](work)))
    warm = np.array(taken_ns[len(taken_ns) // 3 :]) / 1e6
    return {name: round(float(np.percentile(warm, share)), 2) for name, share in _SHARES.items()}


if __name__ == "__main__":
    kind, settings = sys.argv[1], json.loads(sys.argv[2])
    if kind == "send":
        _send(settings)
    else:
        sys.stdout.write(json.dumps(_read(kind, Work(**settings))) + "\n")
