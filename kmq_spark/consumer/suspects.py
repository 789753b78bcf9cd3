"""
Suspects: delivered one at a time, in order, while nothing else is held.

A suspect is a message whose deliveries repeatedly ended silently, as when a handler kills its process. Such a crash
also costs a delivery of every other message that the process holds.

Rule 1: for a suspect the consumer drains: it starts no other messages and waits for the held ones, `DRAIN_S` at most.
Rule 2: after a drain that was too short, suspects are deferred for `DEFER_S` while other messages are held. So a
message that is held for hours stops its consumer for a share of the time only.

Source: KAFKA-17541.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kmq_spark.consumer.admission import Turn

if TYPE_CHECKING:
    from kmq_spark.consumer.message import Message

DRAIN_S = 10.0
DEFER_S = 120


class SuspectSchedule:
    """Whether a suspect is held, waited for, or not to be waited for. Callers pass *now*, monotonic seconds."""

    def __init__(self) -> None:
        self._suspect: Message | None = None
        self._draining_since: float | None = None
        self._others_until = float("-inf")

    @property
    def is_held(self) -> bool:
        """Whether a suspect is held."""
        if self._suspect is not None and not self._suspect.is_held:
            self._suspect = None
        return self._suspect is not None

    def is_draining(self, now: float) -> bool:
        """Whether the consumer starts no messages, so that the held ones are settled before a suspect."""
        return self._draining_since is not None and now - self._draining_since < DRAIN_S

    def turn(self, now: float, *, is_empty: bool) -> Turn:
        """Return what to do with a suspect that is next. *is_empty*: nothing is held."""
        if is_empty:
            return Turn.ALONE
        if self._draining_since is not None and not self.is_draining(now):
            self._draining_since, self._others_until = None, now + DEFER_S
        return Turn.DEFER if now < self._others_until else Turn.WAIT

    def drain(self, now: float) -> None:
        """Begin a drain, unless one has begun."""
        if self._draining_since is None:
            self._draining_since = now

    def took(self, suspect: Message | None) -> None:
        """Record that a batch was taken: the suspect, or other messages. A drain is over."""
        self._suspect, self._draining_since = suspect, None
