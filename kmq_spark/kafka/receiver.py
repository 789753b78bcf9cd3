"""
`receive`, step by step: wait for room, take a batch, hand it out once its START is durable.

Rule 1: strict unless asked otherwise: nothing is held that was not asked for, and never more is returned than that.
Rule 2: with `prefetch`, the next batches are fetched and their STARTs under way while the caller works on this one;
what nobody has asked for by the end is given back uncounted.
Rule 3: one thread at a time.

Source: KIP-1206 for the strict limit; RabbitMQ's prefetch, and its warning about what a dead consumer had prefetched.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING

from kmq_spark.errors import KmqError

if TYPE_CHECKING:
    from kmq_spark.kafka.batch import Batch
    from kmq_spark.kafka.intake import Intake
    from kmq_spark.kafka.leases import LeaseTable
    from kmq_spark.kafka.message import Message

logger = logging.getLogger(__name__)

_FULL_LOG_S = 60.0
"""How often a receiver that has no room is told so."""

_FULL_PAUSE_S = 0.005
"""How often a receiver that has no room looks for some."""

_SERVE_S = 1.0
"""How often the group is served while there is no room."""


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
        until = time.monotonic() + timeout
        while True:
            messages = self._next(max_messages, until, lease_s)
            # There may be none in a batch: records for others, or for later, or whose time is over.
            if messages or time.monotonic() >= until:
                return messages
            if self._intake.is_blocked:
                time.sleep(min(_FULL_PAUSE_S, max(0.0, until - time.monotonic())))

    def give_back_unseen(self) -> None:
        """Release what was prefetched and nobody has asked for, uncounted."""
        unseen, self._left = self._left, []
        try:
            while self._under_way:
                unseen += self._finish()
        except KmqError as error:
            # Not durable, so not committed: another consumer fetches them.
            logger.warning("%s", error, extra={"action": "start_given_up"})
        for message in unseen:
            message.release_unseen()

    def _next(self, max_messages: int, until: float, lease_s: float | None) -> list[Message]:
        if self._left:
            messages, self._left = self._left[:max_messages], self._left[max_messages:]
            return messages
        if not self._under_way:
            if not self._wait_for_room(until):
                return []
            self._take(max_messages, max(0.0, until - time.monotonic()), lease_s)
        while self._under_way and len(self._under_way) <= self._prefetch and self._take(max_messages, 0.0, lease_s):
            pass
        messages = self._finish() if self._under_way else []
        messages, self._left = messages[:max_messages], messages[max_messages:]
        return messages

    def _take(self, max_messages: int, timeout: float, lease_s: float | None) -> bool:
        batch = self._intake.take(max_messages, timeout, lease_s=lease_s, may_wait=self._prefetch > 0)
        if batch is not None:
            self._under_way.append(batch)
        return batch is not None

    def _finish(self) -> list[Message]:
        batch = self._under_way[0]
        try:
            self._intake.wait_until_durable(batch)
        except BaseException:
            # Ctrl+C in the middle of the wait, for one: nobody has these messages, so they are fetched again.
            self._under_way.clear()
            self._intake.give_back()
            raise
        self._under_way.popleft()
        self._intake.commit(batch)
        return batch.messages

    def _wait_for_room(self, until: float) -> bool:
        served_at = time.monotonic()
        while self._intake.room().max_messages < 1:
            now = time.monotonic()
            if now >= until:
                self._log_full(now)
                return False
            if now - served_at > _SERVE_S:
                served_at = now
                self._intake.idle(0)
            time.sleep(min(_FULL_PAUSE_S, until - now))
        return True

    def _log_full(self, now: float) -> None:
        held_count = self._leases.held_count(now)
        if now - self._full_logged_at > _FULL_LOG_S and held_count:
            self._full_logged_at = now
            logger.warning(
                "receiving nothing: %d messages are held, max_in_flight is %d; settle messages or raise it",
                held_count, self._intake.max_in_flight, extra={"action": "in_flight_full"},
            )  # fmt: skip
