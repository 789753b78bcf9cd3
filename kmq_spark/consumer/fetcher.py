"""
Read the queue topic: fetch records, buffer the ones that cannot start yet, seek, serve the group.

How the client joins and leaves the group, and when it is replaced: `membership.py`. When it commits offsets:
`offset_commits.py`.

Rule 1: one thread at a time may use a `Fetcher`. Rebalance callbacks run inside its calls.
Rule 2: a record that is fetched and not started waits in the buffer, in fetch order. No committed offset passes it.
Rule 3: librdkafka keeps the pause flag of a partition across revoke and assign, so assigned partitions are resumed.
Rule 4: if the client is replaced, the partitions count as lost.
Rule 5: an exception may lose fetched records at any step. `reseek` does not need them: it seeks to the offset
after the records that were taken.

Source: KIP-429, for which partitions a rebalance revokes and which it keeps.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka import Message as KafkaMessage

from kmq_spark.consumer.membership import Handlers, Membership
from kmq_spark.consumer.offsets import COMMIT_SKIPPED_S, OffsetCommits
from kmq_spark.errors import KmqError
from kmq_spark.failpoints import failpoint
from kmq_spark.kafka.client_errors import UNREACHABLE, client_error

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from kmq_spark.consumer.missing_offsets import MissingOffsets

logger = logging.getLogger(__name__)

CONFIRM_S = 1.0
"""Longest wait for the first offset commit of a process, before its first delivery. A rebalance may delay it."""

CONFIRM_POLL_S = 0.01

SERVE_S = 1.0
"""Interval at which the consumer group is served while the buffer has all records that are needed."""

COMMITTED_TIMEOUT_S = 10.0
"""Timeout of a request for the committed offsets of the group."""

_TRANSIENT_ERRORS = UNREACHABLE | {"_PARTITION_EOF", "_MAX_POLL_EXCEEDED"}
"""Errors from `consume` that need no action: librdkafka continues, or rejoins the group, by itself."""


_ERROR = KafkaMessage.error


class Fetcher:
    """
    The client that reads a queue topic in a group.

    Args:
        config: librdkafka settings of the consumer.
        topic: Queue topic.
        started_positions: Called with the partitions that are revoked. Returns, by partition, the offset after the
            records whose STARTs have become durable and whose offset is not committed yet.
        missing_offsets: Checks whether assigned partitions have committed offsets; None for no check.

    Attributes:
        owned: Assigned partitions.
        offset_commits: The offsets of this client in its group.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        topic: str,
        started_positions: Callable[[set[int]], Mapping[int, int]],
        missing_offsets: MissingOffsets | None = None,
    ) -> None:
        """Subscribe to the topic. Partitions are assigned during the first `fetch`."""
        self.offset_commits = OffsetCommits(topic)
        self._topic = topic
        self._started_positions = started_positions
        self._missing_offsets = missing_offsets
        self._unchecked: set[int] = set()
        self.owned: set[int] = set()
        self._served_at = time.monotonic()
        self._buffer: list[KafkaMessage] = []
        self._gathered_since = 0.0
        self._error: KmqError | None = None
        self._paused: set[int] = set()
        handlers = Handlers(
            self._on_assign, self._on_revoke, self._on_lost, self.offset_commits.on_commit, self._on_error
        )
        self._membership = Membership(config, topic, handlers)
        self.client = self._membership.client

    def fetch(
        self, max_records: int, timeout: float, *, at_least: int = 1, gather_s: float = 0.0
    ) -> list[KafkaMessage]:
        """
        Fetch the records that are available. Wait only for the first one, unless *gather_s* is set.

        Args:
            max_records: Maximum number of records to return, at least 1.
            timeout: Seconds to wait for the first record.
            at_least: If the buffer has records, but fewer than this, fetch more without waiting.
            gather_s: Seconds from the first record for which fewer than *max_records* stay in the buffer, so that more
                can arrive. Over several calls: each waits at most *timeout*.

        Returns:
            At most *max_records* records. If the buffer has *at_least* records or more, they all come from the buffer.

        Raises:
            KmqError: The client reported an error that needs action.
        """
        self._raise_error()
        if self._membership.is_lost and self._membership.replace():
            self._forget(set(self.owned))
            self.client = self._membership.client
        if self.offset_commits.is_waiting:
            self.offset_commits.send_if_due(self.client)
        at_least = max_records if gather_s else at_least
        wanted = at_least - len(self._buffer) if self._buffer else max_records
        if wanted > 0:
            records = self._consume(wanted, 0.0 if self._buffer else timeout)
            if self._buffer:
                records, self._buffer = self._buffer + records, []
        else:
            self.serve_group_if_due()
            records, self._buffer = self._buffer[:max_records], self._buffer[max_records:]
        if records and self._unchecked:
            self._check_offsets()
        return self._gather(records, max_records, timeout, gather_s) if gather_s else records

    def _gather(
        self, records: list[KafkaMessage], max_records: int, timeout: float, gather_s: float
    ) -> list[KafkaMessage]:
        """Return the records if they are enough, or have waited long enough. Otherwise put them into the buffer."""
        if records and len(records) < max_records:
            now = time.monotonic()
            self._gathered_since = self._gathered_since or now
            until = self._gathered_since + gather_s
            if now < until:
                # Kept in the buffer during the call: a rebalance inside it may revoke their partition.
                self.return_to_buffer(records)
                wait = min(timeout, until - now)
                more = self._consume_until(max_records - len(records), wait) if wait > 0 else []
                records, self._buffer = self._buffer + more, []
                if len(records) < max_records and time.monotonic() < until:
                    self.return_to_buffer(records)
                    return []
        self._gathered_since = 0.0
        return records

    def return_to_buffer(self, records: Sequence[KafkaMessage]) -> None:
        """Put records that were fetched and not started back to the front of the buffer."""
        self._buffer = [*records, *self._buffer]

    def commit(self, positions: Mapping[int, int], *, within_s: float) -> None:
        """
        Commit offsets of the partitions that are still assigned. Do not wait for the response.

        Args:
            positions: Offset after the records that were started or skipped, by partition.
            within_s: Seconds from the last commit in which to commit; 0 for now. Later only with the next call.
        """
        owned = {partition: offset for partition, offset in positions.items() if partition in self.owned}
        self.offset_commits.add(owned, within_s)
        if owned and within_s < COMMIT_SKIPPED_S and not self.offset_commits.has_confirmed:
            self.offset_commits.send(self.client)
            self._wait_for_confirmation()
        else:
            self.offset_commits.send_if_due(self.client)

    def is_position_at_least(self, partition: int, offset: int) -> bool:
        """Return whether the offset to commit of an assigned partition is at or after *offset*."""
        return self.offset_commits.positions.get(partition, -1) >= offset

    def serve_group(self, timeout: float) -> None:
        """
        Serve the consumer group without fetching, so that rebalances proceed while there is no room for messages.

        Args:
            timeout: Seconds to serve the group.
        """
        running = self.owned - self._paused
        if running:
            self._paused |= running
            self.client.pause(self._topic_partitions(running))
        if self.offset_commits.is_waiting:
            self.offset_commits.send_if_due(self.client)
        self._served_at = time.monotonic()
        record = self.client.poll(timeout)
        if record is not None:
            self._buffer += self._without_errors([record])
        self._membership.raise_caught()

    def serve_group_if_due(self) -> None:
        """Serve the consumer group without fetching, if it was not served for `SERVE_S`."""
        if time.monotonic() - self._served_at > SERVE_S:
            self.serve_group(0)

    def reseek(self, taken: Mapping[int, int], first: Mapping[int, int]) -> None:
        """
        Seek back, so that every record that was fetched and not taken is fetched again.

        A partition from which no record was returned needs no seek. The target of each other partition is the first of
        these that exists: its offset in *taken*, the offset to commit, its offset in *first*, the committed offset of
        the group.

        Args:
            taken: Offset after the records that are being started, by partition.
            first: Offset of the first record that was being started and is to be fetched again, by partition.

        Raises:
            KmqError: A request or a seek failed. Call this method again before the next fetch.
        """
        self._buffer = []
        assigned = {each.partition for each in self._call(self.client.assignment)}
        self._forget(self.owned - assigned)
        self.owned |= assigned
        positions = self._call(self.client.position, self._topic_partitions(assigned))
        read_from = {
            each.partition for each in positions if each.offset >= 0
        }  # at least one of its records was returned
        targets = {**first, **self.offset_commits.positions, **taken}
        targets.update(self._committed_offsets(read_from - targets.keys()))
        for partition in assigned & targets.keys():
            self._seek(TopicPartition(self._topic, partition, targets[partition]))

    def close(self, timeout: float) -> None:
        """
        Commit and leave the consumer group; see `Membership.leave`.

        Args:
            timeout: Seconds to wait.

        Raises:
            KmqError: The client reported an error.
        """
        self._membership.leave(timeout, lambda: self.owned)

    def _check_offsets(self) -> None:
        """Check the committed offsets of new partitions, before the first delivery and offset commit of each."""
        partitions, self._unchecked = self._unchecked, set()
        if self._missing_offsets is not None:
            self._missing_offsets.check(self.client, partitions)

    def _consume(self, max_records: int, timeout: float) -> list[KafkaMessage]:
        if self._paused:
            self.client.resume(self._topic_partitions(self._paused))
            self._paused.clear()
        waiting_count = len(self._buffer)
        try:
            records = self.client.consume(max_records, 0)
            if not records and timeout > 0:
                # With `max_records` the call would wait for a full batch until the timeout; this ends at one record.
                records = self.client.consume(1, timeout)
                if records and max_records > 1:
                    # Kept in the buffer during the next call: a rebalance inside it may revoke their partition.
                    self._buffer += self._without_errors(records)
                    records = self.client.consume(max_records - 1, 0)
        except KafkaException as error:
            raise client_error(error, f"cannot receive from {self._topic}") from error
        self._served_at = time.monotonic()
        good = self._without_errors(records)
        self._membership.raise_caught()
        if good or len(self._buffer) > waiting_count:
            failpoint("consumer.fetched")
        elif not self._buffer:
            self._raise_error()
        return good

    def _consume_until(self, max_records: int, timeout: float) -> list[KafkaMessage]:
        """Consume until there are *max_records* or the time is over."""
        try:
            records = self.client.consume(max_records, timeout)
        except KafkaException as error:
            raise client_error(error, f"cannot receive from {self._topic}") from error
        self._served_at = time.monotonic()
        good = self._without_errors(records)
        self._membership.raise_caught()
        return good

    def _without_errors(self, records: list[KafkaMessage]) -> list[KafkaMessage]:
        """Return the records that are not errors. Keep an error that needs action; the next fetch raises it."""
        if not any(map(_ERROR, records)):
            return records
        for record in records:
            error = record.error()
            if error is not None and error.name() not in _TRANSIENT_ERRORS:
                self._error = client_error(error, f"cannot receive from {self._topic}")
        return [record for record in records if record.error() is None]

    def _wait_for_confirmation(self) -> None:
        """
        Wait up to `CONFIRM_S` for the response to the first offset commit of this process, before the first delivery.

        Without this wait, a message that kills its process immediately would stay uncommitted. Each next process would
        fetch it again as a first delivery, and each ended lease would add one more redelivered copy.
        """
        until = time.monotonic() + CONFIRM_S
        while not self.offset_commits.has_confirmed and time.monotonic() < until:
            # `poll` serves the commit callback; it may also return a record.
            record = self.client.poll(CONFIRM_POLL_S)
            if record is not None:
                self._buffer += self._without_errors([record])
            self._membership.raise_caught()
        self.offset_commits.has_confirmed = True

    def _seek(self, position: TopicPartition) -> None:
        try:
            self.client.seek(position)
        except KafkaException as error:
            if error.args[0].name() == "_STATE":
                return  # assigned just now: fetching has not begun and will begin at the committed offset
            # Continuing at the current position would skip messages, and the next commit would lose them. Only a new
            # consumer, which begins at the committed offset, is safe.
            raise client_error(
                error, f"cannot seek back in {self._topic}; close this consumer and create a new one"
            ) from error

    def _committed_offsets(self, partitions: Collection[int]) -> dict[int, int]:
        """Return the offset at which the group begins to read, by partition."""
        if not partitions:
            return {}
        found = self._call(self.client.committed, self._topic_partitions(partitions), COMMITTED_TIMEOUT_S)
        return {each.partition: each.offset if each.offset >= 0 else OFFSET_BEGINNING for each in found}

    def _call(self, ask: Callable[..., list[TopicPartition]], *args: object) -> list[TopicPartition]:
        try:
            return ask(*args)
        except KafkaException as error:
            raise client_error(error, f"cannot read the offsets of {self._topic}") from error

    def _topic_partitions(self, partitions: Collection[int]) -> list[TopicPartition]:
        return [TopicPartition(self._topic, partition) for partition in partitions]

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self.owned.update(each.partition for each in partitions)
        self._unchecked.update(each.partition for each in partitions)
        if partitions:
            # They may have been paused when they were revoked, and librdkafka would keep them paused.
            consumer.resume(partitions)
        self._log_rebalance("assigned", partitions)

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Commit the offsets of started messages before the next owner of the partitions reads them."""
        gone = {each.partition for each in partitions}
        self.offset_commits.send_revoked(consumer, gone, self._started_positions(gone))
        self._forget(gone)
        self._log_rebalance("revoked", partitions)

    def _on_lost(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Do not commit: the partitions already have another owner."""
        self._forget({each.partition for each in partitions})
        self._log_rebalance("lost", partitions)

    def _forget(self, partitions: set[int]) -> None:
        self.owned -= partitions
        self._paused -= partitions
        self._unchecked -= partitions
        self._buffer = [record for record in self._buffer if record.partition() not in partitions]
        self.offset_commits.forget(partitions)

    def _log_rebalance(self, what: str, partitions: list[TopicPartition]) -> None:
        if not partitions:
            return
        numbers = sorted(each.partition for each in partitions)
        logger.info("partitions %s: %s of %s", what, numbers, self._topic, extra={"action": "rebalanced"})

    def _on_error(self, error: KafkaError) -> None:
        if error.name() in {"_AUTHENTICATION", "_SSL", "_FATAL"}:
            self._error = client_error(error, f"cannot receive from {self._topic}")

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
