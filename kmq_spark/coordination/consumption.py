"""
Consume a topic with claims: one owner a partition, in order, from the position in the log.

Rule 1: a partition `n` of topic `clicks` is the resource `clicks/n`; its position is the next Kafka offset.
Rule 2: at least once: the position moves when a batch is done, and goes with the next heartbeat. Messages may be
acknowledged in any order; the position is the lowest one that was not.
Rule 3: at most once: a batch is handed out after its end was claimed and its position was read back from the log. A
crash anywhere loses that batch at most, and repeats nothing.
Rule 4: what was fetched under a claim that is over is dropped.
Rule 5: a member that is behind releases the partition if it was asked to (`release_if_behind_s`), see `core` `pace.py`.

Source: Marshal `consumer.go`, `claim.go`; its at most once is a to-do.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, Literal, Self

from confluent_kafka import Consumer, KafkaException, TopicPartition

from kmq_spark.coordination.pace_watch import PaceWatch
from kmq_spark.errors import ClaimLostError, ConfigError, TopicError
from kmq_spark.kafka.client_errors import client_error
from kmq_spark.kafka.settings import make_client, reader_config

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import TracebackType

    from confluent_kafka import Message

    from kmq_spark.coordination.claim import Claim
    from kmq_spark.coordination.coordinator import Coordinator

Mode = Literal["at-least-once", "at-most-once"]
MODES = ("at-least-once", "at-most-once")

_LASTING = frozenset({"TOPIC_AUTHORIZATION_FAILED", "UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION"})
"""Failures of a fetch that do not pass by themselves."""

_POLL_S = 0.1
_CHECK_EVERY_S = 0.5
_TIMEOUT_S = 15.0
_LONGEST_BEHIND_S = 86_400


class Progress:
    """
    Which messages of a partition are handed out and not acknowledged, under one claim.

    Attributes:
        end: Offset behind the last message that was handed out.
    """

    def __init__(self) -> None:
        """Begin without messages."""
        self.end = 0
        self._handed_out: deque[int] = deque()
        self._acked: set[int] = set()

    @property
    def is_open(self) -> bool:
        """Whether a message was handed out and is not acknowledged."""
        return bool(self._handed_out)

    def hand_out(self, offsets: Iterable[int]) -> None:
        """Add messages, in ascending order."""
        for offset in offsets:
            self._handed_out.append(offset)
            self.end = offset + 1

    def ack(self, offsets: Iterable[int]) -> int:
        """Acknowledge messages, in any order; return the position: the first message that is not acknowledged."""
        # A message below the first open one was acknowledged before.
        first = self._handed_out[0] if self._handed_out else self.end
        self._acked.update(offset for offset in offsets if first <= offset < self.end)
        while self._handed_out and self._handed_out[0] in self._acked:
            self._acked.discard(self._handed_out.popleft())
        return self._handed_out[0] if self._handed_out else self.end


class Batch:
    """
    Messages of one partition, in order.

    Attributes:
        claim: Claim of the partition: hand `claim.epoch` to whatever you write to.
        partition: Number of it.
        messages: confluent-kafka's messages, at least one.
    """

    def __init__(self, claim: Claim, partition: int, messages: list[Message], progress: Progress) -> None:
        """Begin with no message acknowledged."""
        self.claim, self.partition, self.messages = claim, partition, messages
        self._progress = progress

    def __iter__(self) -> Iterator[Message]:
        """Yield the messages."""
        return iter(self.messages)

    def __len__(self) -> int:
        """Return the number of messages."""
        return len(self.messages)

    @property
    def end(self) -> int:
        """Offset behind the last message."""
        return _offset_of(self.messages[-1]) + 1

    def check(self) -> None:
        """
        Return while this process owns the partition.

        Raises:
            ClaimLostError: It does not: stop working on the batch.
        """
        self.claim.check()

    def ack(self, *messages: Message) -> None:
        """
        Acknowledge messages, in any order, all of the batch by default; for a consumption with `auto_ack=False`.

        The position of the partition is the first message that was handed out and is not acknowledged; it goes with
        the next heartbeat.

        Raises:
            ClaimLostError: This process does not own the partition any more; another one gets the messages again.
        """
        self.claim.check()
        position = self._progress.ack(_offset_of(message) for message in messages or self.messages)
        if position > (self.claim.position or 0):
            self.claim.commit(position)


class Consumption:
    """
    An iterator over batches of a topic, for one member of a group; `Coordinator.consume` makes it.

    Args:
        coordinator: That has joined.
        topic: To consume.
        bootstrap_servers: Comma-separated `host:port`.
        mode: `at-least-once` or `at-most-once`.
        max_messages: Most messages in a batch.
        most_claims: Most partitions that this member takes; 0 = no limit.
        auto_ack: At least once: asking for the next batch acknowledges the one before. False: `Batch.ack` does.
        idle_s: End the iteration after so long without a message; None: never.
        release_if_behind_s: Release a partition where this member has been stuck, or slower than the senders, for so
            long, seconds, 1 to 86,400; others may take it. None: never.
        extra: librdkafka settings.

    Raises:
        ConfigError: A value is out of bounds.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        topic: str,
        *,
        bootstrap_servers: str,
        mode: Mode = "at-least-once",
        max_messages: int = 500,
        most_claims: int = 0,
        auto_ack: bool = True,
        idle_s: float | None = None,
        release_if_behind_s: float | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        """Connect lazily."""
        if mode not in MODES:
            message = f"mode is not allowed: got {mode!r}, allowed {' or '.join(map(repr, MODES))}; correct the call"
            raise ConfigError(message)
        if max_messages < 1 or most_claims < 0:
            message = (
                f"max_messages or most_claims is out of bounds: got {max_messages!r} and {most_claims!r}, "
                "minimum 1 and 0; correct the call"
            )
            raise ConfigError(message)
        if release_if_behind_s is not None and not 1 <= release_if_behind_s <= _LONGEST_BEHIND_S:
            message = (
                f"release_if_behind_s is out of bounds: got {release_if_behind_s!r}, minimum 1, "
                f"maximum {_LONGEST_BEHIND_S}; correct the call"
            )
            raise ConfigError(message)
        self._coordinator, self._topic, self._mode = coordinator, topic, mode
        self._max_messages, self._most_claims, self._idle_s = max_messages, most_claims, idle_s
        self._auto_ack = auto_ack
        config = reader_config(bootstrap_servers, f"kmq.coordination.{coordinator.group}", extra=extra)
        # Where neither the group nor Kafka has a position: from the beginning, as a queue's first consumer.
        self._client = make_client(Consumer, {**config, "auto.offset.reset": "earliest"})
        self._partition_count = 0
        self._claims: dict[int, Claim] = {}
        self._progress: dict[int, Progress] = {}
        self._fetched: dict[int, list[Message]] = {}
        self._batch: Batch | None = None
        self._batch_began_s = self._checked_s = float("-inf")
        self._pace_watch: PaceWatch | None = None
        if release_if_behind_s is not None:
            self._pace_watch = PaceWatch(
                topic,
                release_if_behind_s,
                max_messages,
                held=self._claims.copy,
                is_working=self._is_working,
                stuck_s=self._stuck_s,
                bootstrap_servers=bootstrap_servers,
                extra=extra,
            )

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the partitions; the batch under way counts as done only if the block ended without an exception."""
        if kind is None:
            self._done()
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        """
        Yield batches; asking for the next one says that the one before is done.

        Raises:
            TopicError: There is no such topic.
            KafkaClientError: The broker cannot be reached.
            KmqError: The session of the coordinator is over.
        """
        last_s = time.monotonic()
        while True:
            self._done()
            self._look_after_claims()
            batch = self._next()
            if batch is None:
                if self._idle_s is not None and time.monotonic() - last_s > self._idle_s:
                    return
                continue
            last_s = time.monotonic()
            self._batch, self._batch_began_s = batch, last_s
            yield batch

    def close(self) -> None:
        """Release the partitions, each with its position, and close the client."""
        if self._pace_watch is not None:
            self._pace_watch.close()
        for claim in self._claims.values():
            claim.release()
        self._claims.clear()
        self._fetched.clear()
        self._client.close()

    def _done(self) -> None:
        """Acknowledge the batch that was handed out."""
        batch, self._batch = self._batch, None
        if batch is None or self._mode == "at-most-once":
            return
        try:
            if self._auto_ack:
                batch.ack()
        except ClaimLostError:
            # It is delivered again, by the next owner.
            return
        self._commit_to_kafka(batch)

    def _next(self) -> Batch | None:
        """Return a batch that may be handed out, None where there is none now."""
        if not self._claims:
            time.sleep(_POLL_S)
            return None
        if not self._fetched:
            self._fetch()
        while self._fetched:
            partition, messages = next(iter(self._fetched.items()))
            del self._fetched[partition]
            claim = self._claims.get(partition)
            if claim is None or not claim.is_held:
                continue
            batch = Batch(claim, partition, messages, self._progress[partition])
            if self._mode == "at-most-once":
                try:
                    claim.claim_messages(batch.end)
                except ClaimLostError:
                    continue
                self._commit_to_kafka(batch)
            else:
                self._progress[partition].hand_out(map(_offset_of, messages))
            return batch
        return None

    def _fetch(self) -> None:
        try:
            first = self._client.poll(_POLL_S)
            found = [] if first is None else [first, *self._client.consume(self._max_messages - 1, 0)]
        except KafkaException as error:
            raise client_error(error, f"cannot read {self._topic}") from error
        for message in found:
            failure = message.error()
            if failure is None:
                self._fetched.setdefault(message.partition() or 0, []).append(message)
            elif failure.fatal() or failure.name() in _LASTING:
                raise client_error(failure, f"cannot read {self._topic}")

    def _look_after_claims(self) -> None:
        """Drop partitions whose claim is over, and claim those that are free."""
        lost = [partition for partition, claim in self._claims.items() if not claim.is_held]
        for partition in lost:
            del self._claims[partition]
            self._fetched.pop(partition, None)
        if lost:
            self._client.incremental_unassign([TopicPartition(self._topic, partition) for partition in lost])
        if time.monotonic() - self._checked_s < _CHECK_EVERY_S:
            return
        self._checked_s = time.monotonic()
        for partition in range(self._partitions()):
            if self._most_claims and len(self._claims) >= self._most_claims:
                return
            is_left = self._pace_watch is not None and self._pace_watch.leaves_to_others(partition)
            if partition in self._claims or is_left:
                continue
            if claim := self._coordinator.claim(f"{self._topic}/{partition}"):
                self._begin(partition, claim)

    def _begin(self, partition: int, claim: Claim) -> None:
        """Fetch a partition from its position on."""
        place = TopicPartition(self._topic, partition)
        if claim.position is None:
            try:
                # Where it has no offset either: OFFSET_INVALID, so that `auto.offset.reset` decides.
                (place,) = self._client.committed([place], timeout=_TIMEOUT_S)
            except KafkaException as error:
                claim.release()
                raise client_error(
                    error, f"cannot read the offsets of group kmq.coordination.{self._coordinator.group}"
                ) from error
        else:
            place.offset = claim.position
        self._claims[partition], self._progress[partition] = claim, Progress()
        self._client.incremental_assign([place])

    def _is_working(self, partition: int) -> bool:
        """Return whether a message of a partition is handed out and not processed; called by the pace's thread."""
        progress, batch = self._progress.get(partition), self._batch
        return (progress is not None and progress.is_open) or (batch is not None and batch.partition == partition)

    def _stuck_s(self) -> float:
        """Return for how long the application has had the batch under way, seconds; called by the pace's thread."""
        return 0.0 if self._batch is None else time.monotonic() - self._batch_began_s

    def _commit_to_kafka(self, batch: Batch) -> None:
        """Show the position to tools that read Kafka's offsets; the group's own position is in the log."""
        if batch.claim.position is None:
            return
        place = TopicPartition(self._topic, batch.partition, batch.claim.position)
        self._client.commit(offsets=[place], asynchronous=True)

    def _partitions(self) -> int:
        if not self._partition_count:
            try:
                metadata = self._client.list_topics(self._topic, timeout=_TIMEOUT_S).topics.get(self._topic)
            except KafkaException as error:
                raise client_error(error, f"cannot read the partitions of {self._topic}") from error
            if metadata is None or metadata.error is not None:
                message = f"topic {self._topic!r} does not exist; create it before it is consumed"
                raise TopicError(message)
            self._partition_count = len(metadata.partitions)
        return self._partition_count


def _offset_of(message: Any) -> int:  # noqa: ANN401  # the client's message: its offset is never None
    offset: int = message.offset()
    return offset
