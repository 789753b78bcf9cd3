"""
A claim: this process has the right to act on a resource until the claim ends.

Rule 1: a claim that has ended stays ended, even if the log renews it later: callers have acted on its end.
Rule 2: `check` takes no lock while the claim is held, so it may be called before every write.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kmq_spark.core.coordination.records import RecordType
from kmq_spark.core.durations import milliseconds
from kmq_spark.errors import ClaimLostError, UsageError

if TYPE_CHECKING:
    from datetime import timedelta

    from kmq_spark.coordination.session import Session
    from kmq_spark.core.coordination.effects import Applied


class Claim:
    """
    A resource that this process holds; `Coordinator.claim` returns it.

    Attributes:
        resource: Name of the resource.
        epoch: Fencing token: pass it to every system that you write to, and reject older ones there.
        position: Next offset to process, as set by `commit` or by the previous holder; None if none was set.
    """

    __slots__ = ("_end", "_session", "epoch", "position", "resource")

    def __init__(self, session: Session, resource: str, epoch: int, position: int | None) -> None:
        self._session = session
        self._end = ""
        self.resource, self.epoch, self.position = resource, epoch, position

    def __repr__(self) -> str:
        """Return resource and epoch."""
        return f"Claim({self.resource!r}, epoch={self.epoch})"

    @property
    def is_held(self) -> bool:
        """Whether the claim is held now; it may end a moment later."""
        return not self._end and not self._session.is_over(self)

    def check(self) -> None:
        """
        Check that the claim is held.

        Raises:
            ClaimLostError: The claim has ended: it was released, another member may hold the resource, or no renewal
                was read back from the log for T. Stop using the resource.
        """
        if not self.is_held:
            message = f"claim of {self.resource!r} is over (epoch {self.epoch}): {self._end}; stop working on it"
            raise ClaimLostError(message, resource=self.resource, epoch=self.epoch)

    def commit(self, position: int, *, timeout: float | timedelta = 0.0) -> None:
        """
        Set the position; it is sent with the next heartbeat.

        Args:
            position: Next offset to process, not below the current position.
            timeout: If above 0, send the position now and wait until it is read back; seconds or a timedelta.

        Raises:
            ClaimLostError: The claim has ended, possibly before the position was read back.
            KafkaClientError: The position was not read back in time; it may or may not be set.
            UsageError: The position is below the current one.
        """
        self.check()
        if self.position is not None and position < self.position:
            message = (
                f"position of {self.resource!r} would go back: got {position!r}; expected {self.position} or more; "
                "pause the group to set it back"
            )
            raise UsageError(message)
        if (wait_s := milliseconds("timeout", timeout) / 1000) > 0:
            self._confirm(self._session.send_position(self, position, wait_s), f"position {position}")
        else:
            self._session.note_position(self, position)

    def claim_messages(self, end: int, *, timeout: float | timedelta = 30.0) -> None:
        """
        Claim the messages from the position up to an end, for at-most-once delivery. Process them after this returns.

        It writes two records and reads each back: CLAIM_MESSAGES up to the end, then a HEARTBEAT with the end as the
        position. After a crash, the next holder begins at the end, or at the old position if nothing was processed.

        Args:
            end: Offset after the last message.
            timeout: Maximum time for both records, seconds or a timedelta.

        Raises:
            ClaimLostError: The claim has ended; process none of the messages.
            KafkaClientError: A record was not read back in time; process none of the messages.
        """
        wait_s = milliseconds("timeout", timeout) / 1000
        until_s = time.monotonic() + wait_s
        self.check()
        fields = {"resource": self.resource, "epoch": self.epoch, "position": end}
        self._confirm(self._session.ask(RecordType.CLAIM_MESSAGES, wait_s, **fields), f"messages up to {end}")
        left_s = max(0.001, until_s - time.monotonic())
        self._confirm(self._session.send_position(self, end, left_s), f"position {end}")

    def release(self, position: int | None = None) -> None:
        """
        Release the resource. The claim ends at once, before the record is written.

        Args:
            position: Where the next holder begins; by default the position set by `commit`.
        """
        self._session.release(self, self.position if position is None else position)

    def end(self, reason: str) -> bool:
        """End the claim (for the session); return False if it had ended before."""
        if self._end:
            return False
        self._end = reason
        return True

    def _confirm(self, applied: Applied, what: str) -> None:
        """Raise an error if the record changed nothing or the claim has ended meanwhile."""
        self.check()
        # The claim itself may still be held: the group is paused, or the position would go back.
        if applied.ignored:
            message = f"{what} of {self.resource!r} changed nothing: {applied.ignored[0]}; stop working on it"
            raise ClaimLostError(message, resource=self.resource, epoch=self.epoch)
