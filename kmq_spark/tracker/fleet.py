"""
Run one process of a tracker fleet: track the queues that the fleet's group assigns to it, and stand by for the others.

Rule 1: coordination decides which process starts a tracker. Exactly once rests on the fencing of the tracker's
transactional producer alone: two trackers of one queue at a time send nothing twice.
Rule 2: a tracker is not stopped because its claim is over: if no process can reach the coordination topic, all go on
with what they track, and a process that takes a queue over fences its former tracker.
Rule 3: a queue that goes to another process is handed over: its claim is released, and its tracker goes on until the
successor fences it or is ready. So redelivery is away only while the successor's query starts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from kmq_spark.config import TRACKED_NAME_PATTERN
from kmq_spark.coordination.coordinator import Coordinator
from kmq_spark.coordination.topic import create_coordination_topic
from kmq_spark.core.coordination.records import fleet_group
from kmq_spark.errors import FencedError, KafkaClientError, KmqError
from kmq_spark.pauses import RateLimit, retry_pause_s

if TYPE_CHECKING:
    from collections.abc import Callable

    from kmq_spark.config import Settings
    from kmq_spark.coordination.claim import Claim
    from kmq_spark.coordination.coordinator import GroupView

logger = logging.getLogger(__name__)

STARTING_S = 10.0
"""Longest time for which other trackers give way to one that starts, and the next hand-over waits for it, seconds."""

GIVE_WAY_S = 1.5
"""Longest pause after a batch of a tracker while another one of its process starts, seconds."""

HAND_OVER_S = 15.0
"""Longest time that a tracker goes on after a hand-over, and that one which was stopped may take to end, seconds."""

DRAIN_HAND_OVERS_S = 12.0
"""Time in which a process that ends hands all its queues over, seconds."""

DRAIN_S = 18.0
"""
How long a stop waits for successors and then for the trackers, seconds. With what the process closes after that it
stays below Kubernetes' grace period of 30 s, also while the broker is away.
"""

LEAST_END_S = 3.0
"""How long a stop waits for the trackers at least, seconds. One that has not ended is left behind: it loses nothing."""

JOIN_S = 75.0
"""
Longest time to join, seconds. Where all members died and retention removed their records, the group's world is known
after 65 s of silence.
"""

FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 30.0
FENCED_RETRY_S = 10.0
"""Pause before a tracker is started again that was fenced from outside the fleet, seconds."""

_LOOK_S = 0.05
_CHECK_S = 1.0
_WARN_INTERVAL_S = 10.0
_IS_QUEUE = re.compile(TRACKED_NAME_PATTERN)


class FleetTracker(Protocol):
    """The part of a tracker that the fleet uses; see `QueueTracker`."""

    gives_way_s: float

    def run(self) -> None:
        """Track until `stop`; raise a `KmqError` where that is not possible."""

    def stop(self) -> None:
        """Request that `run` ends."""

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the markers of before the start are read; return whether they are."""


class _Tracked:
    """A queue that this process tracks: its claim, its tracker, and the thread that runs it."""

    def __init__(self, queue: str, claim: Claim, tracker: FleetTracker) -> None:
        self.queue, self.claim, self.tracker = queue, claim, tracker
        self.error: Exception | None = None
        self.is_ready = False
        self.began_s = time.monotonic()
        self.leaving_since_s: float | None = None
        """When it was handed over or stopped."""
        self._is_released = self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name=f"kmq-tracker-{queue}", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the tracker has not ended."""
        return self._thread.is_alive()

    @property
    def is_starting(self) -> bool:
        """Whether others give way to it: until its first batch, for `STARTING_S` at most."""
        return not self.is_ready and time.monotonic() < self.began_s + STARTING_S

    @property
    def left_for_s(self) -> float:
        """Time since the hand-over or the stop, seconds; 0 before."""
        return 0.0 if self.leaving_since_s is None else time.monotonic() - self.leaving_since_s

    def is_succeeded(self, view: GroupView) -> bool:
        """Return whether the log shows that a later tracker of the queue is ready: `TrackerFleet._report_ready`."""
        claim = view.resources.get(self.queue)
        return claim is not None and claim.position is not None and claim.position > self.claim.epoch

    def hand_over(self, successor: str) -> None:
        """Release the claim; the tracker goes on."""
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


class TrackerFleet:
    """One process of a fleet."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        make_tracker: Callable[[str], FleetTracker],
        *,
        check_engine: Callable[[], None] = lambda: None,
        version: str = "",
        on_event: Callable[[str, str], None] = lambda _kind, _queue: None,
    ) -> None:
        self.name = name
        self._settings, self._make_tracker = settings, make_tracker
        self._check_engine, self._on_event = check_engine, on_event
        self._running: dict[str, _Tracked] = {}
        self._not_before_s: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._foreign: set[str] = set()
        self._stopping = threading.Event()
        self._handed_over: _Tracked | None = None
        self._next_hand_over_s = STARTING_S
        self._checked_s = self._ends_by_s = float("-inf")
        self._can_leave = True
        self._warning_limit = RateLimit(_WARN_INTERVAL_S)
        tracker = settings.tracker
        self._coordinator = Coordinator(
            fleet_group(name),
            client_id=tracker.fleet_member,
            heartbeat=tracker.fleet_heartbeat,
            metadata=json.dumps(_metadata(version)).encode(),
            topic=tracker.coordination_topic,
            **settings.kafka.reach(),
        )

    @property
    def member(self) -> str:
        """Client id of this process in the fleet."""
        return self._coordinator.client_id

    def view(self) -> GroupView:
        """Return the fleet's group; see `Coordinator.view`."""
        return self._coordinator.view()

    def stop(self) -> None:
        """Request that every queue is handed over and `run` ends; safe to call in a signal handler."""
        self._stopping.set()

    def run(self) -> None:
        """Track what is assigned to this process until `stop`."""
        if self._stopping.is_set():
            return
        tracker, reach = self._settings.tracker, self._settings.kafka.reach()
        create_coordination_topic(topic=tracker.coordination_topic, **reach)
        # A former process of this name is a member until 2T have passed.
        self._coordinator.join(JOIN_S + 3 * tracker.fleet_heartbeat)
        try:
            known = self.view().tasks
            for queue in tracker.queues:
                if queue not in known:
                    self._coordinator.add_task(queue)
            logger.info(
                "%s joined fleet %s with %d members", self.member, self.name, len(self.view().members),
                extra={"action": "fleet_joined"},
            )  # fmt: skip
            self._on_event("joined", "")
            while not self._stopping.wait(_LOOK_S):
                self._turn()
            self._drain()
        finally:
            self._end_all()
            self._coordinator.close(leave=self._can_leave)

    def _turn(self, *, is_draining: bool = False) -> None:
        """Start and stop trackers as the log wants it."""
        if (failure := self._coordinator.failure) is not None:
            raise failure
        if time.monotonic() - self._checked_s > _CHECK_S:
            self._checked_s = time.monotonic()
            try:
                self._check_engine()
            except KmqError:
                # Leave before the trackers have ended, so that the others take the queues over at once: they fence what
                # is still open.
                self._coordinator.close()
                raise
        view = self.view()
        for tracked in list(self._running.values()):
            if tracked.is_running:
                self._follow(tracked, view, is_draining=is_draining)
            self._look_after(tracked)
        if not is_draining:
            self._begin_assigned()
        # A start needs the processor more than batches do.
        is_one_starting = any(tracked.is_starting for tracked in self._running.values())
        for tracked in self._running.values():
            tracked.tracker.gives_way_s = GIVE_WAY_S if is_one_starting else 0.0

    def _follow(self, tracked: _Tracked, view: GroupView, *, is_draining: bool) -> None:
        """Hand a queue over, or stop its tracker, where the log wants it."""
        task, holder = view.tasks.get(tracked.queue), view.holder(tracked.queue)
        if task is None:
            tracked.stop("the queue was removed from the fleet")
        elif view.paused_until_ms:
            tracked.stop("the fleet is paused")
        elif task.client_id not in {"", self.member}:
            # Where the claim is over already, the successor does not wait either.
            if tracked.leaving_since_s is None and (self._is_turn(view) or not tracked.claim.is_held):
                self._handed_over = tracked
                tracked.hand_over(task.client_id)
            elif tracked.leaving_since_s is not None and tracked.is_succeeded(view):
                tracked.stop("its successor is ready")
        elif is_draining and not task.client_id:
            tracked.stop("this process ends and no other one is there")
        elif holder not in {"", self.member}:
            tracked.stop(f"{holder} holds the queue")
        elif tracked.leaving_since_s is not None:
            tracked.stop("it comes back to this process, which starts it again")

    def _is_turn(self, view: GroupView) -> bool:
        """
        Return whether the next queue may be handed over.

        Trackers that start at the same time slow each other, so the new tracker of the last one is waited for.
        """
        last = self._handed_over
        return last is None or last.is_succeeded(view) or last.left_for_s >= self._next_hand_over_s

    def _look_after(self, tracked: _Tracked) -> None:
        """Release the claim of a tracker that has ended, and stop one that no successor has fenced in time."""
        if not tracked.is_running:
            del self._running[tracked.queue]
            tracked.release()
            self._note_end(tracked)
            self._on_event("stopped", tracked.queue)
        elif tracked.left_for_s > HAND_OVER_S:
            tracked.release()
            tracked.stop("no successor has fenced it")

    def _note_end(self, tracked: _Tracked) -> None:
        """Log why a tracker has ended, and set when it may be started again here."""
        queue, error = tracked.queue, tracked.error
        if error is None or tracked.leaving_since_s is not None:
            self._failures.pop(queue, None)
            logger.info("tracker of %s ended", queue, extra={"action": "ended", "queue": queue})
            return
        failures = self._failures[queue] = self._failures.get(queue, 0) + 1
        pause_s = retry_pause_s(failures, FIRST_RETRY_S, LONGEST_RETRY_S)
        if isinstance(error, FencedError):
            pause_s = FENCED_RETRY_S
        self._not_before_s[queue] = time.monotonic() + pause_s
        is_known = isinstance(error, KmqError)
        logger.error(
            "tracker of %s failed; it is started again in %g s if the queue is still assigned to %s: %s",
            queue, pause_s, self.member, error if is_known else repr(error), exc_info=None if is_known else error,
            extra={"action": "restart", "queue": queue},
        )  # fmt: skip

    def _begin_assigned(self) -> None:
        """Claim what is assigned to this process, and start its tracker."""
        assigned = self._coordinator.assigned
        # A queue that went elsewhere and comes back does not wait for what happened before.
        self._not_before_s = {queue: at_s for queue, at_s in self._not_before_s.items() if queue in assigned}
        for queue in assigned:
            tracked = self._running.get(queue)
            is_waiting = time.monotonic() < self._not_before_s.get(queue, 0.0)
            if not self._is_queue(queue) or is_waiting:
                continue
            if tracked is not None and (tracked.leaving_since_s is not None or tracked.claim.is_held):
                continue
            try:
                # None while its last owner holds it.
                claim = self._coordinator.claim(queue)
            except KafkaClientError as error:
                self._warn(error)
                return
            if claim is None:
                continue
            if tracked is not None:
                # The claim had lapsed while this process could not read the log, and no other process took the queue.
                tracked.claim = claim
                continue
            self._begin(queue, claim)

    def _begin(self, queue: str, claim: Claim) -> None:
        logger.info(
            "starting the tracker of %s, epoch %d", queue, claim.epoch,
            extra={"action": "fleet_takes", "queue": queue, "epoch": claim.epoch},
        )  # fmt: skip
        tracked = self._running[queue] = _Tracked(queue, claim, self._make_tracker(queue))
        self._on_event("tracking", queue)
        threading.Thread(target=self._report_ready, args=(tracked,), name=f"kmq-ready-{queue}", daemon=True).start()

    def _report_ready(self, tracked: _Tracked) -> None:
        """Wait until a tracker is ready, and show it in the log: the queue's position is the epoch of its claim."""
        while tracked.is_running and not tracked.tracker.wait_ready(1.0):
            pass
        if not tracked.is_running:
            return
        tracked.is_ready = True
        self._failures.pop(tracked.queue, None)
        self._on_event("ready", tracked.queue)
        claim = tracked.claim
        # If this fails, the process that handed the queue over waits for longer.
        with contextlib.suppress(KmqError):
            claim.commit(claim.epoch, timeout=self._settings.tracker.fleet_heartbeat)

    def _is_queue(self, name: str) -> bool:
        """Return whether a task is a queue; log once for each that is not, because anybody may add tasks."""
        if _IS_QUEUE.fullmatch(name):
            return True
        if name not in self._foreign:
            self._foreign.add(name)
            logger.warning(
                "task %r of fleet %s is not the name of a queue and is ignored; remove it with "
                "`kmq tracker fleet %s --remove`", name, self.name, self.name, extra={"action": "fleet_foreign_task"},
            )  # fmt: skip
        return False

    def _drain(self) -> None:
        """Hand all queues over to the other members, and wait until these have fenced the trackers here."""
        if not self._running:
            return
        self._ends_by_s = time.monotonic() + DRAIN_S
        self._next_hand_over_s = min(STARTING_S, DRAIN_HAND_OVERS_S / len(self._running))
        try:
            self._coordinator.drain()
            while self._running and time.monotonic() < self._ends_by_s:
                self._turn(is_draining=True)
                time.sleep(_LOOK_S)
        except KmqError as error:
            self._can_leave = False
            logger.warning("cannot hand the queues over: %s", error, extra={"action": "fleet_drain_failed"})

    def _end_all(self) -> None:
        """Stop the trackers that still run, and release their claims."""
        for tracked in self._running.values():
            tracked.stop("this process ends")
        until_s = max(self._ends_by_s, time.monotonic() + LEAST_END_S)
        for tracked in list(self._running.values()):
            tracked.wait(max(0.0, until_s - time.monotonic()))
            if tracked.is_running:
                logger.warning(
                    "the tracker of %s has not ended: it is left as it is; check the broker", tracked.queue,
                    extra={"action": "left_running", "queue": tracked.queue},
                )  # fmt: skip
            else:
                self._look_after(tracked)

    def _warn(self, error: KmqError) -> None:
        if self._warning_limit.allows():
            logger.warning(
                "cannot claim queues of fleet %s, the running trackers go on: %s", self.name, error,
                extra={"action": "fleet_cannot_claim"},
            )  # fmt: skip


def _metadata(version: str) -> dict[str, Any]:
    """Return what `kmq tracker fleet` shows of a process."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "version": version,
        "started_at_ms": int(time.time() * 1000),
    }
