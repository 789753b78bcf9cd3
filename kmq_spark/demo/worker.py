"""
A worker process of the demo: an ordinary consumer, without code for being killed.

    python -m kmq_spark.demo.worker RESULTS_FILE BOOTSTRAP_SERVER QUEUE LEASE_MS GROUP_PROTOCOL
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kmq_spark.consumer.consumer import QueueConsumer
from kmq_spark.demo.source_files import count_definitions

if TYPE_CHECKING:
    from kmq_spark.consumer.message import Message

MAX_IN_FLIGHT = 40
"""A small number, so that killing a worker delays only a few files."""

THREADS = 2

NICENESS = 10


def main(results_file: str, bootstrap_servers: str, queue: str, lease_ms: str, group_protocol: str) -> None:
    """Process messages until SIGTERM and write one result a line; an incomplete line has no line break."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    # In production workers run on other machines. Here they share the cores with broker and tracker: lower priority.
    os.nice(NICENESS)
    results = os.open(Path(results_file), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def handle(message: Message) -> None:
        path = (message.key or b"").decode()
        result: dict[str, object] = {"path": path, "delivery": message.delivery_count, "pid": os.getpid()}
        os.write(results, _line({**result, "event": "begun"}))
        try:
            count = count_definitions(message.value or b"")
        except (SyntaxError, ValueError, RecursionError) as error:
            message.reject(f"cannot be parsed: {type(error).__name__}: {error}")
            os.write(results, _line({**result, "event": "rejected"}))
        else:
            os.write(results, _line({**result, "event": "counted", "definitions": count}))

    consumer = QueueConsumer(
        queue,
        bootstrap_servers=bootstrap_servers,
        group_protocol=group_protocol,
        lease_ms=int(lease_ms),
        max_in_flight=MAX_IN_FLIGHT,
    )
    consumer.run(handle, concurrency=THREADS)


def _line(result: dict[str, object]) -> bytes:
    return json.dumps(result).encode() + b"\n"


if __name__ == "__main__":
    main(*sys.argv[1:])
