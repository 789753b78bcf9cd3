"""What every stage of the campaign has: injections, what went wrong besides the promises, and a verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from faults.checker import Verdict


class JudgedStage:
    """
    What a fault is injected into, with the processes around it.

    Attributes:
        injections: How many faults were injected.
        is_drained: Whether everything was worked off at the end, so that nothing may be open.
        notes: Sentences for the report.
        failures: What went wrong besides the promises; each counts as a violation.
        recovery_s: How long each recovery took, seconds.
    """

    def __init__(self) -> None:
        """Begin without injections."""
        self.injections = 0
        self.is_drained = True
        self.notes: list[str] = []
        self.failures: list[str] = []
        self.recovery_s: list[float] = []

    @property
    def group_protocols(self) -> set[str]:
        """Group protocols of its consumers."""
        return set()

    def fail(self, what: str) -> None:
        """Note that something besides the promises went wrong: it counts as a violation."""
        self.failures.append(what)

    def verdict(self, *, is_drained: bool = True) -> Verdict:
        """Read what the processes wrote, and check it."""
        raise NotImplementedError

    def close(self) -> None:
        """End every process that still runs."""
        raise NotImplementedError
