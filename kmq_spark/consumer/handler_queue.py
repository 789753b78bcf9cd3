"""
Hand messages from the receiving thread to handler threads, without a lock a message.

Rule 1: a batch goes in under the lock; a message comes out by one atomic `deque.popleft`.
Rule 2: a handler thread takes one message at a time, so that a slow one holds up nothing but itself.
Rule 3: how many may wait follows the handlers' rate; no clock is read for it, callers pass *now*.

Source: `queue.SimpleQueue` costs a lock a message, which at 1 M messages/s is most of the time there is.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kmq_spark.consumer.message import Message

WINDOW_S = 0.1
"""How much work may wait, in seconds: many round trips to the broker, and nothing that a person would notice."""

LOOK_S = 0.02
"""Shortest time over which the handlers' rate is measured."""


class HandOver:
    """
    The messages that wait for a handler thread.

    Attributes:
        pop: Returns the next message, or raises IndexError where none waits: `take` without the wait and its costs.
    """

    def __init__(self) -> None:
        """Start open and empty."""
        self._ready: deque[Message] = deque()
        self.pop = self._ready.popleft
        self._changed = threading.Condition()
        self._is_closed = False
        self._put_count = 0
        self._is_dry = threading.Event()

    def __len__(self) -> int:
        """Return how many messages wait."""
        return len(self._ready)

    @property
    def taken_count(self) -> int:
        """How many messages were taken so far."""
        return self._put_count - len(self._ready)

    def put(self, messages: Sequence[Message]) -> None:
        """Add messages and wake as many handler threads."""
        with self._changed:
            self._put_count += len(messages)
            self._is_dry.clear()
            self._ready.extend(messages)
            self._changed.notify(len(messages))

    def take(self) -> Message | None:
        """Return the next message, waiting for one; None once closed."""
        while True:
            try:
                return self._ready.popleft()
            except IndexError:
                self._is_dry.set()
            with self._changed:
                # Looked at again under the lock: a batch that came in between would otherwise wait with us.
                while not self._ready:
                    if self._is_closed:
                        return None
                    self._changed.wait()

    def wait_until_dry(self, timeout: float) -> None:
        """Wait until a handler thread finds nothing to take, at most *timeout* seconds."""
        self._is_dry.wait(timeout)

    def close(self) -> list[Message]:
        """Let every thread go, and return what nobody has taken."""
        with self._changed:
            self._is_closed = True
            left = []
            while self._ready:
                try:
                    left.append(self._ready.popleft())
                except IndexError:
                    break  # a thread took the last one just before it saw the end
            self._changed.notify_all()
        return left


class Window:
    """
    How many messages may wait for a handler thread: what the handlers take in `WINDOW_S`.

    A message that waits here cannot be worked on by another consumer, so slow handlers get a small window; fast ones
    need a large one, since the next START takes a round trip. It grows by itself: a window that is emptied within a
    round trip of 5 ms shows a rate that asks for one twenty times as large.

    Args:
        least: Smallest window: one message a handler thread.
        most: Largest window.
    """

    def __init__(self, least: int, most: int) -> None:
        """Start with the smallest window."""
        self._least = min(least, most)
        self._most = most
        self._looked_at = 0.0
        self._taken_count = 0
        self.size = self._least

    def look(self, now: float, taken_count: int) -> None:
        """
        Measure the handlers' rate.

        Args:
            now: Monotonic seconds.
            taken_count: Messages taken since the start.
        """
        passed = now - self._looked_at
        if passed < LOOK_S:
            return
        rate = (taken_count - self._taken_count) / passed
        self.size = max(self._least, min(self._most, round(rate * WINDOW_S)))
        self._looked_at, self._taken_count = now, taken_count
