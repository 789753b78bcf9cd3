"""
Run the user's callbacks in a thread of their own, one after the other.

Rule 1: a callback that is slow delays the next one, and neither a heartbeat nor a call of the coordinator.
Rule 2: a callback that raises is logged; the next one runs all the same.
"""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kmq_spark.coordination.claim import Claim
    from kmq_spark.coordination.session import Session
    from kmq_spark.core.coordination.effects import Effect

logger = logging.getLogger(__name__)

_STOP_S = 5.0


class Callbacks:
    """
    The callbacks of one coordinator.

    Args:
        on_lost: Called with each claim that is over and was not released.
        on_change: Called with the effects of each batch of records.
    """

    def __init__(
        self, on_lost: Callable[[Claim], None] | None, on_change: Callable[[Sequence[Effect]], None] | None
    ) -> None:
        """Run nothing before `start`."""
        self._on_lost, self._on_change = on_lost, on_change
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, session: Session, group: str) -> None:
        """Run the callbacks of a session from now on; without callbacks there is no thread."""
        on_lost, on_change = self._on_lost, self._on_change
        if on_lost is not None:
            session.on_lost = lambda claim: self._waiting.put(lambda: on_lost(claim))
        if on_change is not None:
            session.on_effects = lambda effects: self._waiting.put(lambda: on_change(effects))
        if on_lost is None and on_change is None:
            return
        self._thread = threading.Thread(target=self._run, name=f"kmq-coordination-callbacks-{group}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Run what is waiting, then end the thread; a callback may call this."""
        if self._thread is not None:
            self._waiting.put(None)
            if threading.current_thread() is not self._thread:
                self._thread.join(_STOP_S)

    def after_fork(self) -> None:
        """Forget the thread: a child process does not have it."""
        self._thread = None

    def _run(self) -> None:
        while (callback := self._waiting.get()) is not None:
            try:
                callback()
            except Exception:
                logger.exception("a callback of the coordinator failed", extra={"action": "callback_failed"})
