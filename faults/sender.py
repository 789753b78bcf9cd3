"""A producer of the campaign: sends messages at a steady rate, and writes down the answer to each."""

from __future__ import annotations

import random
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from faults.events import EventFile
from faults.mix import Asked
from faults.secrets import SECRET
from kmq_spark.errors import KmqError
from kmq_spark.producer.producer import QueueProducer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kmq_spark.core.markers import MessageId

LARGEST_BYTES = 2_000


class Sender(threading.Thread):
    """
    Sends until stopped.

    Args:
        bootstrap_servers: Broker.
        queue: Queue.
        folder: Where its events go.
        rate: Messages a second; 0 for as fast as they go.
        seed: Seed of keys and payloads.
        count: Messages altogether; 0 for no end.
        ttl_s: After which a message is not handed out any more; None for never.
        ask: What each message asks for, see `mix.ask`; nothing by default.
        least_bytes: Smallest size of a payload, bytes.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        queue: str,
        folder: Path,
        *,
        rate: float,
        seed: int,
        count: int = 0,
        ttl_s: float | None = None,
        ask: Callable[[random.Random], Asked] | None = None,
        least_bytes: int = 0,
    ) -> None:
        """Connect; `start` begins to send."""
        super().__init__(name=f"sender-{queue}", daemon=True)
        self._producer = QueueProducer(queue, bootstrap_servers=bootstrap_servers, extra=SECRET)
        self._prefix = f"{queue}-{time.time_ns()}"
        self._events = EventFile(folder, f"sender-{time.time_ns()}")
        self._rate = rate
        self._count = count
        self._ttl_s = ttl_s
        self._ask, self._least_bytes = ask, least_bytes
        self._random = random.Random(seed)  # noqa: S311  # repeatable
        self._stopping = threading.Event()

    def run(self) -> None:
        """Send; called by `start`."""
        number, began = 0, time.monotonic()
        while not self._stopping.is_set() and (not self._count or number < self._count):
            self._send(f"{self._prefix}-{number}", number)
            number += 1
            ahead = number / self._rate - (time.monotonic() - began) if self._rate else 0
            if ahead > 0:
                self._stopping.wait(ahead)
        try:
            self._producer.close()
        except KmqError as error:
            self._events.write("send_incomplete", error=str(error))

    def stop(self) -> None:
        """Stop sending, and wait until everything sent is durable."""
        self._stopping.set()
        self.join()

    def _send(self, name: str, number: int) -> None:
        size = self._least_bytes + self._random.randrange(LARGEST_BYTES)
        value = name.encode() + b"|" + self._random.randbytes(size)
        headers: list[tuple[str, bytes | str | None]] = [
            ("traceparent", f"00-{number:032x}-{number:016x}-01"),
            ("twice", b"1"),
            ("twice", None),
        ]
        asked = Asked({"ttl": self._ttl_s}, {}) if self._ask is None else self._ask(self._random)
        self._events.write("send", id=name, asked=asked.headers)
        self._producer.send(
            value, key=str(number % 97), headers=headers, on_delivery=partial(self._report, name), **asked.options
        )

    def _report(self, name: str, place: MessageId | None, error: KmqError | None) -> None:
        if error is None:
            self._events.write("sent", id=name, place=place)
        else:
            self._events.write("send_failed", id=name, error=str(error))
