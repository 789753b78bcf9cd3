"""
Give suspects their turn: apart from the others, and for a bounded share of the time.

A suspect is a message whose deliveries repeatedly ended without an answer, as they do when a handler kills its process.
What is held beside it then loses a delivery, too.

Rule 1: a suspect goes when nothing else is held. The others are let finish for it, `FIRST_PAUSE_S` at first; where that
was not enough, they go on, and the next pause is twice as long, up to `MAX_PAUSE_S`.
Rule 2: a turn (its pause included) or a pause without one that took t seconds is followed by `REST_FACTOR` · t seconds
in which suspects go only where nothing else is held and no other message waits.
Rule 3: suspects that must wait are deferred, each until its turn, so that many do not come back at once.
Rule 4: no clock is read here, callers pass *now*, monotonic seconds.

Source: KAFKA-17541.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from kmq_spark.consumer.poison.admission import Turn

if TYPE_CHECKING:
    from collections.abc import Sequence

REST_FACTOR = 6
"""Suspects get 1/7 of the time: the other messages are promised 80 % of their rate."""

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
"""How long others are let finish. Where handlers always take longer than that, a suspect waits for a quiet moment."""

GUESSED_TURN_S = 0.05
"""How long the turn of a suspect is thought to take before the first one."""

MAX_DEFER_S = 120
"""Longest deferral: the others may be done long before."""


class Held(Protocol):
    """A message, as far as it matters here."""

    @property
    def is_held(self) -> bool:
        """Whether it is neither settled nor lost."""


class Isolation:
    """Whether suspects are out, or waited for, and from when on they may be again."""

    def __init__(self) -> None:
        """Start with the first turn free."""
        self._suspects: Sequence[Held] = ()
        self._began_at: float | None = None
        self._pause_s = FIRST_PAUSE_S
        self._next_at = float("-inf")
        self._booked_until = float("-inf")
        self._turn_s = GUESSED_TURN_S

    def is_pausing(self, now: float) -> bool:
        """Whether others are let finish, for a suspect that is next."""
        return self._began_at is not None and not self._suspects and now - self._began_at < self._pause_s

    def is_out(self, now: float) -> bool:
        """Whether suspects are held now."""
        if self._suspects and not any(suspect.is_held for suspect in self._suspects):
            self.end(now)
        return bool(self._suspects)

    def is_resting(self, now: float) -> bool:
        """Whether suspects have had their share of the time."""
        return now < self._next_at

    def turn(self, now: float, *, is_empty: bool, others_wait: bool) -> Turn:
        """Return what is done with suspects that are next, from whether nothing is held and whether others wait."""
        if self._began_at is not None and not is_empty and not self.is_pausing(now):
            # The pause was too short.
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
            self.end(now)
        if self.is_resting(now) and (others_wait or not is_empty) and not self.is_pausing(now):
            return Turn.DEFER
        return Turn.ALONE if is_empty else Turn.WAIT

    def pause(self, now: float) -> None:
        """Let others finish from now on."""
        if self._began_at is None:
            self._began_at = now

    def begin(self, suspects: Sequence[Held], now: float) -> None:
        """Take note that suspects are handed out."""
        self.pause(now)
        self._suspects, self._pause_s = suspects, FIRST_PAUSE_S

    def end(self, now: float) -> None:
        """Take note that no suspect is out, or waited for, any more."""
        if self._began_at is not None:
            passed_s = now - self._began_at
            self._next_at = now + REST_FACTOR * passed_s
            if self._suspects:
                self._turn_s = passed_s
        self._began_at, self._suspects = None, ()

    def defer_ms(self, crowd: int, now: float) -> int:
        """
        Return how long the next suspect that must wait is deferred.

        Args:
            crowd: How many of its like share a turn.
            now: Monotonic seconds.

        Returns:
            Milliseconds; whole seconds, so that many share a marker.
        """
        free_at = max(self._booked_until, self._next_at, now)
        self._booked_until = min(free_at + (1 + REST_FACTOR) * self._turn_s / crowd, now + MAX_DEFER_S)
        return 1_000 * max(1, math.ceil(self._booked_until - now))
