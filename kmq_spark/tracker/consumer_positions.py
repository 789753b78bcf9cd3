"""
Keep a copy of the committed offsets of a queue's consumer groups, and commit them again if the brokers deleted them.

Kafka deletes the offsets of a group that has had no members for `offsets.retention.minutes`. Its next consumers would
start at the oldest message and receive acknowledged messages again. A commit before the offsets expire does not prevent
that: for a classic group the time counts from the moment the last member left, not from the last commit.

Rule 1: The tracker keeps a copy of the offsets in the metadata of its own offset commits. It commits the copy for a
group that has lost its offset. The group is without an offset for `CHECK_INTERVAL_S` at most.
Rule 2: The copy contains only offsets that the group itself committed for this topic (same topic id). Every message
below such an offset was started, so a restored offset loses no message. An offset that exists is never changed. A copy
that a tracker made before the group's last commits expires before the group's own offsets do, so it is never used.
Rule 3: The commit contains no member id. Kafka rejects it if the group has members, so it cannot move the offset of an
active group.
Rule 4: Best effort: a failure is logged and the next check tries again. It never ends the tracker.
Rule 5: A consumer of the group that never subscribes reads and commits the offsets, not the admin client. An admin
request to a group's coordinator aborts the whole process if the connection breaks at the wrong moment (librdkafka
2.16, `rd_kafka_admin_coord_request`, issue 4605).

Source: KIP-211; Kafka's `ClassicGroup.offsetExpirationCondition` and `validateOffsetCommit`.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from kmq_spark.errors import KmqError
from kmq_spark.kafka.bounded_calls import answer_of
from kmq_spark.kafka.client_errors import client_error
from kmq_spark.kafka.lookups import EARLIEST, NOT_ALLOWED, offsets_of, topic_id_of
from kmq_spark.kafka.positions import ConsumerOffsets
from kmq_spark.kafka.settings import admin_config, make_client, new_client_id, reader_config
from kmq_spark.rate_limit import RateLimit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kmq_spark.kafka.queue_topics import QueueTopics

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 5.0
"""Between two checks of the offsets of the groups."""

GROUPS_INTERVAL_S = 60.0
"""Between two searches for groups of logical queues, and checks of the tracker's rights to all groups."""

NO_PARTITION = 1_000_000
"""
A partition that no topic has. To a commit for it the broker answers whether the right is missing, or else that the
partition is unknown; it writes nothing.
"""

LONGEST_CALL_S = 5.0

LONGEST_STALE_S = 2.0
"""
Longest time from the check that finds an offset missing to its commit; later, only the next check may commit it.

Within this time the group cannot have committed an offset itself: a consumer that joins an empty group waits longer for
its first partitions (`group.initial.rebalance.delay.ms`, 3 s).
"""

WARN_INTERVAL_S = 60.0


class ConsumerPositions:
    """
    Keeps the committed offsets of one queue's consumer groups: its own group and those of its logical queues.

    Args:
        topics: Topic and group names of the queue.
        bootstrap_servers: Comma-separated `host:port`.
        timeout: Bound on each call to the broker, seconds; at most `LONGEST_CALL_S` applies.
        extra: librdkafka settings.
    """

    def __init__(
        self, topics: QueueTopics, *, bootstrap_servers: str, timeout: float, extra: Mapping[str, str] | None = None
    ) -> None:
        """Create the client; it connects with the first request."""
        self._topics = topics
        self._bootstrap_servers = bootstrap_servers
        self._extra = dict(extra or {})
        self._groups: dict[str, _Group] = {}
        self._timeout = min(timeout, LONGEST_CALL_S)
        self._admin = make_client(AdminClient, admin_config(bootstrap_servers, new_client_id("positions"), extra))
        self._groups_at_s = float("-inf")
        self._warning_limit = RateLimit(WARN_INTERVAL_S)
        self._topic_id = ""
        self._copies: dict[str, dict[int, int]] = {}
        self._by_partition: dict[int, ConsumerOffsets] = {}
        self._refused_groups: set[str] = set()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def load(self, copied: Mapping[int, ConsumerOffsets]) -> None:
        """
        Take over the copy that earlier trackers kept.

        Args:
            copied: Offsets by queue partition, from the metadata of the tracker group's offsets.
        """
        self._topic_id = next((each.topic_id for each in copied.values() if each.topic_id), "")
        self._copies = {}
        for partition, offsets in copied.items():
            if offsets.topic_id == self._topic_id:
                for suffix, offset in offsets.by_suffix.items():
                    self._copies.setdefault(self._topics.consumer_group + suffix, {})[partition] = offset
        self._arrange_by_partition()

    def of(self, partition: int) -> ConsumerOffsets:
        """Return the copy for a partition, for the metadata of the tracker's offset commit. Thread-safe."""
        copied = self._by_partition.get(partition, ConsumerOffsets(self._topic_id))
        return copied._replace(is_unauthorized=bool(self._refused_groups))

    def start(self) -> None:
        """Start a thread that calls `check` every `CHECK_INTERVAL_S` until `stop`."""
        self._thread = threading.Thread(target=self._run, name=f"kmq-positions-{self._topics}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close the clients; where a call to the broker does not return in time, all are left."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(self._timeout)
        if self._thread is None or not self._thread.is_alive():
            while self._groups:
                self._groups.popitem()[1].close()

    def check(self) -> None:
        """Read and copy the offsets of every group, and commit missing ones again. Failures are logged, not raised."""
        try:
            self._check()
        except KafkaException as error:
            self._warn(client_error(error, f"cannot copy the offsets of consumer groups of {self._topics}"))
        except KmqError as error:
            self._warn(error)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.check()
            except Exception as error:
                logger.exception(
                    "stopped copying the offsets of consumer groups of %s; restart the tracker to resume it",
                    self._topics, exc_info=error,
                )  # fmt: skip
                return
            self._stopping.wait(CHECK_INTERVAL_S)

    def _check(self) -> None:
        topic = self._topics.queue_topic
        topic_id = topic_id_of(self._admin, topic, self._timeout)
        if topic_id != self._topic_id:
            # The topic was deleted and created again. Kafka deleted the groups' offsets with it; the copy refers to
            # deleted messages.
            self._topic_id, self._copies = topic_id, {}
        partitions = tuple(self._admin.list_topics(topic, timeout=self._timeout).topics[topic].partitions)
        if time.monotonic() - self._groups_at_s > GROUPS_INTERVAL_S:
            self._find_groups()
            for group in self._groups.values():
                self._check_rights(group)
            self._groups_at_s = time.monotonic()
        for group in self._groups.values():
            if self._stopping.is_set():
                break
            self._check_group(group, partitions)
        self._arrange_by_partition()

    def _find_groups(self) -> None:
        """Find the groups of logical queues, among those that this tracker may see."""
        answer = self._admin.list_consumer_groups(request_timeout=self._timeout)
        listed = answer_of(answer, self._timeout).valid
        prefix = self._topics.logical_group_prefix
        names = {each.group_id for each in listed if each.group_id.startswith(prefix)}
        for name in sorted(({self._topics.consumer_group} | names | self._copies.keys()) - self._groups.keys()):
            config = reader_config(self._bootstrap_servers, name, new_client_id("positions"), self._extra)
            self._groups[name] = _Group(name, config)

    def _check_group(self, group: _Group, partitions: Sequence[int]) -> None:
        began_s = time.monotonic()
        topic = self._topics.queue_topic
        try:
            found, unknown = group.committed(topic, partitions, self._timeout)
        except KafkaException as error:
            if NOT_ALLOWED not in error.args[0].name():
                raise
            self._note_refused(group.name)
            return
        copied = self._copies.get(group.name, {})
        missing = {
            partition: at for partition, at in copied.items() if partition not in found and partition not in unknown
        }
        self._copies[group.name] = {**copied, **found}
        # Without a topic id the topic may have been deleted and created again: the copy may be of the old one.
        if not missing or not self._topic_id:
            return
        first = offsets_of(self._admin, topic, missing, EARLIEST, self._timeout)
        for partition in [partition for partition, at in missing.items() if at <= first[partition]]:
            # Retention deleted every message below this offset, so the group cannot receive one of them again.
            del missing[partition], self._copies[group.name][partition]
        if missing and time.monotonic() - began_s < LONGEST_STALE_S:
            self._restore(group, missing)

    def _restore(self, group: _Group, offsets: Mapping[int, int]) -> None:
        """Commit offsets for a group that has no members and no offsets of these partitions."""
        topic = self._topics.queue_topic
        wanted = [TopicPartition(topic, partition, offset) for partition, offset in sorted(offsets.items())]
        errors = group.commit(wanted, self._timeout)
        if any(NOT_ALLOWED in name for name in errors):
            self._note_refused(group.name)
        elif errors:
            # UNKNOWN_MEMBER_ID: the group has members by now, and commits its own offsets.
            logger.info(
                "did not restore the offsets of consumer group %s: the broker answered %s", group.name, errors[0],
                extra={"action": "offsets_not_restored", "queue": str(self._topics)},
            )  # fmt: skip
        else:
            places = ", ".join(f"[{place.partition}] {place.offset}" for place in wanted)
            logger.warning(
                "consumer group %s has lost its committed offsets of %s: they expired while it had no members "
                "(offsets.retention.minutes of the brokers) or were deleted; committed them again: %s. To deliver "
                "messages again, reset the offsets of the group instead of deleting them",
                group.name, topic, places, extra={"action": "offsets_restored", "queue": str(self._topics)},
            )  # fmt: skip

    def _check_rights(self, group: _Group) -> None:
        """Check whether this tracker has the right to commit for a group, long before it must."""
        errors = group.commit([TopicPartition(self._topics.queue_topic, NO_PARTITION, 0)], self._timeout)
        if any(NOT_ALLOWED in name for name in errors):
            self._note_refused(group.name)
        elif "UNKNOWN_TOPIC_OR_PART" in errors:
            self._refused_groups.discard(group.name)

    def _note_refused(self, group: str) -> None:
        if group not in self._refused_groups:
            logger.warning(
                "the tracker of %s may not commit for consumer group %s: if the group has no members for longer than "
                "offsets.retention.minutes of the brokers, its consumers receive acknowledged messages again; grant "
                "Read and Describe on the group, see `kmq acls`",
                self._topics, group, extra={"action": "offsets_refused", "queue": str(self._topics)},
            )  # fmt: skip
        self._refused_groups.add(group)

    def _arrange_by_partition(self) -> None:
        """Arrange the copy by partition, for the metadata of the tracker's commits."""
        by_partition: dict[int, dict[str, int]] = {}
        for group, offsets in sorted(self._copies.items()):
            for partition, offset in offsets.items():
                by_partition.setdefault(partition, {})[group.removeprefix(self._topics.consumer_group)] = offset
        self._by_partition = {
            partition: ConsumerOffsets(self._topic_id, by_suffix) for partition, by_suffix in by_partition.items()
        }

    def _warn(self, error: KmqError) -> None:
        if self._warning_limit.allows():
            logger.warning("%s; trying again", error, extra={"action": "offsets_not_kept", "queue": str(self._topics)})


class _Group:
    """A client of one consumer group that never subscribes, so it joins nothing."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self.name = name
        self._results: list[tuple[KafkaError | None, list[TopicPartition]]] = []
        self._client = make_client(Consumer, {**config, "on_commit": self._on_commit})

    def committed(self, topic: str, partitions: Sequence[int], timeout_s: float) -> tuple[dict[int, int], set[int]]:
        """Return what the group has committed by partition, and the partitions of which that is not known."""
        wanted = [TopicPartition(topic, partition) for partition in partitions]
        places = self._client.committed(wanted, timeout=timeout_s)
        unknown = {each.partition for each in places if each.error is not None}
        return {p.partition: p.offset for p in places if p.offset >= 0 and p.partition not in unknown}, unknown

    def commit(self, places: Sequence[TopicPartition], timeout_s: float) -> list[str]:
        """Commit offsets without a member; return the names of the broker's errors, `_TIMED_OUT` without an answer."""
        self._results.clear()
        self._client.commit(offsets=list(places), asynchronous=True)
        until_s = time.monotonic() + timeout_s
        while not self._results and time.monotonic() < until_s:
            self._client.poll(0.1)
        if not self._results:
            return ["_TIMED_OUT"]
        error, answered = self._results[-1]
        failed = [place.error.name() for place in answered if place.error is not None]
        return failed or ([] if error is None else [error.name()])

    def close(self) -> None:
        """Close the client."""
        self._client.close()

    def _on_commit(self, error: KafkaError | None, places: list[TopicPartition]) -> None:
        self._results.append((error, places))
