"""
How long a member may act on the resources that it holds.

Rule 1: a hold ends T after the member *sent* the newest record that renewed its claims and that it has read back. The
broker's acknowledgement is not enough: the heartbeat may lie after the claim of another member, or in a pause.
Rule 2: all instants come from one monotonic clock of the member that also runs while the host sleeps. They are taken
before the record is handed to the Kafka client.
Rule 3: other members wait for 2T on the group's clock. This leaves T for clocks that differ or jump.
"""

from __future__ import annotations

from collections import deque

NEVER_HELD = float("-inf")
"""End of the holds of a member that has not read a renewal back."""


class Holds:
    """The send times of one instance's records, and the newest of those that renewed its claims."""

    __slots__ = ("_newest_sent_at_ms", "_sent")

    def __init__(self) -> None:
        self._sent: deque[tuple[int, float]] = deque()
        self._newest_sent_at_ms = NEVER_HELD

    def note_sent(self, sequence: int, at_ms: float) -> None:
        """Remember a record that may renew the claims; sequences ascend."""
        self._sent.append((sequence, at_ms))

    def note_read(self, sequence: int, *, refreshed: bool) -> None:
        """Note that an own record was read back, and whether it renewed the claims."""
        # Earlier records that were not read back were lost.
        while self._sent and self._sent[0][0] <= sequence:
            earlier, sent_at_ms = self._sent.popleft()
            if refreshed and earlier == sequence:
                self._newest_sent_at_ms = max(self._newest_sent_at_ms, sent_at_ms)

    def until_ms(self, heartbeat_ms: int) -> float:
        """Return when all holds end unless another renewal is read back; do not compare it with broker times."""
        return self._newest_sent_at_ms + heartbeat_ms
