"""
Measure producers beside each other, in one run, interleaved: plain idempotent, ours, ours with a producer id.

Messages a second: from the first send until all are durable, or committed. Latency: from `send` until a reader of
committed records has the message, at a steady rate. CPU: of the producer's process, which other work on the machine
changes less than its rate. Each producer is a process of its own, on a topic of its own.
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
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from bench.sender import Spent
from kmq_spark.kafka.topics import create_queue_topics
from kmq_spark.local.broker import EmbeddedBroker

if TYPE_CHECKING:
    from collections.abc import Sequence

KINDS = ("plain", "ours", "resuming")
PARTITIONS = 4
MAX_MESSAGES = 1_000_000
LATENCY_SIZE = 200
WARM_UP_SHARE = 0.2
"""Of the messages of a latency run that do not count: connections are made and code is compiled in them."""

_numbers = itertools.count()


def measure(
    broker: EmbeddedBroker, *, rounds: int, sizes: Sequence[int], mib: int, per_s: int = 1_000, seconds: int = 10
) -> dict[str, Any]:
    """Return the rates by size, their ratios to plain, and the latencies."""
    cases = []
    for size in sizes:
        count = min(MAX_MESSAGES, mib * 2**20 // size)
        rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
        cpu_us: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(rounds + 1):
            for kind in KINDS:
                spent = _send(broker, kind, count, size)
                if number:  # the first round warms the broker up
                    rates[kind].append(count / spent.seconds)
                    cpu_us[kind].append(1e6 * spent.cpu_s / count)
        medians = {kind: round(statistics.median(found)) for kind, found in rates.items()}
        cpu = {kind: round(statistics.median(found), 2) for kind, found in cpu_us.items()}
        _say(f"{size} B, messages a second", medians)
        _say(f"{size} B, CPU in microseconds a message", cpu)
        cases.append(
            {
                "bytes": size, "messages": count, "per_s": medians, "cpu_us": cpu,
                # Round by round, then the median: what else the machine does meanwhile is in both.
                "vs_plain": {
                    kind: round(
                        statistics.median(own / base for own, base in zip(rates[kind], rates["plain"], strict=True)), 2
                    )
                    for kind in KINDS[1:]
                },
            }
        )  # fmt: skip
    return {
        "throughput": cases,
        "latency": {
            "per_s": per_s, "ms": {kind: _latency(broker, kind, per_s, seconds) for kind in KINDS},
        },
    }  # fmt: skip


def _queue(broker: EmbeddedBroker, kind: str) -> str:
    name = f"producers-{kind}-{next(_numbers)}"
    create_queue_topics(name, bootstrap_servers=broker.bootstrap_servers, partitions=PARTITIONS)
    return name


def _start(broker: EmbeddedBroker, kind: str, **work: Any) -> subprocess.Popen[bytes]:  # of Work
    work["bootstrap_servers"] = broker.bootstrap_servers
    return subprocess.Popen([sys.executable, "-m", "bench.sender", kind, json.dumps(work)], stdout=subprocess.PIPE)


def _send(broker: EmbeddedBroker, kind: str, count: int, size: int) -> Spent:
    """Return what one producer spent."""
    topic = _queue(broker, kind)
    output, _ = _start(broker, kind, topic=topic, messages=count, size=size).communicate()
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    # Payloads of a whole run would fill a disk.
    for future in admin.delete_topics([topic]).values():
        future.result(30)
    return Spent(*json.loads(output))


def _latency(broker: EmbeddedBroker, kind: str, per_s: int, seconds: int) -> dict[str, float]:
    """Return percentiles of the time from `send` to a reader of committed records, milliseconds."""
    topic, count = _queue(broker, kind), per_s * seconds
    reader = Consumer(
        {
            "bootstrap.servers": broker.bootstrap_servers, "group.id": "bench", "fetch.wait.max.ms": 10,
            "isolation.level": "read_committed", "enable.auto.commit": False,
        }
    )  # fmt: skip
    reader.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
    sender = _start(broker, kind, topic=topic, messages=count, size=LATENCY_SIZE, per_s=per_s)
    found: list[float] = []
    until_s = time.monotonic() + seconds + 60
    while len(found) < count and time.monotonic() < until_s:
        record = reader.poll(1.0)
        if record is not None and record.error() is None:
            sent_ns = int((record.value() or b"")[:20])
            found.append((time.monotonic_ns() - sent_ns) / 1e6)
    reader.close()
    sender.communicate()
    if len(found) < count:
        message = f"{kind}: {len(found)} of {count} messages arrived"
        raise RuntimeError(message)
    counted = found[round(count * WARM_UP_SHARE) :]
    result = {f"p{share}": round(float(np.percentile(counted, share)), 1) for share in (50, 95, 99)}
    _say(f"latency of {kind}", result)
    return result


def _say(what: str, values: dict[str, Any]) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')}  {what}: {values}\n")
