"""
Pass messages from the receiving thread to handler threads, without one lock per message.

Rule 1: a batch is added under the lock. A message is taken with one atomic `deque.popleft`.
Rule 2: a handler thread takes one message at a time, so that a slow handler delays no other message.
Rule 3: the number of waiting messages follows the handlers' rate while they have work. Time in which they wait for
messages, as for the START of the next batch, says nothing about the handlers.

Source: `queue.SimpleQueue` needs one lock per message; at 1 M messages/s that takes most of the available time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


Item = TypeVar("Item")
"""A message, or a batch."""

WINDOW_S = 0.1
"""Waiting work in seconds, at the handlers' rate: many broker round trips, but too short for a person to notice."""

MEASURE_INTERVAL_S = 0.02
"""Shortest time of work over which the handlers' rate is measured."""


class HandlerQueue(Generic[Item]):
    """
    Queue of messages, or of batches, that wait for a handler thread.

    Args:
        clock: Returns monotonic seconds.

    Attributes:
        pop: Return the next message, or raise IndexError if none waits. Cheaper than `take`, because it never waits.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start open and empty."""
        self._clock = clock
        self._busy_s = 0.0
        self._busy_since: float | None = None
        self._ready: deque[Item] = deque()
        self.pop = self._ready.popleft
        self._changed = threading.Condition()
        self._is_closed = False
        self._put_count = 0
        self._is_empty = threading.Event()

    def __len__(self) -> int:
        """Return how many messages wait."""
        return len(self._ready)

    @property
    def taken_count(self) -> int:
        """Count of messages taken so far."""
        return self._put_count - len(self._ready)

    def busy_s(self) -> float:
        """Return for how long the handlers have had work, seconds: from a `put` until a thread finds no message."""
        with self._changed:
            return self._busy_s + self._current_stretch_s()

    def put(self, items: Sequence[Item]) -> None:
        """Add items and wake one handler thread for each."""
        with self._changed:
            if self._busy_since is None and items:
                self._busy_since = self._clock()
            self._put_count += len(items)
            self._is_empty.clear()
            self._ready.extend(items)
            self._changed.notify(len(items))

    def take(self) -> Item | None:
        """Return the next message; wait for one if needed. Return None after `close`."""
        while True:
            try:
                return self._ready.popleft()
            except IndexError:
                pass
            with self._changed:
                # Checked again under the lock: otherwise a batch added in between would not end this wait.
                if not self._ready:
                    self._busy_s += self._current_stretch_s()
                    self._busy_since = None
                    self._is_empty.set()
                while not self._ready:
                    if self._is_closed:
                        return None
                    self._changed.wait()

    def wait_until_empty(self, timeout: float) -> None:
        """Wait until a handler thread finds no message, at most *timeout* seconds."""
        self._is_empty.wait(timeout)

    def close(self) -> list[Item]:
        """Wake every waiting thread, and return the messages that no thread has taken."""
        with self._changed:
            self._is_closed = True
            left: list[Item] = []
            while self._ready:
                try:
                    left.append(self._ready.popleft())
                except IndexError:
                    break  # a handler thread took the last message at the same time
            self._changed.notify_all()
        return left

    def _current_stretch_s(self) -> float:
        return 0.0 if self._busy_since is None else self._clock() - self._busy_since


class Window:
    """
    Number of messages that may wait for a handler thread: the number that the handlers take in `WINDOW_S`.

    No other consumer can process a message that waits here, so slow handlers get a small window. Fast handlers need a
    large window, because the next START takes a round trip to the broker. The window grows by itself, however long the
    round trip is: each window that the handlers empty at once lets the next one be up to five times as large.

    Args:
        min_size: Smallest window: one message per handler thread.
        max_size: Largest window.
    """

    def __init__(self, min_size: int, max_size: int) -> None:
        """Start with the smallest window."""
        self._min_size = min(min_size, max_size)
        self._max_size = max_size
        self._busy_s = 0.0
        self._taken_count = 0
        self.size = self._min_size

    def measure(self, busy_s: float, taken_count: int) -> None:
        """
        Measure the handlers' rate and set `size`.

        Args:
            busy_s: For how long the handlers have had work since the start, seconds.
            taken_count: Count of messages taken since the start.
        """
        passed_s, taken = busy_s - self._busy_s, taken_count - self._taken_count
        rate = taken / max(passed_s, MEASURE_INTERVAL_S)
        size = max(self._min_size, min(self._max_size, round(rate * WINDOW_S)))
        if passed_s < MEASURE_INTERVAL_S:
            # Too short to show that the handlers are slow.
            self.size = max(self.size, size)
            return
        self.size = size
        self._busy_s, self._taken_count = busy_s, taken_count
