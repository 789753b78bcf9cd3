"""
Measure what poison costs the good messages: their rate with a fifth of all messages failing every time, and without.

`raises`: the handler raises after its work. `silent`: it gets no ack, release or reject, so its lease runs out; it
becomes a suspect and is handed out alone. `fine`: the same stream with nothing wrong with any of it. All have a
tracker, eight handler threads and 4 ms of work a message.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from bench.stage import wait_until
from kmq_spark import QueueConsumer, QueueProducer

if TYPE_CHECKING:
    from bench.stage import Bench
    from kmq_spark import Message

WORK_S = 0.004
LEASE_MS = 2_000
KINDS = ("fine", "raises", "silent")


def measure(bench: Bench, good: int, kind: str) -> float:
    """Return good messages by second with this kind of others among them."""
    queue = bench.queue(f"poison-{kind}-{good}")
    with QueueProducer(queue.queue, bootstrap_servers=bench.broker.bootstrap_servers) as producer:
        for number in range(good):
            producer.send(b"good")
            if number % 4 == 0:
                producer.send(b"poison")
    done: list[float] = []

    def handle(message: Message) -> None:
        time.sleep(WORK_S)
        if message.value == b"poison":
            message_fails(message)
        else:
            done.append(time.monotonic())

    def message_fails(message: Message) -> None:
        if kind == "raises":
            raise PoisonError
        if kind == "fine":
            return
        # As a handler that lost its place: it returns, and its message stays as it is.
        message._lease.held.discard(message._offset)  # noqa: SLF001  # there is no call for saying nothing

    with bench.tracking(queue, max_deliveries=5):
        consumer = QueueConsumer(
            queue.queue, bootstrap_servers=bench.broker.bootstrap_servers, lease=LEASE_MS / 1000, max_in_flight=2_000
        )
        worker = threading.Thread(target=consumer.run, args=(handle,), kwargs={"concurrency": 8})
        worker.start()
        wait_until("the good messages", lambda: len(done) >= good, 600)
        consumer.stop()
        worker.join()
    return good / (done[-1] - done[0])


class PoisonError(Exception):
    """What a handler raises on poison."""


def measure_all(bench: Bench, good: int) -> dict[str, Any]:
    """Measure all kinds, interleaved twice, and return the rates and their ratios."""
    rates = {kind: [measure(bench, good + number, kind) for number in range(2)] for kind in KINDS}
    best = {kind: round(max(found)) for kind, found in rates.items()}
    return {
        "per_s": best,
        "ratios_to_the_same_stream": {kind: round(best[kind] / best["fine"], 2) for kind in ("raises", "silent")},
    }
