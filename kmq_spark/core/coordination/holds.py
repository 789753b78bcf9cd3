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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kmq_spark.core.coordination.world import World

NEVER_HELD = float("-inf")
"""End of the holds of a member that has not read a renewal back."""


def holds_until_ms(sent_at_ms: float, heartbeat_ms: int) -> float:
    """
    Return the instant at which a hold ends.

    Args:
        sent_at_ms: When the newest renewal that was read back was sent, milliseconds of the member's monotonic clock.
        heartbeat_ms: T.

    Returns:
        Milliseconds of the same clock. Never compare with a time of the broker.
    """
    return sent_at_ms + heartbeat_ms


class Holds:
    """
    What one instance of a member knows of its own claims.

    Args:
        client_id: Client id of the member.
        instance: Instance of this process.
    """

    __slots__ = ("_newest_sent_at_ms", "_sent", "client_id", "instance")

    def __init__(self, client_id: str, instance: str) -> None:
        """Begin without a hold."""
        self.client_id = client_id
        self.instance = instance
        self._sent: deque[tuple[int, float]] = deque()
        self._newest_sent_at_ms = NEVER_HELD

    def note_sent(self, sequence: int, at_ms: float) -> None:
        """
        Remember a record that may renew the claims.

        Args:
            sequence: Sequence of the record; each is larger than the one before.
            at_ms: The member's monotonic clock, read before the record was handed over.
        """
        self._sent.append((sequence, at_ms))

    def note_read(self, sequence: int, *, refreshed: bool) -> None:
        """
        Note an own record that was read back from the log.

        Args:
            sequence: Sequence of the record. Earlier ones that were not read back never will be.
            refreshed: Whether it renewed the claims, by the world at its offset.
        """
        while self._sent and self._sent[0][0] <= sequence:
            earlier, sent_at_ms = self._sent.popleft()
            if refreshed and earlier == sequence:
                self._newest_sent_at_ms = max(self._newest_sent_at_ms, sent_at_ms)

    def until_ms(self, heartbeat_ms: int) -> float:
        """
        Return the instant at which all holds end, unless another renewal is read back before.

        Args:
            heartbeat_ms: T of the group.

        Returns:
            Milliseconds of the member's monotonic clock, `NEVER_HELD` where none was renewed.
        """
        return holds_until_ms(self._newest_sent_at_ms, heartbeat_ms)

    def epoch_of(self, world: World, resource: str, now_ms: float) -> int | None:
        """
        Return the epoch under which this instance holds a resource now, None where it does not.

        Args:
            world: As far as the member has read.
            resource: Name of it.
            now_ms: The member's monotonic clock.
        """
        if now_ms >= self.until_ms(world.heartbeat_ms):
            return None
        return world.epoch_of(resource, self.client_id, self.instance)
