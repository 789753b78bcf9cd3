"""
Give suspects their turn: apart from the others, and for a bounded share of the time.

A suspect is a message whose deliveries have repeatedly ended without a word, as they do when a handler takes its
process down: whatever is held beside it then loses a delivery too, so nothing is that has none to spare (`admission`).

Rule 1: from the end of the others' work to the end of the suspect's, time is charged to suspects; what they have had
too much is made up for before the next one, while others wait. Time that nobody else wanted costs little.
Rule 2: a suspect that must wait is deferred, but none for ever: a receiver that always holds something pauses for it
now and then. Many that wait come back one after the other, as fast as their share of the time takes them.
Rule 3: whether others wait is looked for far ahead, but rarely: a crowd of suspects may lie before them.
Rule 4: no clock is read here, callers pass *now*, monotonic seconds.

Source: KAFKA-17541; a token bucket, RFC 2697, for the share; its theoretical arrival time (GCRA) for the deferrals.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from kmq_spark.kafka.admission import Turn, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kmq_spark.kafka.admission import Admission

TIME_SHARE = 0.15
"""Share of the time that suspects may take from others: 80 % of the fault-free rate is promised to these."""

WINDOW_S = 10.0
"""Time over which the share may be saved up."""

DEFER_STEP_MS = 1_000
MAX_DEFER_MS = 30_000
"""Suspects that others hold up rest one step, the next two, …, this long, then one again: many are spread out."""

MAX_BOOKED_MS = 120_000
"""Those that had their share rest until it is their turn, this long at most: others may be gone before."""

GUESSED_COST_S = 0.05
"""What a suspect is thought to cost before one was seen."""

COST_WEIGHT = 0.1
"""How much the last suspect counts in what the next one is thought to cost."""

LOOK_NEAR = 128
"""Records looked at where there are suspects: are others among them?"""

LOOK_FAR = 2_000
"""Records looked at where all of these are suspects, and they have had their share. Others are thought to wait behind
so many."""

LOOK_FAR_EVERY_S = 0.25
"""How long it holds that nobody waits: a far look takes milliseconds."""

PATIENCE = 10
"""Suspects deferred in a row (about a minute) until a receiver that always holds something is made to pause."""

MAX_PAUSE_S = 5.0
"""How long such a receiver pauses at most."""


class Held(Protocol):
    """A message, as far as it matters here."""

    @property
    def is_held(self) -> bool:
        """Whether it is neither settled nor lost."""


class Isolation:
    """Which suspects are out, and what suspects have used up of their time."""

    def __init__(self) -> None:
        """Start with a window's share saved up."""
        self._credit_s = TIME_SHARE * WINDOW_S
        self._credited_at: float | None = None
        self._began_at: float | None = None
        self._suspects: Sequence[Held] = ()
        self._pause_until = 0.0
        self._deferred_count = 0
        self._cost_s = GUESSED_COST_S
        self._booked_until = float("-inf")
        self._resting: tuple[float, int] = (0.0, 0)
        self._resting_count = 0
        self._rest_ms = 0
        self._others_wait = False
        self._looked_far_at = float("-inf")

    def is_pausing(self, now: float) -> bool:
        """Whether others are let finish, for a suspect that is next."""
        return self._began_at is not None and not self._suspects and now < self._pause_until

    def is_out(self, now: float) -> bool:
        """Whether suspects are held now."""
        if self._suspects and not any(suspect.is_held for suspect in self._suspects):
            self.end(now)
        return bool(self._suspects)

    def look(self, admissions: Sequence[Admission], now: float, *, is_all: bool) -> bool:
        """
        Take note whether others wait.

        Args:
            admissions: Verdicts on all that was looked at, suspects among them.
            now: Monotonic seconds.
            is_all: Whether there is nothing more to look at.

        Returns:
            Whether that can be told; else it takes a look at `LOOK_FAR` records.
        """
        if any(each.verdict is Verdict.HAND_OUT for each in admissions):
            self._others_wait = True
        elif is_all or len(admissions) >= LOOK_FAR:
            self._others_wait, self._looked_far_at = not is_all, now
        elif self.is_spent(now) and (self._others_wait or now - self._looked_far_at > LOOK_FAR_EVERY_S):
            return False
        return True

    def turn(self, now: float, *, is_empty: bool, may_wait: bool) -> Turn:
        """
        Say what is done with suspects that are next, after a `look`.

        Args:
            now: Monotonic seconds.
            is_empty: Whether nothing is held.
            may_wait: Whether what is held will surely end, so that it can be waited for.
        """
        if is_empty and self.is_pausing(now):
            return Turn.ALONE
        if self._began_at is not None and not self.is_pausing(now):
            # The receiver went on holding something: it gets its good messages, and pauses again later.
            self.end(now)
            self._deferred_count = 0
        if self._others_wait and self.is_spent(now):
            return Turn.DEFER
        if is_empty:
            return Turn.ALONE
        return Turn.WAIT if may_wait or self._deferred_count >= PATIENCE else Turn.DEFER

    def is_spent(self, now: float) -> bool:
        """Whether suspects have had their share of the time."""
        self._add_credit(now)
        return self._credit_s <= 0

    def pause(self, now: float, *, may_wait: bool) -> None:
        """Take note that others are let finish from now on; not for ever where they may not end by themselves."""
        if self._began_at is None:
            self._began_at = now
            self._pause_until = now + (float("inf") if may_wait else MAX_PAUSE_S)

    def begin(self, suspects: Sequence[Held], now: float) -> None:
        """Take note that suspects are handed out."""
        if self._began_at is None:
            self._began_at = now
        self._suspects = suspects
        self._deferred_count = 0

    def end(self, now: float) -> None:
        """Take note that no suspect is out, or waited for, any more, and charge the time."""
        if self._began_at is not None:
            self._charge(now - self._began_at, now)
        self._began_at, self._suspects = None, ()

    def defer_ms(self, crowd: int, now: float) -> int:
        """
        Return how long the next suspect that must wait rests.

        Args:
            crowd: How many of its like may go together: these come back together.
            now: Monotonic seconds, the same for all that were fetched together.

        Returns:
            Milliseconds, whole steps, so that many share a marker.
        """
        is_spent = self.is_spent(now)
        if is_spent:
            # After the debt, and after those that were deferred before it.
            free_at = max(self._booked_until, now - self._credit_s / TIME_SHARE)
            self._booked_until = min(free_at + self._cost_s / TIME_SHARE, now + MAX_BOOKED_MS / 1000)
        if self._resting == (now, crowd) and self._resting_count < crowd:
            self._resting_count += 1
            return self._rest_ms
        self._resting, self._resting_count = (now, crowd), 1
        self._deferred_count += 1
        if is_spent:
            steps = math.ceil((self._booked_until - now) * 1000 / DEFER_STEP_MS)
        else:
            steps = 1 + (self._deferred_count - 1) % (MAX_DEFER_MS // DEFER_STEP_MS)
        self._rest_ms = min(max(1, steps) * DEFER_STEP_MS, MAX_BOOKED_MS)
        return self._rest_ms

    def _charge(self, passed_s: float, now: float) -> None:
        self._add_credit(now)
        if self._suspects:
            count = len(self._suspects)
            self._cost_s += (1 - (1 - COST_WEIGHT) ** count) * (passed_s / count - self._cost_s)
        # Others may have come meanwhile where none waited before, so it is not free altogether.
        least_s = float("-inf") if self._others_wait else min(self._credit_s, -TIME_SHARE * WINDOW_S)
        self._credit_s = max(self._credit_s - passed_s, least_s)

    def _add_credit(self, now: float) -> None:
        passed = 0.0 if self._credited_at is None else now - self._credited_at
        self._credit_s = min(TIME_SHARE * WINDOW_S, self._credit_s + TIME_SHARE * passed)
        self._credited_at = now
