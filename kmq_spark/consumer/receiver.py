"""
`receive`, step by step: wait for room, take a batch, hand it out once its START is durable.

Rule 1: strict unless asked otherwise: nothing is held that was not asked for, and never more is returned than that.
Rule 2: with `prefetch`, the next batches are fetched and their STARTs under way while the caller works on this one;
what nobody has asked for by the end is given back uncounted.
Rule 3: one thread at a time.
Rule 4: whatever ends a `receive` early, at whatever step (Ctrl+C, a signal handler's exception), the messages that its
caller did not get are given back, by `give_back` alone; where that fails, the next `receive` does it first.

Source: KIP-1206 for the strict limit; RabbitMQ's prefetch, and its warning about what a dead consumer had prefetched.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from typing import TYPE_CHECKING

from kmq_spark.errors import KmqError

if TYPE_CHECKING:
    from kmq_spark.consumer.batch import Batch
    from kmq_spark.consumer.intake import Intake
    from kmq_spark.consumer.leases import LeaseTable
    from kmq_spark.consumer.message import Message

logger = logging.getLogger(__name__)

_FULL_LOG_S = 60.0
"""How often a receiver that has no room is told so."""

_FULL_PAUSE_S = 0.005
"""How often a receiver that has no room looks for some."""


class Receiver:
    """
    Receives for one consumer.

    Args:
        intake: Where messages come from.
        leases: The consumer's leases, for what is held.
        prefetch: Batches that may be under way beyond the one that is asked for.
    """

    def __init__(self, intake: Intake, leases: LeaseTable, prefetch: int = 0) -> None:
        """Hold nothing yet."""
        self._intake = intake
        self._leases = leases
        self._prefetch = prefetch
        self._under_way: deque[Batch] = deque()
        self._left: list[Message] = []
        self._returning: list[Message] = []
        self._is_torn = False
        self._full_logged_at = float("-inf")

    @property
    def prefetches(self) -> bool:
        """Whether anything is fetched ahead."""
        return self._prefetch > 0

    def receive(self, max_messages: int, timeout: float, lease_s: float | None) -> list[Message]:
        """
        Receive messages.

        Args:
            max_messages: Most to return.
            timeout: Seconds to wait for the first.
            lease_s: Length of their leases, seconds; None for the consumer's.

        Raises:
            KmqError: As `QueueConsumer.receive`.
        """
        if self._is_torn:
            self.give_back()
        # The caller has those of the last call: they are not given back with what this one leaves behind.
        self._returning = []
        try:
            self._is_torn = True
            until = time.monotonic() + timeout
            while True:
                messages = self._next(max_messages, until, lease_s)
                # There may be none in a batch: records for others, or for later, or whose time is over.
                if messages or time.monotonic() >= until:
                    self._is_torn = False
                    return messages
                if self._intake.is_blocked:
                    time.sleep(min(_FULL_PAUSE_S, max(0.0, until - time.monotonic())))
        except BaseException:
            self._is_torn = True
            try:
                self.give_back()
            except KmqError as error:
                logger.warning("%s; the next receive tries again", error, extra={"action": "give_back_failed"})
            raise

    def give_back(self) -> None:
        """
        Give back every message that is fetched and that no caller has: those without a position are fetched again.

        Raises:
            KmqError: It is not possible now; the next `receive` tries it again.
        """
        self._is_torn = True
        self._intake.give_back()
        for messages in (self._returning, self._left, *[batch.messages for batch in self._under_way]):
            for message in messages:
                message._release_unseen()  # noqa: SLF001  # private to the package: not for handlers
        self._returning, self._left = [], []
        self._under_way.clear()
        self._is_torn = False

    def give_back_unseen(self) -> None:
        """Release what was prefetched and no caller has asked for, uncounted."""
        if self._is_torn:
            # Interrupted, and never called again.
            with contextlib.suppress(KmqError):
                self.give_back()
        unseen, self._left = self._left, []
        try:
            while self._under_way:
                batch = self._under_way.popleft()
                self._intake.wait_until_durable(batch)
                self._intake.commit(batch)
                unseen += batch.messages
        except KmqError as error:
            # Not durable, so not committed: they are fetched again by another consumer.
            logger.warning("%s", error, extra={"action": "start_given_up"})
        for message in unseen:
            message._release_unseen()  # noqa: SLF001  # private to the package: not for handlers

    def _next(self, max_messages: int, until: float, lease_s: float | None) -> list[Message]:
        if self._left:
            self._intake.serve()
            return self._take_left(max_messages)
        if not self._under_way:
            if not self._wait_for_room(until):
                return []
            self._take(max_messages, max(0.0, until - time.monotonic()), lease_s)
        while self._under_way and len(self._under_way) <= self._prefetch and self._take(max_messages, 0.0, lease_s):
            pass
        if self._under_way:
            batch = self._under_way[0]
            self._intake.wait_until_durable(batch)
            self._intake.commit(batch)
            self._left = batch.messages
            self._under_way.popleft()
        return self._take_left(max_messages)

    def _take_left(self, max_messages: int) -> list[Message]:
        # Noted before they leave the list, and until the next call: the caller may never get them.
        self._returning = self._left[:max_messages]
        self._left = self._left[max_messages:]
        return self._returning

    def _take(self, max_messages: int, timeout: float, lease_s: float | None) -> bool:
        batch = self._intake.take(max_messages, timeout, lease_s=lease_s)
        if batch is not None:
            self._under_way.append(batch)
        return batch is not None

    def _wait_for_room(self, until: float) -> bool:
        while self._intake.room().max_messages < 1:
            # Once a second, however short the calls are.
            self._intake.serve()
            now = time.monotonic()
            if now >= until:
                self._log_full(now)
                return False
            time.sleep(min(_FULL_PAUSE_S, until - now))
        return True

    def _log_full(self, now: float) -> None:
        held_count = self._leases.held_count(now)
        if now - self._full_logged_at > _FULL_LOG_S and held_count and not self._intake.is_queue_full():
            self._full_logged_at = now
            logger.warning(
                "receiving nothing: %d messages are held, max_in_flight is %d; settle messages or raise it",
                held_count, self._intake.max_in_flight, extra={"action": "in_flight_full"},
            )  # fmt: skip
