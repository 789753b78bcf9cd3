"""
Schedule suspects: separately from other messages, and for a bounded share of the time.

A suspect is a message whose deliveries repeatedly ended silently, as when a handler kills its process. Each such crash
also costs a delivery of every other message that the process holds.

Rule 1: a suspect is delivered when nothing else is held. For this the consumer drains: it starts no other messages and
waits for the held ones, `FIRST_DRAIN_S` at first. If that was not enough, other messages continue, and the next drain
is twice as long, up to `MAX_DRAIN_S`.
Rule 2: a turn is a drain and the delivery that follows. After a turn of t seconds, or a drain of t seconds without
delivery, the suspects rest for `REST_FACTOR` · t seconds. During a rest, suspects are delivered only while nothing else
is held and no other message waits.
Rule 3: suspects that must wait are deferred, each until its own turn, so that not all return at once.
Rule 4: this module reads no clock. Callers pass *now*, monotonic seconds.

Source: KAFKA-17541.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from kmq_spark.consumer.poison.admission import Turn

if TYPE_CHECKING:
    from collections.abc import Sequence

REST_FACTOR = 6
"""Length of a rest in turns. Suspects get 1/7 of the time; other messages must keep 80 % of their rate."""

FIRST_DRAIN_S = 1.0
MAX_DRAIN_S = 30.0
"""
First and longest drain: the time in which other messages finish. If handlers always take longer, a suspect waits for a
moment when nothing else is held.
"""

GUESSED_TURN_S = 0.05
"""Assumed length of a turn until the first turn is measured."""

MAX_DEFER_S = 120
"""Longest deferral of a suspect: the other messages may end long before."""


class Held(Protocol):
    """The part of a message that this module uses."""

    @property
    def is_held(self) -> bool:
        """Whether it is not settled and its lease has not ended."""


class SuspectSchedule:
    """State of the schedule: whether suspects are held or the consumer drains for one, and when the rest ends."""

    def __init__(self) -> None:
        """Start without a rest: the first suspect may be delivered at once."""
        self._suspects: Sequence[Held] = ()
        self._began_at: float | None = None
        self._drain_s = FIRST_DRAIN_S
        self._next_at = float("-inf")
        self._booked_until = float("-inf")
        self._turn_s = GUESSED_TURN_S

    def is_draining(self, now: float) -> bool:
        """Whether the consumer drains: it starts no messages, so that other messages finish before a suspect."""
        return self._began_at is not None and not self._suspects and now - self._began_at < self._drain_s

    def is_held(self, now: float) -> bool:
        """Whether suspects are held now."""
        if self._suspects and not any(suspect.is_held for suspect in self._suspects):
            self.turn_ended(now)
        return bool(self._suspects)

    def is_resting(self, now: float) -> bool:
        """Whether the suspects rest, because they have used their share of the time."""
        return now < self._next_at

    def turn(self, now: float, *, is_empty: bool, others_wait: bool) -> Turn:
        """Return what to do with the next suspects. *is_empty*: nothing is held. *others_wait*: other messages wait."""
        if self._began_at is not None and not is_empty and not self.is_draining(now):
            # The drain was too short.
            self._drain_s = min(2 * self._drain_s, MAX_DRAIN_S)
            self.turn_ended(now)
        if self.is_resting(now) and (others_wait or not is_empty) and not self.is_draining(now):
            return Turn.DEFER
        return Turn.ALONE if is_empty else Turn.WAIT

    def drain(self, now: float) -> None:
        """Begin a drain, unless one has begun."""
        if self._began_at is None:
            self._began_at = now

    def turn_began(self, suspects: Sequence[Held], now: float) -> None:
        """Record that *suspects* are delivered."""
        self.drain(now)
        self._suspects, self._drain_s = suspects, FIRST_DRAIN_S

    def turn_ended(self, now: float) -> None:
        """Record that no suspect is held or waited for any more. If this ends a turn or a drain, a rest begins."""
        if self._began_at is not None:
            passed_s = now - self._began_at
            self._next_at = now + REST_FACTOR * passed_s
            if self._suspects:
                self._turn_s = passed_s
        self._began_at, self._suspects = None, ()

    def defer_ms(self, group_limit: int, now: float) -> int:
        """
        Return the deferral of the next suspect that must wait, and reserve its turn.

        Args:
            group_limit: How many such suspects may share a turn.
            now: Monotonic seconds.

        Returns:
            Milliseconds, a multiple of 1,000, so that many deferrals share a marker.
        """
        free_at = max(self._booked_until, self._next_at, now)
        self._booked_until = min(free_at + (1 + REST_FACTOR) * self._turn_s / group_limit, now + MAX_DEFER_S)
        return 1_000 * max(1, math.ceil(self._booked_until - now))
