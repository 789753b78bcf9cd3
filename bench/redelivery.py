"""
Measure the sender alone: decisions in, committed copies out; without Spark.

    .venv/bin/python -m bench.redelivery [messages, default 400000] [in a run, default 500] [bytes, default 200]

Reported: copies a second, and the CPU time of this process and of the broker for each, microseconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from confluent_kafka import Producer

from bench.stage import MESSAGE_BYTES, PARTITIONS, PER_MARKER
from kmq_spark.core.decisions import DECISION_DTYPES, Decisions
from kmq_spark.core.outcome import PartitionOutcome
from kmq_spark.core.state import Status
from kmq_spark.kafka.topics import create_queue
from kmq_spark.local.broker import EmbeddedBroker
from kmq_spark.tracker.sender.redelivery import RedeliverySender

PER_BATCH = 100_000
"""Messages that one batch of the tracker decides."""


def measure(broker: EmbeddedBroker, count: int, per_run: int, size: int) -> dict[str, Any]:
    """Return the figures of one run."""
    layout = create_queue("redelivery", bootstrap_servers=broker.bootstrap_servers, partitions=PARTITIONS)
    _send(broker.bootstrap_servers, layout.topics.queue_topic, count, size)
    sender = RedeliverySender(layout, bootstrap_servers=broker.bootstrap_servers)
    sender.open()
    each = PER_BATCH // PARTITIONS
    sender.deliver([_decided(partition, 0, each, per_run) for partition in range(PARTITIONS)])  # warm
    began_s, own_s, broker_s = time.monotonic(), time.process_time(), _cpu_s(broker)
    sent = 0
    for first in range(each, count // PARTITIONS, each):
        batch = [_decided(partition, first, each, per_run) for partition in range(PARTITIONS)]
        sent += sender.deliver(batch).redelivered
    took_s, own_s, broker_s = time.monotonic() - began_s, time.process_time() - own_s, _cpu_s(broker) - broker_s
    sender.close()
    return {
        "messages": sent, "per_run": per_run, "bytes": size, "per_s": round(sent / took_s),
        "driver_us": round(own_s / sent * 1e6, 2), "broker_us": round(broker_s / sent * 1e6, 2),
    }  # fmt: skip


def _send(bootstrap_servers: str, topic: str, count: int, size: int) -> None:
    """Send messages, evenly over the partitions."""
    producer = Producer({"bootstrap.servers": bootstrap_servers, "linger.ms": 20, "enable.idempotence": True})
    for number in range(count):
        while True:
            try:
                producer.produce(topic, bytes(size), partition=number % PARTITIONS)
                break
            except BufferError:
                producer.poll(0.1)
    producer.flush()


def _decided(partition: int, first: int, count: int, per_run: int) -> PartitionOutcome:
    """Return redeliveries of neighbouring messages, in runs."""
    offsets = np.arange(first, first + count, per_run)
    columns: dict[str, Any] = {name: np.zeros(len(offsets)) for name in DECISION_DTYPES}
    columns |= {
        "queue_partition": np.full(len(offsets), partition), "message_offset": offsets,
        "message_count": np.minimum(per_run, first + count - offsets), "action": np.ones(len(offsets)),
        "delivery_count": np.ones(len(offsets)), "is_silent": np.ones(len(offsets)),
        "deadline_at_ms": np.full(len(offsets), int(time.time() * 1000)),
    }  # fmt: skip
    status = Status(first + count, 0, 0, 0, None, {})
    return PartitionOutcome(partition, status, Decisions.from_columns(columns, [""] * len(offsets)))


def _cpu_s(broker: EmbeddedBroker) -> float:
    """Return the CPU seconds that the broker has used, Linux only."""
    fields = Path(f"/proc/{broker.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(count: int = 400_000, per_run: int = PER_MARKER, size: int = MESSAGE_BYTES) -> dict[str, Any]:
    """Measure once."""
    with EmbeddedBroker() as broker:
        return measure(broker, count, per_run, size)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*map(int, sys.argv[1:]))) + "\n")
