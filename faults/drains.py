"""
How long a drain may last (I9), and what is still open in it.

Rule 1: all is worked off a minute after the last fault, times the patience.
Rule 2: what a consumer has deferred waits for its time, as suspects do for their turn. Only where *all* that is open is
deferred, the drain goes on, and ends `DEFERRED_TIMEOUT_S` after the last moment at which that was so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from faults.checker import open_messages
from faults.leases import read_leases

if TYPE_CHECKING:
    from collections.abc import Collection

    from faults.protocol import MessageId
    from faults.topics import Dump

DRAIN_TIMEOUT_S = 60.0
"""Longest drain where something is open that is not deferred, seconds."""

DEFERRED_TIMEOUT_S = 20.0
"""How long after a deferral the message may still be open, seconds."""

LONGEST_DRAIN_S = 300.0
"""Longest drain in which deferrals, of two minutes at most, are waited for, seconds."""


def open_until_ms(dump: Dump) -> dict[MessageId, int]:
    """Return the messages that are open, each with the time until which it is deferred, epoch ms; 0 for now."""
    leases = [read_leases(partition, log, []) for partition, log in dump.markers.items()]
    until_ms: dict[MessageId, int] = {}
    for each in leases:
        until_ms |= each.deferred_until_ms
    return {message: until_ms.get(message, 0) for message in open_messages(dump, leases)}


class DrainLimit:
    """
    Says when a drain has lasted too long.

    Args:
        began_s: Start of the drain, monotonic seconds.
        timeout_s: Longest drain where something is open that is not deferred, seconds.
        patience: Factor of both limits.
    """

    def __init__(self, began_s: float, timeout_s: float = DRAIN_TIMEOUT_S, patience: float = 1.0) -> None:
        """Begin."""
        self._began_s, self._patience = began_s, patience
        self._give_up_s = began_s + timeout_s * patience

    def is_over(self, until_ms: Collection[int], now_s: float, now_ms: float) -> bool:
        """
        Return whether the drain has lasted too long.

        Args:
            until_ms: Of each open message, as `open_until_ms` returns them; at least one.
            now_s: Monotonic seconds.
            now_ms: Epoch milliseconds.
        """
        if min(until_ms) > now_ms and now_s < self._began_s + LONGEST_DRAIN_S:
            self._give_up_s = max(self._give_up_s, now_s + DEFERRED_TIMEOUT_S * self._patience)
        return now_s > self._give_up_s
