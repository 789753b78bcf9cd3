"""
Run the tasks that the group's leader assigns to this process.

Rule 1: a task runs in this process only while this process holds its claim: claim, run, stop, release.
Rule 2: a task that is reassigned or removed is asked to stop (`stopping`). Its claim is released after the handler has
returned, so that the next owner starts later.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Self

from kmq_spark.core.durations import milliseconds
from kmq_spark.errors import KmqError

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta
    from types import TracebackType

    from kmq_spark.coordination.claim import Claim
    from kmq_spark.coordination.coordinator import Coordinator

logger = logging.getLogger(__name__)

_POLL_S = 0.1


class RunningTask:
    """
    A task that runs in this process.

    Attributes:
        name: Name of the task.
        payload: Payload from `add_task`.
        claim: Its claim: pass `claim.epoch` to the system that you write to, and call `claim.check()` before you write.
        stopping: Set when the handler must return: the task was reassigned, or the claim was lost. Another member may
            start the task T after a loss.
    """

    def __init__(self, name: str, payload: bytes, claim: Claim) -> None:
        self.name, self.payload, self.claim = name, payload, claim
        self.stopping = threading.Event()


class TaskRunner:
    """
    Runs a handler for each task that is assigned to a member, in a thread each.

        with Coordinator(…) as me, TaskRunner(me, handle):
            ...

    Args:
        coordinator: That has joined.
        handler: Called with a `RunningTask`; returns soon after `stopping` is set.
        retry_delay: Pause before a handler that returned or raised is called again, seconds or a timedelta.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        handler: Callable[[RunningTask], None],
        *,
        retry_delay: float | timedelta = 1.0,
    ) -> None:
        self._coordinator, self._handler = coordinator, handler
        self._retry_delay_s = milliseconds("retry_delay", retry_delay) / 1000
        self._running: dict[str, tuple[RunningTask, threading.Thread]] = {}
        self._not_before_s: dict[str, float] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kmq-tasks", daemon=True)

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        self.stop()

    @property
    def running(self) -> list[str]:
        """Names of the tasks that run here now."""
        return sorted(self._running)

    def start(self) -> None:
        """Start to run assigned tasks."""
        self._thread.start()

    def drain(self, timeout: float | timedelta = 30.0) -> bool:
        """
        Stop all tasks, so that other members run them.

        Args:
            timeout: Longest time, seconds or a timedelta.

        Returns:
            Whether all have stopped; False if no other member takes them.
        """
        until_s = time.monotonic() + milliseconds("timeout", timeout) / 1000
        self._coordinator.drain()
        while (self._running or self._coordinator.assigned) and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        return not self._running

    def stop(self, timeout: float | timedelta = 30.0) -> None:
        """
        Ask every task to stop, wait for them, and release their claims.

        Args:
            timeout: Longest time, seconds or a timedelta; the claims of handlers that have not returned are kept until
                they lapse.
        """
        timeout_s = milliseconds("timeout", timeout) / 1000
        self._stopping.set()
        until_s = time.monotonic() + timeout_s
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        for task, _ in self._running.values():
            task.stopping.set()
        for _, thread in list(self._running.values()):
            thread.join(max(0.0, until_s - time.monotonic()))
        self._end_finished()
        if self._running:
            # A LEAVE would give the task to another member while it runs here.
            self._coordinator.has_running_tasks = True
            logger.warning(
                "tasks still run after the stop, their claims are kept until they lapse: %s", ", ".join(self.running),
                extra={"action": "tasks_running"},
            )  # fmt: skip

    def _run(self) -> None:
        """Start and stop tasks until stopped, or until the session is over; in a thread."""
        while not self._stopping.wait(_POLL_S):
            try:
                self._turn()
            except KmqError as error:
                logger.warning("cannot start or stop tasks, retrying: %s", error, extra={"action": "tasks_failed"})
                if self._coordinator.failure is not None:
                    break
        for task, _ in list(self._running.values()):
            task.stopping.set()

    def _turn(self) -> None:
        assigned = self._coordinator.assigned
        for name, (task, _) in self._running.items():
            if name not in assigned or not task.claim.is_held:
                task.stopping.set()
        self._end_finished()
        for name, payload in assigned.items():
            if name in self._running or time.monotonic() < self._not_before_s.get(name, 0.0):
                continue
            # None while its last owner holds it.
            claim = self._coordinator.claim(name)
            if claim is not None:
                self._begin(RunningTask(name, payload, claim))

    def _begin(self, task: RunningTask) -> None:
        thread = threading.Thread(target=self._handle, args=(task,), name=f"kmq-task-{task.name}", daemon=True)
        self._running[task.name] = (task, thread)
        logger.info("task %s started", task.name, extra={"action": "task_begins", "epoch": task.claim.epoch})
        thread.start()

    def _end_finished(self) -> None:
        """Release the claims of tasks whose handlers have returned."""
        for name, (task, thread) in list(self._running.items()):
            if not thread.is_alive():
                del self._running[name]
                self._not_before_s[name] = time.monotonic() + self._retry_delay_s
                task.claim.release()
                logger.info("task %s ended", name, extra={"action": "task_ended", "epoch": task.claim.epoch})

    def _handle(self, task: RunningTask) -> None:
        try:
            self._handler(task)
        except Exception:
            logger.exception("task %s failed", task.name, extra={"action": "task_failed"})
