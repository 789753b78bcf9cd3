"""
Implement `receive` and `receive_batch`: wait for room, take a batch, and return it when its START is durable.

Rule 1: strict by default. `receive` never returns more than *max_messages*, and the consumer holds no other messages.
Rule 2: with `prefetch`, the next batches are fetched and their STARTs sent while the caller works on this one. `close`
releases the messages that were not returned, without counting the delivery.
Rule 3: one thread at a time.
Rule 4: if an exception ends `receive` early, at any step (Ctrl+C, a signal handler), the messages that its caller did
not get are fetched again or released. Only `undo_fetch` does this. If it fails, the next `receive` calls it first.

Source: KIP-1206 for the strict limit; RabbitMQ's prefetch, and its warning about the prefetched messages of a dead
consumer.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, TypeVar

from kmq_spark.consumer.batch import Batch
from kmq_spark.errors import KmqError
from kmq_spark.pauses import RateLimit

if TYPE_CHECKING:
    from collections.abc import Callable, Sized

    from kmq_spark.consumer.intake import Intake
    from kmq_spark.consumer.leases import LeaseTable
    from kmq_spark.consumer.started import StartedBatch

Result = TypeVar("Result", bound="Sized")

logger = logging.getLogger(__name__)

_FULL_LOG_S = 60.0
"""Shortest time between two warnings that there is no room."""

_FULL_PAUSE_S = 0.005
"""Interval at which a receiver without room checks for room."""


class Receiver:
    """
    Implementation of `QueueConsumer.receive` and `QueueConsumer.receive_batch`.

    Args:
        intake: Fetches and starts the messages.
        leases: The consumer's leases, to count held messages.
        prefetch: Batches that are fetched and started in addition to the requested one.
    """

    def __init__(self, intake: Intake, leases: LeaseTable, prefetch: int = 0) -> None:
        """Start without messages."""
        self._intake = intake
        self._leases = leases
        self._prefetch = prefetch
        self._pending: deque[StartedBatch] = deque()
        self._undelivered = Batch()
        self._returning = Batch()
        self._needs_undo = False
        self._full_log_limit = RateLimit(_FULL_LOG_S)

    @property
    def prefetches(self) -> bool:
        """Whether batches are fetched ahead."""
        return self._prefetch > 0

    def receive(
        self, max_messages: int, timeout: float, lease_s: float | None, result_of: Callable[[Batch], Result]
    ) -> Result:
        """
        Receive messages.

        Args:
            max_messages: Maximum number of messages to return.
            timeout: Seconds to wait for the first message.
            lease_s: Length of their leases, seconds; None for the consumer's default.
            result_of: Makes the result of the batch. Called here, so that an exception in it loses no message.

        Returns:
            *result_of* a batch of at most *max_messages* messages; empty if none arrived in time or there was no room.

        Raises:
            KmqError: As `QueueConsumer.receive`.
        """
        if self._needs_undo:
            self.undo_fetch()
        # The caller has the messages of the last call, so `undo_fetch` must not release them.
        self._returning = Batch()
        try:
            self._needs_undo = True
            until = time.monotonic() + timeout
            while True:
                messages = result_of(self._next(max_messages, until, lease_s))
                # A batch may have no messages: its records were skipped, deferred or expired.
                if messages or time.monotonic() >= until:
                    self._needs_undo = False
                    return messages
                if self._intake.is_blocked:
                    time.sleep(min(_FULL_PAUSE_S, max(0.0, until - time.monotonic())))
        except BaseException:
            self._needs_undo = True
            try:
                self.undo_fetch()
            except KmqError as error:
                logger.warning("%s; the next receive retries", error, extra={"action": "give_back_failed"})
            raise

    def undo_fetch(self) -> None:
        """
        Undo the fetch of every message that was not returned to a caller.

        Messages whose offset is not committed are fetched again. The others are released without counting the delivery.

        Raises:
            KmqError: Seeking back failed; the next `receive` tries again.
        """
        self._needs_undo = True
        self._intake.undo_fetch()
        for batch in (self._returning, self._undelivered, *[started.content for started in self._pending]):
            batch._release_uncounted()  # noqa: SLF001  # private to the package: not for handlers
        self._returning, self._undelivered = Batch(), Batch()
        self._pending.clear()
        self._needs_undo = False

    def release_undelivered(self) -> None:
        """Release the prefetched messages that were not returned, without counting the delivery."""
        if self._needs_undo:
            # The last `receive` was interrupted, and none followed.
            with contextlib.suppress(KmqError):
                self.undo_fetch()
        unseen, self._undelivered = [self._undelivered], Batch()
        try:
            while self._pending:
                batch = self._pending.popleft()
                self._intake.wait_until_durable(batch)
                self._intake.commit(batch)
                unseen.append(batch.content)
        except KmqError as error:
            # Their STARTs are not durable, so their offsets are not committed: another consumer fetches them.
            logger.warning("%s", error, extra={"action": "start_given_up"})
        for content in unseen:
            content._release_uncounted()  # noqa: SLF001  # private to the package: not for handlers

    def _next(self, max_messages: int, until: float, lease_s: float | None) -> Batch:
        if self._undelivered:
            self._intake.serve_group_if_due()
            return self._take_undelivered(max_messages)
        if not self._pending:
            if not self._wait_for_room(until):
                return Batch()
            self._take(max_messages, max(0.0, until - time.monotonic()), lease_s)
        while self._pending and len(self._pending) <= self._prefetch and self._take(max_messages, 0.0, lease_s):
            pass
        if self._pending:
            batch = self._pending[0]
            self._intake.wait_until_durable(batch)
            self._intake.commit(batch)
            self._undelivered = batch.content
            self._pending.popleft()
        return self._take_undelivered(max_messages)

    def _take_undelivered(self, max_messages: int) -> Batch:
        # Kept until the next call: an exception may prevent the caller from getting them.
        self._returning, self._undelivered = self._undelivered._split(max_messages)  # noqa: SLF001  # private to the package: not for handlers
        return self._returning

    def _take(self, max_messages: int, timeout: float, lease_s: float | None) -> bool:
        batch = self._intake.take(max_messages, timeout, lease_s=lease_s)
        if batch is not None:
            self._pending.append(batch)
        return batch is not None

    def _wait_for_room(self, until: float) -> bool:
        while self._intake.room().max_messages < 1:
            # Serves the group at most once a second, even if `receive` is called often.
            self._intake.serve_group_if_due()
            now = time.monotonic()
            if now >= until:
                self._log_full(now)
                return False
            time.sleep(min(_FULL_PAUSE_S, until - now))
        return True

    def _log_full(self, now: float) -> None:
        held_count = self._leases.held_count(now)
        if held_count and self._full_log_limit.allows():
            logger.warning(
                "fetching paused: %d messages held, max_in_flight is %d (with fewer messages: max_in_flight_bytes is "
                "reached, or a suspect is delivered separately); settle messages or raise the limit",
                held_count, self._intake.max_in_flight, extra={"action": "in_flight_full"},
            )  # fmt: skip
