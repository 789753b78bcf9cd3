"""
Consume a topic with claims: one owner a partition, in order, from the position in the log.

Rule 1: partition `n` of topic `clicks` is the resource `clicks/n`; its position is the next Kafka offset of the topic
with the id that the claim names.
Rule 2: at least once: the position moves when a batch is done, and goes with the next heartbeat. At most once: a batch
is handed out after its end was claimed and its position was read back from the log; if that is refused while the claim
stands, it is fetched again.
Rule 3: what was fetched under a claim that is over is dropped.
Rule 4: a member takes what is free. One that has less than its share holds `clicks/waits/<client id>`; while it does,
members that have more than theirs release it.

Source: Marshal `consumer.go`, `claim.go`; its at most once is a to-do.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Literal, Self

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from kmq_spark.core.coordination.records import MAX_NAME_CHARS
from kmq_spark.core.durations import milliseconds
from kmq_spark.errors import ClaimLostError, ConfigError, KafkaClientError, KmqError, TopicError, UsageError
from kmq_spark.kafka.client_errors import DENIED, MISSING, client_error
from kmq_spark.kafka.lookups import EARLIEST, LATEST, bounds_of, offsets_of, topic_id_of
from kmq_spark.kafka.settings import admin_config, make_client, reader_config
from kmq_spark.pauses import RateLimit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from datetime import timedelta
    from types import TracebackType

    from confluent_kafka import Message

    from kmq_spark.coordination.claim import Claim
    from kmq_spark.coordination.coordinator import Coordinator

logger = logging.getLogger(__name__)

Mode = Literal["at-least-once", "at-most-once"]
MODES = ("at-least-once", "at-most-once")

_LASTING = MISSING | DENIED
"""Failures of a fetch that do not pass by themselves."""

LOOKS = 10
"""Looks at the pace within `release_if_behind`."""

_POLL_S = 0.1
_CHECK_EVERY_S = 0.5
_CHECK_TOPIC_EVERY_S = 10.0
_TIMEOUT_S, _TOPIC_TIMEOUT_S = 15.0, 2.0
_WARN_INTERVAL_S = 60.0
_DAY_MS = 86_400_000


class Progress:
    """Which messages of a partition are handed out and not acknowledged, under one claim."""

    def __init__(self) -> None:
        self.end = 0
        """Offset behind the last message that was handed out."""
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
    The batches of a topic for one member of a group; the members share its partitions, one owner each.

        with Consumption(me, "clicks") as batches:
            for batch in batches:
                ...

    Args:
        coordinator: That has joined; one consumption of a topic for each.
        topic: To consume.
        mode: `at-least-once`, or `at-most-once`.
        max_messages: Most messages in a batch.
        most_claims: Most partitions that this member takes; 0 = its share while another member waits, else no limit.
        auto_ack: At least once: asking for the next batch acknowledges the one before. False: `Batch.ack` does.
        idle: End after so long without a message, seconds or a timedelta; None: never.
        release_if_behind: Release a partition after this time if this member is stuck, or slower than the senders,
            and do not claim it again for as long; 1 second to a day. None: never.

    Raises:
        ConfigError: A value is out of bounds.
        UsageError: The coordinator has a consumption of this topic already: both would read the same partitions.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        topic: str,
        *,
        mode: Mode = "at-least-once",
        max_messages: int = 500,
        most_claims: int = 0,
        auto_ack: bool = True,
        idle: float | timedelta | None = None,
        release_if_behind: float | timedelta | None = None,
    ) -> None:
        if mode not in MODES:
            message = f"mode is not allowed: got {mode!r}; expected {' or '.join(map(repr, MODES))}; correct the call"
            raise ConfigError(message)
        if max_messages < 1 or most_claims < 0:
            message = (
                f"max_messages or most_claims is out of bounds: got {max_messages!r} and {most_claims!r}; "
                "expected at least 1 and 0; correct the call"
            )
            raise ConfigError(message)
        self._idle_s = None if idle is None else milliseconds("idle", idle) / 1000
        self._behind_s = 0.0
        if release_if_behind is not None:
            self._behind_s = milliseconds("release_if_behind", release_if_behind, 1_000, _DAY_MS) / 1000
        if topic in coordinator.consumed_topics:
            message = f"topic {topic!r} is consumed already: got a second consumption; use one for each coordinator"
            raise UsageError(message)
        coordinator.consumed_topics.add(topic)
        self._pid = os.getpid()
        self._coordinator, self._topic, self._mode = coordinator, topic, mode
        self._max_messages, self._most_claims, self._auto_ack = max_messages, most_claims, auto_ack
        config = reader_config(
            coordinator.bootstrap_servers, f"kmq.coordination.{coordinator.group}", extra=coordinator.extra
        )
        # A position that the log does not have is not replaced by another one in silence.
        self._client = make_client(Consumer, {**config, "auto.offset.reset": "error"})
        self._admin = make_client(AdminClient, admin_config(coordinator.bootstrap_servers, extra=coordinator.extra))
        # Given up, and held until what was handed out is acknowledged.
        self._leaving: dict[int, Claim] = {}
        self._waits: Claim | None = None
        self._partition_count, self._topic_id, self._topic_checked_s = 0, "", float("-inf")
        self._claims: dict[int, Claim] = {}
        self._progress: dict[int, Progress] = {}
        self._fetched: dict[int, list[Message]] = {}
        self._batch: Batch | None = None
        self._batch_began_s = self._checked_s = float("-inf")
        self._paces: dict[tuple[int, int], Pace] = {}
        self._released_s: dict[int, float] = {}
        self._stopping = threading.Event()
        # In a thread of its own: a member that is stuck asks for no batch.
        self._pace_thread = threading.Thread(target=self._watch_pace, name=f"kmq-pace-{topic}", daemon=True)
        if self._behind_s:
            self._pace_thread.start()

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
            UsageError: The process was forked after the consumption was made.
            KmqError: The session of the coordinator is over.
        """
        last_s = time.monotonic()
        while True:
            if self._pid != os.getpid():
                message = "consumption of the parent process: got a call after a fork; make one in the child"
                raise UsageError(message)
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
        """Release the partitions, each with its position, and close the client; in a forked child, do nothing."""
        if self._pid != os.getpid():
            return
        self._stopping.set()
        if self._behind_s:
            self._pace_thread.join(_TIMEOUT_S)
        for claim in [*self._claims.values(), *self._leaving.values()]:
            claim.release()
        self._show(is_waiting=False)
        self._claims.clear()
        self._fetched.clear()
        self._client.close()
        self._coordinator.consumed_topics.discard(self._topic)

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
        """Return a batch that may be handed out; None if there is none now."""
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
                except (ClaimLostError, KafkaClientError) as error:
                    if claim.is_held:
                        # Refused, as in a pause of the group, or not written, while the claim stands: fetched again.
                        self._client.incremental_unassign([TopicPartition(self._topic, partition)])
                        self._begin(partition, claim)
                        time.sleep(_POLL_S)
                    if isinstance(error, KafkaClientError):
                        raise
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
        lasting = None
        for message in found:
            failure, partition = message.error(), message.partition() or 0
            if failure is None:
                self._fetched.setdefault(partition, []).append(message)
            elif failure.code() == KafkaError._AUTO_OFFSET_RESET:  # noqa: SLF001  # librdkafka's public name for it
                self._begin_at_first(partition, _offset_of(message))
            elif failure.fatal() or failure.name() in _LASTING:
                lasting = failure
        if lasting is not None:
            # After the loop: the client has moved past the messages behind the failure.
            raise client_error(lasting, f"cannot read {self._topic}")

    def _look_after_claims(self) -> None:
        """Drop partitions whose claim is over, and see that each member gets its share."""
        self._drop([partition for partition, claim in self._claims.items() if not claim.is_held])
        now_s = time.monotonic()
        if now_s - self._checked_s < _CHECK_EVERY_S:
            return
        self._checked_s = now_s
        me, count = self._coordinator.client_id, self._partitions()
        holders = self._coordinator.holders(f"{self._topic}/")
        owners = [holders.get(f"{self._topic}/{partition}", "") for partition in range(count)]
        waiting = {client_id for name, client_id in holders.items() if name.startswith(f"{self._topic}/waits/")}
        least, rest = divmod(count, len({*owners, *waiting, me} - {""}))
        own_most = self._most_claims or count
        most = min(own_most, least + (rest > 0)) if waiting - {me} else own_most
        self._give_up(most)
        # Others have as long to claim what this member released because it was behind.
        resting = {number for number, at_s in self._released_s.copy().items() if now_s - at_s < self._behind_s}
        taken = {*self._claims, *self._leaving, *resting}
        free = [number for number, owner in enumerate(owners) if owner in {"", me} and number not in taken]
        if (free or now_s - self._topic_checked_s >= _CHECK_TOPIC_EVERY_S) and not self._check_topic():
            return
        for partition in free:
            if len(self._claims) >= most:
                break
            if claim := self._coordinator.claim(f"{self._topic}/{partition}", topic_id=self._topic_id):
                self._begin(partition, claim)
        self._show(is_waiting=len(self._claims) < min(own_most, least) and not resting)

    def _give_up(self, most: int) -> None:
        """Keep this many partitions; release the others when their messages are acknowledged."""
        for partition in list(self._claims)[most:]:
            self._leaving[partition] = self._claims[partition]
            self._drop([partition])
        for partition, claim in list(self._leaving.items()):
            if not (claim.is_held and self._progress[partition].is_open):
                claim.release()
                del self._leaving[partition]

    def _show(self, *, is_waiting: bool) -> None:
        """Show the other members whether this one waits for its share."""
        if self._waits is not None and not (is_waiting and self._waits.is_held):
            self._waits.release()
            self._waits = None
        if is_waiting and self._waits is None:
            name = f"{self._topic}/waits/{self._coordinator.client_id}"
            self._waits = self._coordinator.claim(name[:MAX_NAME_CHARS])

    def _drop(self, partitions: list[int]) -> None:
        """Forget partitions whose claims are over."""
        for partition in partitions:
            del self._claims[partition]
            self._fetched.pop(partition, None)
        if partitions:
            self._client.incremental_unassign([TopicPartition(self._topic, partition) for partition in partitions])

    def _check_topic(self) -> bool:
        """Give everything up if the topic was created again; return whether its id is known."""
        try:
            topic_id = topic_id_of(self._admin, self._topic, _TOPIC_TIMEOUT_S)
        except KafkaClientError as error:
            if not error.retriable:
                raise
            return False
        self._topic_checked_s = time.monotonic()
        if self._topic_id and topic_id != self._topic_id:
            for claim in self._claims.values():
                claim.release()
            self._drop(list(self._claims))
            self._partition_count = 0
        self._topic_id = topic_id
        return True

    def _begin(self, partition: int, claim: Claim) -> None:
        """Fetch a partition from its position on."""
        place = TopicPartition(self._topic, partition)
        if claim.position is None:
            try:
                (place,) = self._client.committed([place], timeout=_TIMEOUT_S)
                if place.offset < 0 or place.metadata not in {None, "", self._topic_id}:
                    place.offset = OFFSET_BEGINNING
            except KafkaException as error:
                claim.release()
                raise client_error(
                    error, f"cannot read the offsets of group kmq.coordination.{self._coordinator.group}"
                ) from error
        else:
            place.offset = claim.position
        self._claims[partition], self._progress[partition] = claim, Progress()
        self._client.incremental_assign([place])

    def _begin_at_first(self, partition: int, position: int) -> None:
        """Go on with the first message if those before it were deleted; a position past the end is an error."""
        place = TopicPartition(self._topic, partition)
        place.offset, end = bounds_of(self._client, place, _TIMEOUT_S)
        if self._check_topic() and partition not in self._claims:
            return  # the topic was created again
        if position > end:
            message = (
                f"position is past the end of partition {partition} of {self._topic}: got {position}; expected "
                f"{place.offset} to {end}; find out what was lost, then run `kmq group seek`"
            )
            raise TopicError(message)
        logger.warning(
            "messages %d to %d of partition %d of %s were deleted before they were consumed",
            position, place.offset - 1, partition, self._topic, extra={"action": "messages_deleted"},
        )  # fmt: skip
        self._client.incremental_unassign([place])
        self._client.incremental_assign([place])

    def _commit_to_kafka(self, batch: Batch) -> None:
        """Commit the position to Kafka too, for tools that read it. The group uses the position in its log."""
        if batch.claim.position is None or not batch.claim.is_held:
            return
        place = TopicPartition(self._topic, batch.partition, batch.claim.position, metadata=self._topic_id)
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

    # The pace.

    def _watch_pace(self) -> None:
        """In a thread: release partitions on which this member is stuck, or slower than the senders."""
        warning_limit = RateLimit(_WARN_INTERVAL_S)
        while not self._stopping.wait(self._behind_s / LOOKS):
            try:
                self._look_at_pace()
            except KmqError as error:
                if warning_limit.allows():
                    logger.warning("cannot see whether %s is consumed fast enough: %s", self._topic, error)

    def _look_at_pace(self) -> None:
        held = {partition: claim for partition, claim in self._claims.copy().items() if claim.is_held}
        ends = offsets_of(self._admin, self._topic, held, LATEST, _TIMEOUT_S)
        new = [partition for partition, claim in held.items() if claim.position is None]
        firsts = offsets_of(self._admin, self._topic, new, EARLIEST, _TIMEOUT_S)
        now_s, batch = time.monotonic(), self._batch
        is_stuck = batch is not None and now_s - self._batch_began_s >= self._behind_s
        self._paces = {
            (partition, claim.epoch): self._paces.get((partition, claim.epoch))
            or Pace(self._behind_s, self._max_messages, now_s)
            for partition, claim in held.items()
        }
        for partition, claim in held.items():
            position = firsts[partition] if claim.position is None else claim.position
            is_working = self._progress[partition].is_open or (batch is not None and batch.partition == partition)
            is_behind = self._paces[partition, claim.epoch].is_behind(
                now_s, position, ends[partition], is_working=is_working
            )
            if not is_behind and not (is_stuck and position < ends[partition]):
                continue
            logger.warning(
                "releasing partition %d of %s: this member has been behind for %g s, %d messages wait",
                partition, self._topic, self._behind_s, ends[partition] - position,
                extra={"action": "claim_released_behind", "resource": claim.resource, "epoch": claim.epoch},
            )  # fmt: skip
            self._released_s[partition] = time.monotonic()
            claim.release()


class Pace:
    """
    Decide whether the holder of a partition is fast enough, under one claim.

    A holder that catches up is fast enough: its lag reaches a new minimum from time to time. A lag of one batch or less
    is ignored. So is a partition without open messages: the last offset may be a transaction's control record.

    Source: Marshal `claim.go`, `healthCheck`, which compares averages of two rates.
    """

    def __init__(self, limit_s: float, enough: int, now_s: float) -> None:
        self._limit_s, self._enough, self._since_s = limit_s, enough, now_s
        self._position = -1
        self._lowest: int | None = None

    def is_behind(self, now_s: float, position: int, end: int, *, is_working: bool) -> bool:
        """
        Return whether the holder has been behind for `limit_s`.

        *position*: next message to process. *end*: offset after the last message. *is_working*: a message was handed
        out and is not processed yet.
        """
        lag = end - position
        has_moved, self._position = position > self._position, position
        is_small = lag <= self._enough
        is_lowest = self._lowest is None or lag < self._lowest
        if (has_moved and (is_small or is_lowest)) or (is_small and not is_working):
            self._since_s, self._lowest = now_s, lag
        return now_s - self._since_s >= self._limit_s


def _offset_of(message: Any) -> int:  # noqa: ANN401  # the client's message: its offset is never None
    offset: int = message.offset()
    return offset
