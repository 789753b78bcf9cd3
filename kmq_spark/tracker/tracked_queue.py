"""
Run the tracker of one queue in a process of a fleet: its claim, its thread, and how it ends.

Rule 1: the claim is released once, and the tracker is asked to end once.
Rule 2: at a hand-over the claim is released first, and the tracker goes on until the successor fences it or is ready.
Rule 3: an error of the tracker ends its thread alone; the fleet decides what follows.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kmq_spark.coordination.claim import Claim

logger = logging.getLogger(__name__)

STARTING_S = 10.0
"""For how long other trackers give way to one that starts, and the next hand-over waits for it, seconds."""

NEXT_START_S = 0.25
"""From the end of a start until the trackers of its process no longer give way, seconds; the next one may begin."""


class FleetTracker(Protocol):
    """
    The part of a tracker that the fleet uses; `QueueTracker` has it.

    Attributes:
        gives_way_s: How long it pauses after each batch, so that another tracker can start sooner, seconds; 0: not.
        is_pausing: Whether it pauses after a batch now.
    """

    gives_way_s: float
    is_pausing: bool

    def run(self) -> None:
        """Track until `stop`; raise a `KmqError` where that is not possible."""

    def stop(self) -> None:
        """Request that `run` ends."""

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the markers of before the start are read; return whether they are."""


class TrackedQueue:
    """
    A queue that this process tracks: its claim, its tracker, and the thread that runs it.

    Args:
        queue: Name of the queue.
        claim: The granted claim; a new one takes its place where it lapsed and no other process took the queue.
        tracker: The tracker.

    Attributes:
        error: With which the tracker ended; None before, and where it ended without one.
        leaving_since_s: When it was handed over or stopped, by the monotonic clock, seconds; None before.
        ready_s: When its first batch was committed, by the monotonic clock, seconds; infinity before.
    """

    def __init__(self, queue: str, claim: Claim, tracker: FleetTracker) -> None:
        """Start the tracker in a thread."""
        self.queue, self.claim, self.tracker = queue, claim, tracker
        self.error: Exception | None = None
        self.leaving_since_s: float | None = None
        self.ready_s = float("inf")
        self._turn_since_s: float | None = None
        self._is_released = self._is_stopping = False
        self._began_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"kmq-tracker-{queue}", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the tracker has not ended."""
        return self._thread.is_alive()

    @property
    def is_starting(self) -> bool:
        """Whether others give way to it: until its first batch, and `NEXT_START_S` more; for `STARTING_S` at most."""
        now_s = time.monotonic()
        return now_s < self.ready_s + NEXT_START_S and now_s < self._began_s + STARTING_S

    @property
    def left_for_s(self) -> float:
        """Time since the hand-over or the stop, seconds; 0 before."""
        return 0.0 if self.leaving_since_s is None else time.monotonic() - self.leaving_since_s

    @property
    def has_turn(self) -> bool:
        """Whether it is handed over as soon as its batch is over."""
        return self._turn_since_s is not None

    def begin_turn(self) -> None:
        """Note that this queue may be handed over; a turn that has begun goes on."""
        if self._turn_since_s is None:
            self._turn_since_s = time.monotonic()

    def end_turn(self) -> None:
        """Note that another queue is handed over first, or that this one stays."""
        self._turn_since_s = None

    def is_batch_over(self, longest_s: float) -> bool:
        """Return whether the batch in which its turn began is over, or was waited for for *longest_s* seconds."""
        if self._turn_since_s is None:
            return False
        return self.tracker.is_pausing or time.monotonic() - self._turn_since_s >= longest_s

    @property
    def is_successor_awaited(self) -> bool:
        """Whether the next hand-over may wait for the successor of this one: for `STARTING_S` after it."""
        return self.left_for_s < STARTING_S

    def hand_over(self, successor: str) -> None:
        """Release the claim; the tracker goes on until the successor fences it or `stop` is called."""
        self.leaving_since_s = time.monotonic()
        logger.info(
            "handing %s over to %s", self.queue, successor,
            extra={"action": "fleet_hands_over", "queue": self.queue},
        )  # fmt: skip
        self.release()

    def stop(self, reason: str) -> None:
        """Ask the tracker to end, once."""
        if not self._is_stopping:
            self._is_stopping = True
            self.leaving_since_s = self.leaving_since_s or time.monotonic()
            logger.info(
                "stopping the tracker of %s: %s", self.queue, reason,
                extra={"action": "fleet_stops", "queue": self.queue},
            )  # fmt: skip
            self.tracker.stop()

    def release(self) -> None:
        """Release the claim, once."""
        if not self._is_released:
            self._is_released = True
            self.claim.release()

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of the tracker."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self.tracker.run()
        except Exception as error:  # noqa: BLE001  # the fleet's thread logs it and decides what follows
            self.error = error
