"""
Commit the offsets of a consumer group, gathered, and again after a failure.

Rule 1: an offset may wait for the next commit: after a large batch up to `GATHER_COMMITS_S` from the last commit, after
skipped records up to `COMMIT_SKIPPED_S`.
Rule 2: commits are sent one after the other, so they are in order.
Rule 3: an offset whose commit failed is committed again, until its partition goes to another consumer.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException, TopicPartition

from kmq_spark.failpoints import failpoint
from kmq_spark.kafka.clock import now_s
from kmq_spark.pauses import RateLimit

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from confluent_kafka import Consumer, KafkaError

logger = logging.getLogger(__name__)

GATHER_COMMITS_S = 0.05
GATHER_FROM = 100
"""
A batch of `GATHER_FROM` messages or more is committed with the next ones, if the last commit is less than
`GATHER_COMMITS_S` ago: a consumer at full speed commits 20 times a second instead of hundreds of times. The cost: if it
is killed before its next fetch, the next owner of its partitions fetches at most the batches of this time again.
"""

COMMIT_SKIPPED_S = 1.0
"""Longest time without a commit after skipped records. The only cost: a crash reads these records again."""

COMMIT_LOG_S = 10.0
"""Shortest time between two warnings about failed offset commits. In a rebalance the commit of every batch may fail."""


OF_TOPIC = "topic "
"""Start of the metadata of an offset: Kafka keeps a group's offsets by the name of a topic, which another may get."""


class OffsetCommits:
    """
    The offsets of assigned partitions that the group has of this consumer, and those that it does not have yet.

    `metadata`: goes with each offset, `OF_TOPIC` and the id of the topic; after it `starts_from`, the marker from which
    on lies what was started behind the offset. `positions`: offset to commit or committed.
    `confirmed`: offset that the group's coordinator has confirmed; kept when the partition goes to another consumer,
    which begins there or later. `accepted_at`: when the last commit that the group has taken was sent.
    `is_failing`: the last commit failed.
    """

    def __init__(self, topic: str) -> None:
        self.metadata = ""
        self.starts_from: dict[int, int] = {}
        self.positions: dict[int, int] = {}
        self.confirmed: dict[int, int] = {}
        self._topic = topic
        self._uncommitted: dict[int, int] = {}
        self._commit_at = math.inf
        self._committed_at = time.monotonic()
        self.accepted_at = self._sent_at = now_s()
        # The client may send a commit again after a later one: an answer counts when no other is awaited.
        self._awaited_count = 0
        self._answered: dict[int, int] = {}
        # A transaction commits offsets in its own thread. Reentrant: for signal handlers.
        self._changed = threading.Condition(threading.RLock())
        # Held by the thread that commits, without `_changed`: the client makes this thread wait until another thread's
        # call has ended, and `on_commit`, which needs `_changed`, runs inside that call.
        self._sending = threading.RLock()
        self.is_failing = False
        self._failed_commits = 0
        self._warning_limit = RateLimit(COMMIT_LOG_S)

    def add(self, positions: Mapping[int, int], within_s: float, starts_from: Mapping[int, int] | None = None) -> None:
        """Commit offsets within so many seconds from the last commit, with the next call of `send_if_due`."""
        with self._changed:
            if positions:
                self.positions.update(positions)
                self.starts_from.update(starts_from or {})
                self._uncommitted.update(positions)
                self._commit_at = min(self._commit_at, self._committed_at + within_s)

    def forget(self, partitions: Collection[int]) -> None:
        """Forget the offsets of partitions that are no longer assigned, except those that are confirmed."""
        with self._changed:
            for partition in partitions:
                self.positions.pop(partition, None)
                self.starts_from.pop(partition, None)
                self._uncommitted.pop(partition, None)

    def use_new_client(self) -> None:
        """Await no answer: the client that would give it was replaced, and the group takes no commit of it."""
        with self._changed:
            self._awaited_count = 0

    def let_go(self) -> None:
        """
        Release what an interrupt of this thread has left held, or the thread that leaves the group would wait for ever.

        Ctrl+C between the last line of a `with` block and its exit skips the exit (Python's issue 29988).
        """
        for lock in (self._changed, self._sending):
            with contextlib.suppress(RuntimeError):
                while True:
                    lock.release()

    def are_confirmed(self, positions: Mapping[int, int]) -> bool:
        """Return whether the group has these offsets, or later ones."""
        return all(self.confirmed.get(partition, -1) >= offset for partition, offset in positions.items())

    def wait(self, timeout: float) -> None:
        """Wait for the next answer, which the thread that polls the client takes."""
        with self._changed:
            self._changed.wait(timeout)

    def send(self, client: Consumer) -> None:
        """Commit what waits, due or not. Do not wait for the response."""
        with self._changed:
            self._commit_at = -math.inf
        self.send_if_due(client)

    def send_if_due(self, client: Consumer) -> None:
        """Commit what waits, if one of the offsets is due. Wait neither for the response nor for another commit."""
        while time.monotonic() >= self._commit_at and self._sending.acquire(blocking=False):
            try:
                self._send(client)
            finally:
                self._sending.release()

    def _send(self, client: Consumer) -> None:
        with self._changed:
            self._commit_at = math.inf
            if not self._uncommitted:
                return
            self._committed_at, self._sent_at = time.monotonic(), now_s()
            positions, self._uncommitted = self._uncommitted, {}
            places = self._places(positions)
            self._awaited_count += 1
        try:
            client.commit(offsets=places, asynchronous=True)
            failpoint("consumer.commit-sent")
        except KafkaException as error:
            self.on_commit(error.args[0], places)

    def send_revoked(self, client: Consumer, partitions: Collection[int]) -> bool:
        """Commit the offsets of revoked partitions before their next owner reads them; return whether that worked."""
        with self._changed:
            positions = {partition: offset for partition, offset in self.positions.items() if partition in partitions}
            if not positions:
                return True
            try:
                client.commit(offsets=self._places(positions), asynchronous=False)
            except KafkaException as error:
                self._log_failure(error.args[0].str())
                return False
            else:
                # After a rebalance the group takes no commit that was sent before it, so none that is still awaited.
                self.confirmed.update(positions)
                return True
            finally:
                failpoint("consumer.revoked")

    def on_commit(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        """Handle the response to a commit."""
        reason = error
        with self._changed:
            self._awaited_count = max(0, self._awaited_count - 1)
            for each in partitions:
                if each.partition not in self.positions:
                    continue
                if failure := error or each.error:
                    reason = failure
                    self._uncommitted.setdefault(each.partition, self.positions[each.partition])
                    self._commit_at = min(self._commit_at, self._committed_at + COMMIT_SKIPPED_S)
                else:
                    self._answered[each.partition] = max(each.offset, self._answered.get(each.partition, -1))
            self._confirm()
            self.is_failing = reason is not None
            if not (self._awaited_count or self.is_failing):
                self.accepted_at = self._sent_at
        if reason is not None:
            self._log_failure(reason.str())
            return
        failpoint("consumer.commit-done")

    def _places(self, positions: Mapping[int, int]) -> list[TopicPartition]:
        return [TopicPartition(self._topic, each, at, self._metadata_of(each)) for each, at in positions.items()]

    def _metadata_of(self, partition: int) -> str:
        place = self.starts_from.get(partition) if self.metadata else None
        return self.metadata if place is None else f"{self.metadata} {place}"

    def _confirm(self) -> None:
        if not self._awaited_count:
            for partition, offset in self._answered.items():
                self.confirmed[partition] = max(offset, self.confirmed.get(partition, -1))
            self._answered.clear()
        self._changed.notify_all()

    def _log_failure(self, reason: str) -> None:
        self._failed_commits += 1
        if not self._warning_limit.allows():
            return
        logger.warning(
            "cannot commit offsets of %s: %s; %d commits failed since the last warning, they are retried",
            self._topic, reason, self._failed_commits, extra={"action": "commit_failed"},
        )  # fmt: skip
        self._failed_commits = 0
