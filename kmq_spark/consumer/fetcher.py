"""
Read the queue topic in a group: fetch records, buffer the ones that cannot start yet, commit, seek, serve the group.

Rule 1: one thread at a time may use a `Fetcher`. Rebalance callbacks run inside its calls.
Rule 2: a record that is fetched and not started waits in the buffer, in fetch order. No committed offset passes it.
Rule 3: what was fetched under an assignment is handed out under it, or committed under it, or dropped.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka import Message as KafkaMessage

from kmq_spark.consumer.membership import NO_COORDINATOR, Membership
from kmq_spark.consumer.offsets import COMMIT_SKIPPED_S, OffsetCommits
from kmq_spark.failpoints import failpoint
from kmq_spark.kafka.client_errors import UNREACHABLE, client_error
from kmq_spark.kafka.clock import now_s

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from kmq_spark.consumer.leases import LeaseTable
    from kmq_spark.consumer.started import StartedBatch
    from kmq_spark.errors import KmqError

logger = logging.getLogger(__name__)

CONFIRM_S = 1.0
"""
Longest wait for an offset commit: before the first delivery of a process, after a commit that failed, or after half a
session without one.
"""

POLL_S = 0.01
"""Interval of polls while a confirmation is waited for."""

ANSWER_S = 0.001
"""Duration of a poll for an answer that a message or a transaction waits for."""

SERVE_S = 1.0
"""Interval at which the consumer group is served while the buffer has all records that are needed."""

COMMITTED_TIMEOUT_S = 10.0
"""Timeout of a request for the committed offsets of the group."""

DEFAULT_MAX_POLL_MS = 300_000
"""Default of `max.poll.interval.ms`: after this time without a call, the group gives the partitions to others."""

_END = "_PARTITION_EOF"

_TRANSIENT_ERRORS = UNREACHABLE | {"_MAX_POLL_EXCEEDED"}
"""Errors from `consume` that need no action: librdkafka continues, or rejoins the group, by itself."""

_ERROR = KafkaMessage.error


class Fetcher:
    """
    The client that reads a queue topic in a group.

    `owned`: assigned partitions. `unchecked`: those of them in which what is fetched may be started: by others, or by a
    START that had no answer. `started`: batches that were started and not committed, in fetch order.
    """

    def __init__(self, config: Mapping[str, Any], topic: str, start_timeout_s: float, leases: LeaseTable) -> None:
        self.offsets = OffsetCommits(topic)
        self.owned: set[int] = set()
        self.unchecked: set[int] = set()
        self.started: list[StartedBatch] = []
        self._topic = topic
        self._start_timeout_s = start_timeout_s
        self._leases = leases
        # A moment less than by the client's own clock, which it reads before ours.
        self._max_poll_s = int(config.get("max.poll.interval.ms", DEFAULT_MAX_POLL_MS)) / 1000 - 0.05
        # A second with `group.protocol=consumer`: the broker alone knows the session, and its answers wait for nothing.
        self._half_session_s = int(config.get("session.timeout.ms", 2_000)) / 2_000
        self._polled_at = time.monotonic()
        self._unanswered_at = 0.0
        self._has_confirmed = False
        self._buffer: list[KafkaMessage] = []
        self._gathered_since = 0.0
        self._error: KmqError | None = None
        self._paused: set[int] = set()
        self._ends: dict[int, int] = {}
        self._membership = Membership({**config, "enable.partition.eof": True}, topic, self)
        self.client = self._membership.client

    def fetch(self, max_records: int, timeout: float, *, gather_s: float = 0.0) -> list[KafkaMessage]:
        """
        Fetch at most *max_records* records that are available; wait only for the first one, at most *timeout* seconds.

        With *gather_s*, fewer than *max_records* stay in the buffer for so long from the first one on, over several
        calls.
        """
        self._raise_error()
        if not self._has_current_client():
            return []
        if self._ends:
            self._commit_ends()
        self.offsets.send_if_due(self.client)
        if len(self._buffer) < max_records:
            # One record may have come while an answer was waited for: it must not be all that this call finds.
            records = self._consume(max_records - len(self._buffer), 0.0 if self._buffer else timeout)
            if self._buffer:
                records, self._buffer = self._buffer + records, []
        else:
            self.serve_group_if_due()
            records, self._buffer = self._buffer[:max_records], self._buffer[max_records:]
        return self._gather(records, max_records, timeout, gather_s) if gather_s else records

    def of_member(self, records: list[KafkaMessage]) -> list[KafkaMessage]:
        """
        Return those of these records whose partitions the group has not given to another consumer.

        A process that slept for a session has lost them, and its client says so only later. So the group must have
        taken a commit within half a session; if not, it is asked to take the offsets that it has again.
        """
        asked_at, positions = now_s(), self.offsets.positions
        if not positions or asked_at - max(self.offsets.accepted_at, self._unanswered_at) < self._half_session_s:
            return records
        count, until = len(records), time.monotonic() + CONFIRM_S
        self.return_to_buffer(records)  # a rebalance may revoke their partition
        self.offsets.add(positions, 0.0)
        while self.offsets.accepted_at < asked_at:
            if time.monotonic() >= until:
                if self.offsets.is_failing:
                    return []
                # Without an answer: in a classic group it may wait for another member to join again.
                self._unanswered_at = now_s()
                break
            self.offsets.send_if_due(self.client)
            self._poll(ANSWER_S)
        records, self._buffer = self._buffer[:count], self._buffer[count:]
        return records

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

    def commit(self, batch: StartedBatch, *, within_s: float) -> None:
        """
        Commit the offsets after the first of `started`, within *within_s* from the last commit.

        Wait for the first commit of the process, and for one that follows a failed one, at most `CONFIRM_S`.
        """
        is_waited_for = within_s < COMMIT_SKIPPED_S and (self.offsets.is_failing or not self._has_confirmed)
        self.offsets.add(batch.next_offsets, 0.0 if is_waited_for else within_s, batch.starts_from)
        self._end_pending(batch)
        self.offsets.send_if_due(self.client)
        # Without this wait, a message that kills its process immediately would stay uncommitted. Each next process
        # would fetch it again as a first delivery, and each ended lease would add one more redelivered copy.
        if batch.next_offsets and is_waited_for:
            self._wait_until_confirmed(batch, CONFIRM_S)
            self._has_confirmed = True

    def commit_confirmed(self, batch: StartedBatch, timeout: float) -> bool:
        """Commit the offsets after a batch; return whether the group has them. If not, the batch stays in `started`."""
        self.offsets.add(batch.next_offsets, 0.0, batch.starts_from)
        self.offsets.send_if_due(self.client)
        is_confirmed = self._wait_until_confirmed(batch, timeout)
        if is_confirmed:
            self._end_pending(batch)
        return is_confirmed

    def _wait_until_confirmed(self, batch: StartedBatch, timeout: float) -> bool:
        """Serve the commit callback until the group has the offsets. Records that arrive go to the buffer."""
        until = time.monotonic() + timeout
        # A rebalance may drop partitions of the batch meanwhile.
        while not (is_confirmed := self.offsets.are_confirmed(batch.next_offsets)) and time.monotonic() < until:
            self.offsets.send_if_due(self.client)  # again, if the group has refused it
            self._poll(POLL_S)
        return is_confirmed

    def serve_answers(self) -> None:
        """Serve the commit callback, for a transaction that waits for it."""
        if self._has_current_client():
            self._poll(ANSWER_S)

    def serve_group(self) -> None:
        """Serve the consumer group without fetching, so that rebalances proceed while there is no room for messages."""
        if not self._has_current_client():
            return
        if running := self.owned - self._paused:
            self._paused |= running
            self.client.pause(self._topic_partitions(running))
        self.offsets.send_if_due(self.client)
        self._poll(0)

    def serve_group_if_due(self) -> None:
        """Serve the consumer group without fetching, if it was not served for `SERVE_S`."""
        if time.monotonic() - self._polled_at > SERVE_S:
            self.serve_group()

    def drop_started(self) -> dict[int, int]:
        """Drop the batches that are not committed. Return their first offsets, from which they are fetched again."""
        first: dict[int, int] = {}
        for batch in self.started:
            for partition, offset in batch.first_offsets.items():
                first.setdefault(partition, offset)
            if batch.error is not None:
                # A START without an answer may stand in the log, and its lease may run out meanwhile.
                self.unchecked |= batch.first_offsets.keys()
            # If the commit was interrupted, the messages stay held, and the caller releases them.
            batch.drop({p for p, at in batch.next_offsets.items() if self.offsets.positions.get(p, -1) < at})
        self.started.clear()
        return first

    def reseek(self, first: Mapping[int, int]) -> None:
        """
        Seek back, so that every record that was fetched and not started is fetched again.

        A partition from which no record was returned needs no seek. The target of each other partition is the first of
        these that exists: the offset after `started`, the offset to commit, the offset in *first* (of batches that were
        dropped), the committed offset of the group. After an error, call this again before the next fetch.
        """
        self._buffer = []
        self._ends.clear()
        assigned = {each.partition for each in self._call(self.client.assignment)}
        self._forget(self.owned - assigned)
        self.owned |= assigned
        positions = self._call(self.client.position, self._topic_partitions(assigned))
        read_from = {each.partition for each in positions if each.offset >= 0}
        taken = {partition: offset for batch in self.started for partition, offset in batch.next_offsets.items()}
        targets = {**first, **self.offsets.positions, **taken}
        targets.update(self._committed_offsets(read_from - targets.keys()))
        for partition in assigned & targets.keys():
            self._seek(TopicPartition(self._topic, partition, targets[partition]))

    def close(self, timeout: float) -> None:
        """Give back what is started, commit, and leave the consumer group; see `Membership.leave`."""
        self.offsets.let_go()
        self._membership.leave(timeout)

    def _has_current_client(self) -> bool:
        """
        Replace a client that has lost its group. Its partitions count as lost.

        A client that nobody called for `max.poll.interval.ms` leaves the group. It would return the records that it has
        fetched before it reports the loss, which may take a session.
        """
        is_stale = time.monotonic() - self._polled_at >= self._max_poll_s
        if not (is_stale or self._membership.is_lost):
            return True
        if not self._membership.replace("no call came for max.poll.interval.ms" if is_stale else NO_COORDINATOR):
            return not is_stale
        self._forget(set(self.owned))
        self.offsets.use_new_client()
        self.client = self._membership.client
        self._polled_at = time.monotonic()
        return True

    def _poll(self, timeout: float) -> None:
        """Serve the callbacks. A record that arrives goes to the buffer."""
        self._polled_at = time.monotonic()
        record = self.client.poll(timeout)
        if record is not None:
            self._buffer += self._without_errors([record])
        self._membership.raise_caught()

    def _consume(self, max_records: int, timeout: float) -> list[KafkaMessage]:
        if self._paused:
            self.client.resume(self._topic_partitions(self._paused))
            self._paused.clear()
        waiting_count = len(self._buffer)
        good = self._consume_until(max_records, 0)
        if not good and timeout > 0:
            # With `max_records` the call would wait for a full batch until the timeout; this ends at one record.
            until = time.monotonic() + timeout
            while not (good or self._error) and (left_s := until - time.monotonic()) > 0:
                good = self._consume_until(1, left_s)
            if good and max_records > 1:
                # Kept in the buffer during the next call: a rebalance inside it may revoke their partition.
                self._buffer += good
                good = self._consume_until(max_records - 1, 0)
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
        self._polled_at = time.monotonic()
        good = self._without_errors(records)
        self._membership.raise_caught()
        return good

    def _without_errors(self, records: list[KafkaMessage]) -> list[KafkaMessage]:
        """Return the records that are not errors. Keep an error that needs action; the next fetch raises it."""
        if not any(map(_ERROR, records)):
            return records
        good = []
        for record in records:
            error = record.error()
            if error is None:
                good.append(record)
            elif error.name() == _END:
                self._ends[record.partition() or 0] = record.offset() or 0
            elif error.name() not in _TRANSIENT_ERRORS:
                self._error = client_error(error, f"cannot receive from {self._topic}")
        return good

    def _commit_ends(self) -> None:
        """Commit past the records that end transactions: as lag they would keep an autoscaler from zero."""
        waiting = {record.partition() for record in self._buffer}.union(*(each.next_offsets for each in self.started))
        for partition in self._ends.keys() - waiting:
            end = self._ends.pop(partition)
            if 0 <= self.offsets.positions.get(partition, -1) < end:
                self.offsets.add({partition: end}, COMMIT_SKIPPED_S)

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

    def on_assign(self, client: Consumer, partitions: list[TopicPartition]) -> None:
        """Begin to read partitions. For the client, as the other callbacks."""
        self.owned.update(each.partition for each in partitions)
        self.unchecked.update(each.partition for each in partitions)
        if partitions:
            # They may have been paused when they were revoked, and librdkafka would keep them paused.
            client.resume(partitions)
        self._log_rebalance("assigned", partitions)

    def on_revoke(self, client: Consumer, partitions: list[TopicPartition]) -> None:
        """Commit what is started, before the next owner of the partitions reads their offsets, and give it back."""
        gone = {each.partition for each in partitions}
        durable: list[StartedBatch] = []
        for batch in self.started:
            if not gone & batch.next_offsets.keys():
                continue
            if not batch.wait(self._start_timeout_s) or batch.error is not None:
                break  # a later batch has higher offsets; committing those would cover this batch too
            durable.append(batch)
            self.offsets.positions.update({p: at for p, at in batch.next_offsets.items() if p in gone})
            self.offsets.starts_from.update({p: at for p, at in batch.starts_from.items() if p in gone})
        if self.offsets.send_revoked(client, gone):
            for batch in durable:
                batch.drop(gone, is_given_back=True)
        self._forget(gone)
        self._log_rebalance("revoked", partitions)

    def on_lost(self, _client: Consumer, partitions: list[TopicPartition]) -> None:
        """Do not commit: the partitions already have another owner."""
        self._forget({each.partition for each in partitions})
        self._log_rebalance("lost", partitions)

    def on_commit(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        """Handle the response to a commit."""
        self.offsets.on_commit(error, partitions)

    def on_error(self, error: KafkaError) -> None:
        """Keep an error that needs action; the next fetch raises it."""
        if error.name() in {"_AUTHENTICATION", "_SSL", "_FATAL"}:
            self._error = client_error(error, f"cannot receive from {self._topic}")

    def _forget(self, partitions: set[int]) -> None:
        self.owned -= partitions
        self.unchecked -= partitions
        # librdkafka keeps the pause flag of a partition across revoke and assign; `on_assign` resumes it.
        self._paused -= partitions
        self._ends = {each: end for each, end in self._ends.items() if each not in partitions}
        self._buffer = [record for record in self._buffer if record.partition() not in partitions]
        for batch in self.started:
            batch.drop(partitions)
        # Others fetch what is not confirmed again, so no transaction may contain it.
        self._leases.note_unconfirmed({each: self.offsets.confirmed.get(each, 0) for each in partitions})
        self.offsets.forget(partitions)

    def _end_pending(self, batch: StartedBatch) -> None:
        if batch in self.started:
            self.started.remove(batch)

    def _log_rebalance(self, what: str, partitions: list[TopicPartition]) -> None:
        if not partitions:
            return
        numbers = sorted(each.partition for each in partitions)
        logger.info("partitions %s: %s of %s", what, numbers, self._topic, extra={"action": "rebalanced"})

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
