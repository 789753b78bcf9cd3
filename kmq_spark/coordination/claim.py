"""
A claim that this process holds: the right to act on a resource, until it is over.

Rule 1: a claim that was over once stays over, even if the log renews it later: callers have acted on its end.
Rule 2: `check` takes no lock while the claim stands; it may be called before every write.
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
        resource: Its name.
        epoch: Fencing token: hand it to whatever you write to, and refuse older ones there.
        position: Next one to process, as the holder before left it or `commit` has set it; None where there is none.
    """

    __slots__ = ("_end", "_session", "epoch", "position", "resource")

    def __init__(self, session: Session, resource: str, epoch: int, position: int | None) -> None:
        self._session = session
        self._end = ""
        self.resource, self.epoch, self.position = resource, epoch, position

    def __repr__(self) -> str:
        """Name resource and epoch."""
        return f"Claim({self.resource!r}, epoch={self.epoch})"

    @property
    def is_held(self) -> bool:
        """Whether the hold lasts now; a moment later it may be over."""
        return not self._end and not self._session.is_over(self)

    def check(self) -> None:
        """
        Return while the hold lasts.

        Raises:
            ClaimLostError: It is over: the resource was released, another member may hold it, or no renewal has been
                read back from the log for T. Stop what you do with the resource.
        """
        if not self.is_held:
            message = f"claim of {self.resource!r} is over (epoch {self.epoch}): {self._end}; stop working on it"
            raise ClaimLostError(message, resource=self.resource, epoch=self.epoch)

    def commit(self, position: int, *, timeout: float | timedelta = 0.0) -> None:
        """
        Set the position; it goes with the next heartbeat, or at once.

        Args:
            position: Next one to process. Not below the one that stands.
            timeout: Above 0: send it now, and wait at most so long until it is read back; seconds or a timedelta.

        Raises:
            ClaimLostError: The hold is over, or was over before the position was read back.
            KafkaClientError: The position was not read back in time; it may stand or not.
            UsageError: The position is below the one that stands.
        """
        self.check()
        if self.position is not None and position < self.position:
            message = (
                f"position of {self.resource!r} goes back: got {position!r}; expected {self.position} or more; "
                "pause the group to set it back"
            )
            raise UsageError(message)
        if (wait_s := milliseconds("timeout", timeout) / 1000) > 0:
            self._confirm(self._session.send_position(self, position, wait_s), f"position {position}")
        else:
            self._session.note_position(self, position)

    def claim_messages(self, end: int, *, timeout: float | timedelta = 30.0) -> None:
        """
        Claim the messages from the position up to an end, for at most once; hand them out after this has returned.

        Two records, each read back: CLAIM_MESSAGES up to the end, then a HEARTBEAT with the end as the position. After
        a crash anywhere the next holder begins at the end, or, where nothing was handed out, at the position before.

        Args:
            end: Next one behind the messages.
            timeout: Longest time for both, seconds or a timedelta.

        Raises:
            ClaimLostError: The hold is over; hand out none of the messages.
            KafkaClientError: They were not read back in time; hand out none of the messages.
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
        Give the resource up. The claim is over at once, before the record is written.

        Args:
            position: Where the next holder begins; None: where `commit` has set it.
        """
        self._session.release(self, self.position if position is None else position)

    def end(self, reason: str) -> bool:
        """Note that the claim is over; return whether it was not over before. For the session."""
        if self._end:
            return False
        self._end = reason
        return True

    def _confirm(self, applied: Applied, what: str) -> None:
        """Raise where a record about this claim was refused, or where the claim is over meanwhile."""
        self.check()
        # The claim may stand all the same: the group is paused, or the position would go back.
        if applied.ignored:
            message = f"{what} of {self.resource!r} changed nothing: {applied.ignored[0]}; stop working on it"
            raise ClaimLostError(message, resource=self.resource, epoch=self.epoch)
