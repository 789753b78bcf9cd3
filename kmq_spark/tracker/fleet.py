"""
Run one process of a tracker fleet: track the queues that the fleet's group assigns to it, and stand by for the others.

Rule 1: coordination decides which process starts a tracker. Exactly once rests on the fencing of the tracker's
transactional producer alone: two trackers of one queue at a time send nothing twice.
Rule 2: a tracker is started when the queue is assigned to this process and its claim was granted.
Rule 3: a tracker is stopped when the log shows that the queue is removed, paused, or held by a process to which it is
not assigned. It is not stopped because its claim is over: if no process can reach the coordination topic, all go on
with what they track, and a process that takes a queue over fences its former tracker.
Rule 4: a queue that is assigned to another process is handed over: its claim is released, and its tracker goes on until
the successor fences it or is ready. If none does, it is stopped after `HAND_OVER_S`. A tracker that is stopped for
another reason ends before its claim is released; if it hangs, the claim is released after `HAND_OVER_S`.
Rule 5: a process hands its queues over one after the other, because trackers that start at the same time slow each
other: the next one when the log shows that the successor's tracker of the last one is ready, or after `STARTING_S`. A
process that ends waits less where its time is short. Until its turn comes, a queue is tracked as before. A process
shows that its tracker of a queue is ready by the position of the queue, which is then the epoch of its claim.
Rule 6: a queue is handed over after a batch of its tracker, not during one, and the tracker then gives way to its
successor: this one would fence it in the next batch, whose work would be in vain. A batch that lasts longer than
`BATCH_END_S` is not waited for.
Rule 7: a tracker that starts needs the processor more than the others: all trackers of a process in which one starts
give way until it is ready, and so do those of the process that handed its queue over.
Rule 8: a process whose JVM is gone leaves the group before its trackers have ended, so that the others take its queues
over at once: they fence what is still open.
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
from typing import TYPE_CHECKING, Any

from kmq_spark.config import TRACKED_NAME_PATTERN
from kmq_spark.coordination.coordinator import Coordinator
from kmq_spark.coordination.topic import create_coordination_topic
from kmq_spark.core.coordination.effects import Change
from kmq_spark.core.coordination.records import fleet_group
from kmq_spark.errors import FencedError, KafkaClientError, KmqError
from kmq_spark.pauses import RateLimit, retry_pause_s
from kmq_spark.tracker.tracked_queue import TrackedQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kmq_spark.config import Settings
    from kmq_spark.coordination.claim import Claim
    from kmq_spark.coordination.coordinator import GroupView
    from kmq_spark.core.coordination.effects import Effect
    from kmq_spark.tracker.tracked_queue import FleetTracker

logger = logging.getLogger(__name__)

HAND_OVER_S = 15.0
"""Longest time that a tracker goes on after a hand-over, and that one which was stopped may take to end, seconds."""

DRAIN_HAND_OVERS_S = 12.0
"""Time in which a process that ends hands all its queues over, seconds; with many, the waits are shorter."""

DRAIN_S = 25.0
"""How long a clean stop waits for successors, seconds; below Kubernetes' grace period of 30 s."""

JOIN_S = 75.0
"""
Longest time to join, seconds. Where all members died and retention removed their records, the group's world is known
after 65 s of silence.
"""

GIVE_WAY_S = 1.5
"""Longest pause after a batch of a tracker while one of its process starts, seconds."""

HANDED_OVER_GIVE_WAY_S = 4.0
"""
Longest pause after a batch of a tracker whose queue was handed over, seconds. Its successor needs about one second to
fence it; where none comes, redelivery goes on after this pause.
"""

BATCH_END_S = 3.0
"""For how long a hand-over waits for the end of the tracker's batch, seconds."""

HANDING_OVER_GIVE_WAY_S = 0.7
"""
Longest pause in the process that handed a queue over, seconds. Shorter: the queue that it hands over next is not
redelivered from its last batch here until its new tracker is ready.
"""

FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 30.0
FENCED_RETRY_S = 10.0
"""Pause before a tracker is started again that was fenced from outside the fleet, seconds."""

_LOOK_S = 0.05
_CHECK_S = 1.0
_WARN_INTERVAL_S = 10.0
_IS_QUEUE = re.compile(TRACKED_NAME_PATTERN)


class TrackerFleet:
    """
    One process of a fleet.

    Args:
        name: Of the fleet.
        settings: All settings; `[tracker] queues` are added to the fleet's queues.
        make_tracker: Returns a new tracker of a queue.
        check_engine: Called about every second; raises a `KmqError` if this process can run no tracker any more.
        version: Version of this program, shown by `kmq tracker fleet`.
        on_event: Called with an event (`joined`, `tracking`, `ready`, `stopped`) and a queue, empty for `joined`.

    Attributes:
        takeovers: How many queues this process took over from a process that did not release them.

    Raises:
        ConfigError: A name or a setting is not allowed.
    """

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
        """Check the settings; `run` connects."""
        self.name, self.takeovers = name, 0
        self._settings, self._make_tracker = settings, make_tracker
        self._check_engine, self._on_event = check_engine, on_event
        self._running: dict[str, TrackedQueue] = {}
        self._not_before_s: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._lapsed: set[str] = set()
        self._foreign: set[str] = set()
        self._stopping = threading.Event()
        self._last_handed_over: TrackedQueue | None = None
        self._handed_over_s = float("-inf")
        self._hand_over_until_s = float("inf")
        self._checked_s = float("-inf")
        self._warning_limit = RateLimit(_WARN_INTERVAL_S)
        tracker = settings.tracker
        self._coordinator = Coordinator(
            fleet_group(name),
            client_id=tracker.fleet_member,
            heartbeat=tracker.fleet_heartbeat_ms / 1000,
            metadata=json.dumps(_metadata(version)).encode(),
            on_change=self._note,
            topic=tracker.coordination_topic,
            **settings.kafka.reach(),
        )

    @property
    def member(self) -> str:
        """Client id of this process in the fleet."""
        return self._coordinator.client_id

    @property
    def queues(self) -> list[str]:
        """Queues that this process tracks now."""
        return sorted(self._running)

    def tracker(self, queue: str) -> FleetTracker | None:
        """Return the tracker of a queue in this process; None where another process tracks it."""
        tracking = self._running.get(queue)
        return None if tracking is None else tracking.tracker

    def view(self) -> GroupView:
        """Return the world of the fleet's group; see `Coordinator.view`."""
        return self._coordinator.view()

    def stop(self) -> None:
        """Request that every queue is handed over and `run` ends; safe to call in a signal handler."""
        self._stopping.set()

    def run(self) -> None:
        """
        Track what is assigned to this process until `stop`.

        Raises:
            TopicError: The coordination topic cannot be created, or does not fit.
            FencedError: Another process uses the name of this member.
            KmqError: This process can take no part in the group any more, or its JVM is gone.
        """
        if self._stopping.is_set():
            return
        tracker, reach = self._settings.tracker, self._settings.kafka.reach()
        create_coordination_topic(topic=tracker.coordination_topic, **reach)
        # A former process of this name is a member until 2T have passed.
        self._coordinator.join(JOIN_S + 3 * tracker.fleet_heartbeat_ms / 1000)
        try:
            known = self._coordinator.view().tasks
            for queue in tracker.queues:
                if queue not in known:
                    self._coordinator.add_task(queue)
            logger.info(
                "%s joined fleet %s with %d members", self.member, self.name, len(self._coordinator.view().members),
                extra={"action": "fleet_joined"},
            )  # fmt: skip
            self._on_event("joined", "")
            while not self._stopping.wait(_LOOK_S):
                self._turn()
            self._drain()
        finally:
            self._end_all()
            self._coordinator.close()

    def _turn(self, *, is_draining: bool = False) -> None:
        """Start and stop trackers as the log wants it."""
        if (failure := self._coordinator.failure) is not None:
            raise failure
        if time.monotonic() - self._checked_s > _CHECK_S:
            self._checked_s = time.monotonic()
            try:
                self._check_engine()
            except KmqError:
                self._coordinator.close()  # rule 8
                raise
        view = self._coordinator.view()
        for queue, tracking in list(self._running.items()):
            if successor := self._successor(view, queue):
                self._hand_over(tracking, successor, view)
            elif reason := self._reason_to_stop(view, queue, is_draining=is_draining):
                tracking.stop(reason)
            elif tracking.leaving_since_s is not None:
                tracking.stop("it comes back to this process, which starts it again")
            else:
                tracking.end_turn()
            is_leaving = tracking.is_running and tracking.leaving_since_s is not None
            if is_leaving and _has_ready_successor(tracking, view):
                tracking.stop("its successor is ready")
            self._look_after(queue, tracking)
        if not is_draining:
            self._begin_assigned()
        self._give_way(view)

    def _give_way(self, view: GroupView) -> None:
        """Let the trackers pause that rules 6 and 7 name."""
        is_one_starting = any(tracking.is_starting for tracking in self._running.values())
        is_handing_over = self._is_successor_starting(view)
        for tracking in self._running.values():
            if tracking.leaving_since_s is not None:
                tracking.tracker.gives_way_s = HANDED_OVER_GIVE_WAY_S
            elif is_one_starting or tracking.has_turn:
                tracking.tracker.gives_way_s = GIVE_WAY_S
            else:
                tracking.tracker.gives_way_s = HANDING_OVER_GIVE_WAY_S if is_handing_over else 0.0

    def _hand_over(self, tracking: TrackedQueue, successor: str, view: GroupView) -> None:
        """Hand a queue over when its turn has come; see rules 5 and 6."""
        if tracking.leaving_since_s is not None:
            return
        if self._is_turn(view):
            tracking.begin_turn()
        else:
            tracking.end_turn()
        # Where the claim is over already, the successor does not wait either.
        if not tracking.claim.is_held or tracking.is_batch_over(min(BATCH_END_S, self._share_s())):
            self._last_handed_over, self._handed_over_s = tracking, time.monotonic()
            tracking.hand_over(successor)

    def _is_turn(self, view: GroupView) -> bool:
        """Return whether the next queue may be handed over."""
        return not self._is_successor_starting(view) or time.monotonic() - self._handed_over_s >= self._share_s()

    def _share_s(self) -> float:
        """Return the time for the next hand-over, seconds; infinity where this process does not end."""
        waiting = sum(tracking.leaving_since_s is None for tracking in self._running.values())
        return (self._hand_over_until_s - self._handed_over_s) / waiting

    def _is_successor_starting(self, view: GroupView) -> bool:
        """Return whether the queue that was handed over last waits for its new tracker."""
        last = self._last_handed_over
        return last is not None and last.is_successor_awaited and not _has_ready_successor(last, view)

    def _successor(self, view: GroupView, queue: str) -> str:
        """Return the other member to which a queue is assigned, empty for none."""
        task = view.tasks.get(queue)
        is_elsewhere = task is not None and task.client_id != self.member and not view.paused_until_ms
        return task.client_id if task is not None and is_elsewhere else ""

    def _reason_to_stop(self, view: GroupView, queue: str, *, is_draining: bool) -> str:
        """Return why a tracker must stop, empty if it must not; see rule 3."""
        task, claim = view.tasks.get(queue), view.resources.get(queue)
        if task is None:
            return "the queue was removed from the fleet"
        if view.paused_until_ms:
            return "the fleet is paused"
        if is_draining and task.client_id != self.member:
            return "this process ends and no other one is there"
        if claim is not None and claim.holder not in {"", self.member}:
            return f"{claim.holder} holds the queue"
        return ""

    def _look_after(self, queue: str, tracking: TrackedQueue) -> None:
        """Release the claim of a tracker that has ended, and stop one that no successor has fenced in time."""
        if not tracking.is_running:
            del self._running[queue]
            tracking.release()
            self._note_end(queue, tracking)
            self._on_event("stopped", queue)
        elif tracking.left_for_s > HAND_OVER_S:
            tracking.release()
            tracking.stop("no successor has fenced it")

    def _note_end(self, queue: str, tracking: TrackedQueue) -> None:
        """Log why a tracker has ended, and set when it may be started again here."""
        error = tracking.error
        if error is None or tracking.leaving_since_s is not None:
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
            tracking = self._running.get(queue)
            is_waiting = time.monotonic() < self._not_before_s.get(queue, 0.0)
            if not self._is_queue(queue) or is_waiting:
                continue
            if tracking is not None and (tracking.leaving_since_s is not None or tracking.claim.is_held):
                continue
            try:
                # None while its last owner holds it.
                claim = self._coordinator.claim(queue)
            except KafkaClientError as error:
                self._warn(error)
                return
            if claim is None:
                continue
            if tracking is not None:
                # The claim had lapsed while this process could not read the log, and no other process took the queue.
                tracking.claim = claim
                continue
            self._begin(queue, claim)

    def _begin(self, queue: str, claim: Claim) -> None:
        if queue in self._lapsed:
            self._lapsed.discard(queue)
            self.takeovers += 1
        logger.info(
            "starting the tracker of %s, epoch %d", queue, claim.epoch,
            extra={"action": "fleet_takes", "queue": queue, "epoch": claim.epoch},
        )  # fmt: skip
        tracking = self._running[queue] = TrackedQueue(queue, claim, self._make_tracker(queue))
        self._on_event("tracking", queue)
        threading.Thread(target=self._report_ready, args=(tracking,), name=f"kmq-ready-{queue}", daemon=True).start()

    def _report_ready(self, tracking: TrackedQueue) -> None:
        while tracking.is_running and not tracking.tracker.wait_ready(1.0):
            pass
        if not tracking.is_running:
            return
        tracking.ready_s = time.monotonic()
        self._failures.pop(tracking.queue, None)
        self._on_event("ready", tracking.queue)
        claim = tracking.claim
        # If this fails, the process that handed the queue over waits for longer; see rule 5.
        with contextlib.suppress(KmqError):
            claim.commit(claim.epoch, timeout=self._settings.tracker.fleet_heartbeat_ms / 1000)

    def _is_queue(self, name: str) -> bool:
        """Return whether a task is a queue; log once for each that is not, because anybody may add tasks."""
        if _IS_QUEUE.fullmatch(name):
            return True
        if name not in self._foreign:
            self._foreign.add(name)
            logger.warning(
                "task %r of fleet %s is no name of a queue and is ignored; remove it with "
                "`kmq tracker fleet %s --remove`", name, self.name, self.name, extra={"action": "fleet_foreign_task"},
            )  # fmt: skip
        return False

    def _drain(self) -> None:
        """Give all queues to the other members, and wait until these have fenced the trackers here."""
        if not self._running:
            return
        until_s = time.monotonic() + DRAIN_S
        self._hand_over_until_s = time.monotonic() + DRAIN_HAND_OVERS_S
        try:
            self._coordinator.drain()
            while self._running and time.monotonic() < until_s:
                self._turn(is_draining=True)
                time.sleep(_LOOK_S)
        except KmqError as error:
            logger.warning("cannot hand the queues over: %s", error, extra={"action": "fleet_drain_failed"})

    def _end_all(self) -> None:
        """Stop the trackers that still run, and release their claims."""
        for tracking in self._running.values():
            tracking.stop("this process ends")
        until_s = time.monotonic() + DRAIN_S
        for queue, tracking in list(self._running.items()):
            tracking.wait(max(0.0, until_s - time.monotonic()))
            self._look_after(queue, tracking)

    def _note(self, effects: Sequence[Effect]) -> None:
        """Count takeovers; called in a thread of the coordinator."""
        for effect in effects:
            if effect.change is Change.LAPSED and effect.client_id != self.member:
                self._lapsed.add(effect.resource)
            elif effect.change is Change.RELEASED or (
                effect.change is Change.CLAIMED and effect.client_id != self.member
            ):
                self._lapsed.discard(effect.resource)

    def _warn(self, error: KmqError) -> None:
        if self._warning_limit.allows():
            logger.warning(
                "cannot claim queues of fleet %s, the running trackers go on: %s", self.name, error,
                extra={"action": "fleet_cannot_claim"},
            )  # fmt: skip


def _has_ready_successor(tracking: TrackedQueue, view: GroupView) -> bool:
    """Return whether the log shows that a later tracker of the queue is ready; see rule 5."""
    claim = view.resources.get(tracking.queue)
    # None where the claim was the first, and no tracker has been ready.
    return claim is not None and claim.position is not None and claim.position > tracking.claim.epoch


def _metadata(version: str) -> dict[str, Any]:
    """Return what `kmq tracker fleet` shows of a process."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "version": version,
        "started_at_ms": int(time.time() * 1000),
    }
