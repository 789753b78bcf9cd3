"""
Until when a member may act on what it holds: the holder's side of a claim.

Rule 1: a hold ends T after the member *sent* the newest record that renewed its claims and that it has read back. The
broker's acknowledgement proves nothing: a heartbeat may be appended behind the claim of another member, or while the
group is paused.
Rule 2: instants are of one monotonic clock of the member, which also runs while the host sleeps. They are taken before
the record is handed to Kafka's client.
Rule 3: other members wait for 2T by the group's clock, so that T is left for clocks that run differently and for a
broker's clock that jumps.
"""

from __future__ import annotations

from collections import deque

NEVER_HELD = float("-inf")
"""End of the holds of a member that has not read a renewal back."""


class Holds:
    """When the records of one instance were sent, and which of them the log has shown to renew its claims."""

    __slots__ = ("_newest_sent_at_ms", "_sent")

    def __init__(self) -> None:
        self._sent: deque[tuple[int, float]] = deque()
        self._newest_sent_at_ms = NEVER_HELD

    def note_sent(self, sequence: int, at_ms: float) -> None:
        """Remember a record that may renew the claims; each sequence is larger than the one before."""
        self._sent.append((sequence, at_ms))

    def note_read(self, sequence: int, *, refreshed: bool) -> None:
        """Note an own record that was read back, and whether it renewed the claims by the world at its offset."""
        # Earlier ones that were not read back never will be.
        while self._sent and self._sent[0][0] <= sequence:
            earlier, sent_at_ms = self._sent.popleft()
            if refreshed and earlier == sequence:
                self._newest_sent_at_ms = max(self._newest_sent_at_ms, sent_at_ms)

    def until_ms(self, heartbeat_ms: int) -> float:
        """Return when all holds end unless another renewal is read back; never compare with a time of the broker."""
        return self._newest_sent_at_ms + heartbeat_ms
