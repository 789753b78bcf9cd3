"""
Give suspects their turn: alone, and for a bounded share of the time.

A suspect is a message whose deliveries have repeatedly ended without a word, as they do when a handler takes its
process down: whatever is held beside it then loses a delivery too, so nothing is.

Rule 1: from the end of the others' work to the end of the suspect's, time is charged to suspects; what they have had
too much is made up for before the next one, while others wait.
Rule 2: a suspect that must wait is deferred, longer each time in a row, but none for ever: a receiver that always holds
something pauses for it now and then.
Rule 3: no clock is read here, callers pass *now*, monotonic seconds.

Source: KAFKA-17541; a token bucket, RFC 2697, for the share.
"""

from __future__ import annotations

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
"""The first suspect in a row rests one step, the next two, …, at most this long."""

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
    """Which suspect is out, and what suspects have used up of their time."""

    def __init__(self) -> None:
        """Start with a window's share saved up."""
        self._credit_s = TIME_SHARE * WINDOW_S
        self._credited_at: float | None = None
        self._began_at: float | None = None
        self._suspect: Held | None = None
        self._pause_until = 0.0
        self._deferred_count = 0

    def is_pausing(self, now: float) -> bool:
        """Whether others are let finish, for a suspect that is next."""
        return self._began_at is not None and self._suspect is None and now < self._pause_until

    def is_out(self, now: float) -> bool:
        """Whether a suspect is held now."""
        if self._suspect is not None and not self._suspect.is_held:
            self.end(now)
        return self._suspect is not None

    def turn(self, admissions: Sequence[Admission], now: float, *, is_empty: bool, may_wait: bool) -> Turn:
        """
        Say what is done with suspects among fetched records.

        Args:
            admissions: Verdicts on all that was fetched.
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
        if self.is_spent(now) and any(each.verdict is Verdict.HAND_OUT for each in admissions):
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

    def begin(self, suspect: Held, now: float) -> None:
        """Take note that a suspect is handed out."""
        if self._began_at is None:
            self._began_at = now
        self._suspect = suspect
        self._deferred_count = 0

    def end(self, now: float) -> None:
        """Take note that no suspect is out, or waited for, any more, and charge the time."""
        if self._began_at is not None:
            self._add_credit(now)
            self._credit_s -= now - self._began_at
        self._began_at = self._suspect = None

    def defer_ms(self) -> int:
        """Return how long the next suspect that must wait rests, milliseconds."""
        self._deferred_count += 1
        return min(DEFER_STEP_MS * self._deferred_count, MAX_DEFER_MS)

    def _add_credit(self, now: float) -> None:
        passed = 0.0 if self._credited_at is None else now - self._credited_at
        self._credit_s = min(TIME_SHARE * WINDOW_S, self._credit_s + TIME_SHARE * passed)
        self._credited_at = now
