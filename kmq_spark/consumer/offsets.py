"""
Commit the offsets of a consumer group, gathered, and again after a failure.

Rule 1: an offset may wait for the next commit: after a large batch up to `GATHER_COMMITS_S` from the last commit, after
skipped records up to `COMMIT_SKIPPED_S`.
Rule 2: all commits come from the thread that fetches, so they are in order.
Rule 3: an offset whose commit failed is committed again, until its partition goes to another consumer.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException, TopicPartition

from kmq_spark.failpoints import failpoint
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


class OffsetCommits:
    """
    The offsets that the group has of this consumer, and those that it does not have yet.

    Args:
        topic: Queue topic.

    Attributes:
        positions: Offset to commit or committed, by assigned partition.
        has_confirmed: Whether the response to a commit of this process has arrived, or is no longer waited for.
    """

    def __init__(self, topic: str) -> None:
        """Begin without offsets."""
        self.positions: dict[int, int] = {}
        self.has_confirmed = False
        self._topic = topic
        self._uncommitted: dict[int, int] = {}
        self._commit_at = math.inf
        self._committed_at = time.monotonic()
        self._failed_commits = 0
        self._warning_limit = RateLimit(COMMIT_LOG_S)

    @property
    def is_waiting(self) -> bool:
        """Whether an offset waits for its commit."""
        return bool(self._uncommitted)

    def add(self, positions: Mapping[int, int], within_s: float) -> None:
        """Commit offsets within so many seconds from the last commit, with the next call of `send_if_due`."""
        self.positions.update(positions)
        self._uncommitted.update(positions)
        self._commit_at = min(self._commit_at, self._committed_at + within_s)

    def forget(self, partitions: Collection[int]) -> None:
        """Forget the offsets of partitions that are no longer assigned."""
        for partition in partitions:
            self.positions.pop(partition, None)
            self._uncommitted.pop(partition, None)

    def send_if_due(self, client: Consumer) -> None:
        """Commit what waits, if one of the offsets is due."""
        if time.monotonic() >= self._commit_at:
            self.send(client)

    def send(self, client: Consumer) -> None:
        """Commit what waits. Do not wait for the response."""
        self._commit_at = math.inf
        if not self._uncommitted:
            return
        self._committed_at = time.monotonic()
        positions, self._uncommitted = self._uncommitted, {}
        try:
            client.commit(offsets=topic_partitions(self._topic, positions), asynchronous=True)
            failpoint("consumer.commit-sent")
        except KafkaException as error:
            self.on_commit(error.args[0], topic_partitions(self._topic, positions))

    def send_revoked(self, client: Consumer, partitions: Collection[int], started: Mapping[int, int]) -> None:
        """
        Commit the offsets of revoked partitions and wait for the response, before their next owner reads them.

        Args:
            client: The client that the group takes the partitions from.
            partitions: Revoked partitions.
            started: Offset after the records whose STARTs have become durable and that were not added yet.
        """
        self.positions.update(started)
        positions = {partition: offset for partition, offset in self.positions.items() if partition in partitions}
        if not positions:
            return
        try:
            client.commit(offsets=topic_partitions(self._topic, positions), asynchronous=False)
        except KafkaException as error:
            self._log_failure(error.args[0].str())
        failpoint("consumer.revoked")

    def on_commit(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        """Handle the response to a commit."""
        failed = [each for each in partitions if error is not None or each.error is not None]
        for each in failed:
            if each.partition in self.positions:
                self._uncommitted.setdefault(each.partition, self.positions[each.partition])
                self._commit_at = min(self._commit_at, self._committed_at + COMMIT_SKIPPED_S)
        reason = error or next((each.error for each in failed), None)
        if reason is not None:
            self._log_failure(reason.str())
            return
        self.has_confirmed = True
        failpoint("consumer.commit-done")

    def _log_failure(self, reason: str) -> None:
        self._failed_commits += 1
        if not self._warning_limit.allows():
            return
        logger.warning(
            "cannot commit offsets of %s: %s; %d commits failed since the last warning, they are retried",
            self._topic, reason, self._failed_commits, extra={"action": "commit_failed"},
        )  # fmt: skip
        self._failed_commits = 0


def topic_partitions(topic: str, positions: Mapping[int, int]) -> list[TopicPartition]:
    """Return offsets of a topic, given by partition, as the client takes them."""
    return [TopicPartition(topic, partition, offset) for partition, offset in positions.items()]
