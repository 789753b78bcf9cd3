"""
Read facts about a cluster, its topics and its consumer groups, for programs that only observe.

Rule 1: What this client may not read is left out and is never an error. A broker that does not respond is an error.
"""

from __future__ import annotations

import logging
import re
import time
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from kmq_spark.inspection.facts import ClusterFacts, GroupFacts, TopicFacts
from kmq_spark.kafka.client_errors import DENIED, answer_of, client_error, retry_until_answered, unreachable
from kmq_spark.kafka.lookups import (
    EARLIEST,
    LATEST,
    broker_settings,
    offsets_of,
    offsets_retention_ms,
    settings_of,
)
from kmq_spark.kafka.settings import admin_config, make_client, new_client_id, reader_config

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from confluent_kafka.admin import ClusterMetadata

_API = re.compile(r"ApiKey (\w+) \((\d+)\) Versions (\d+)\.\.(\d+)")
_FETCH, _TXN_OFFSET_COMMIT = 1, 28
_KIP_447_VERSION = 3
"""Version of TxnOffsetCommit that contains the group's generation, KIP-447: Kafka 2.5."""

_RELEASES = ((18, "4.1"), (17, "3.9"), (16, "3.7"), (15, "3.5"), (13, "3.1"), (12, "2.7"), (11, "2.3"))
"""Version of Fetch -> the first Kafka release that supports it: brokers do not report their release."""

API_WAIT_S = 2.0


class Cluster:
    """
    Reads facts from one cluster.

    Args:
        bootstrap_servers: Comma-separated `host:port`.
        timeout: Maximum time for each call.
        extra: librdkafka settings.
    """

    def __init__(self, bootstrap_servers: str, timeout: float, extra: Mapping[str, str] | None = None) -> None:
        """Create the admin client; it sends nothing before the first call."""
        self._address = bootstrap_servers
        self._timeout = timeout
        self._extra = dict(extra or {})
        self._groups: dict[str, Consumer] = {}
        self.admin = make_client(AdminClient, admin_config(bootstrap_servers, extra=extra))

    def metadata(self, topic: str | None = None) -> ClusterMetadata:
        """
        Return the cluster's metadata of all its topics, or of one topic.

        Raises:
            KafkaClientError: The broker cannot be reached in time.
        """
        try:
            if topic is None:
                return self.admin.list_topics(timeout=self._timeout)
            return self.admin.list_topics(topic, timeout=self._timeout)
        except KafkaException as error:
            raise unreachable(error, self.admin, self._address) from error

    def facts(self) -> ClusterFacts:
        """
        Return facts about the brokers.

        Raises:
            KafkaClientError: No broker can be reached in time.
        """
        metadata = self.metadata()
        versions = self._api_versions()
        settings = broker_settings(self.admin, metadata.brokers, self._timeout)
        release = next((name for fetch, name in _RELEASES if versions.get(_FETCH, 0) >= fetch), "")
        return ClusterFacts(
            self._address,
            len(metadata.brokers),
            f"Kafka {release} or newer" if release else "",
            versions[_TXN_OFFSET_COMMIT] >= _KIP_447_VERSION if _TXN_OFFSET_COMMIT in versions else None,
            offsets_retention_ms(settings),
            int(settings.get("transaction.max.timeout.ms", 0)),
        )

    def topics(self, names: Iterable[str]) -> dict[str, TopicFacts]:
        """
        Return facts about topics, by name. A topic that does not exist has no partitions.

        Raises:
            KafkaClientError: The broker cannot be reached in time.
        """
        found = {}
        for name in names:
            metadata = self.metadata(name).topics.get(name)
            if metadata is None or metadata.error is not None or not metadata.partitions:
                found[name] = TopicFacts(name)
                continue
            parts = metadata.partitions
            first, end = (self.offsets(name, parts, spec) for spec in (EARLIEST, LATEST))
            found[name] = TopicFacts(
                name,
                len(parts),
                settings_of(self.admin, [name], self._timeout).get(name, {}),
                len(next(iter(parts.values())).replicas),
                tuple(sorted(number for number, each in parts.items() if each.leader < 0)),
                tuple(sorted(number for number, each in parts.items() if len(each.isrs) < len(each.replicas))),
                first,
                end,
            )
        return found

    def offsets(
        self, topic: str, partitions: Iterable[int], spec: OffsetSpec, *, with_open_transactions: bool = False
    ) -> dict[int, int]:
        """
        Return one offset of each partition: the first, the end, or the first from an instant on.

        Args:
            topic: Topic.
            partitions: Partitions of the topic.
            spec: Which offset.
            with_open_transactions: As for `offsets_of`.

        Raises:
            KafkaClientError: The broker cannot be reached in time.
        """
        return offsets_of(
            self.admin, topic, partitions, spec, self._timeout, with_open_transactions=with_open_transactions
        )

    def blocked(self, topic: TopicFacts, before_ms: int) -> tuple[int, ...]:
        """
        Return the partitions in which a transaction was begun before an instant and is still open.

        Args:
            topic: The topic.
            before_ms: The instant, epoch milliseconds, broker clock.

        Raises:
            KafkaClientError: The broker cannot be reached in time.
        """
        # The last stable offset is that of the first record of the oldest open transaction.
        ends = self.offsets(topic.name, topic.end, LATEST, with_open_transactions=True)
        open_in = [number for number, stable_end in topic.end.items() if stable_end < ends[number]]
        newer = self.offsets(
            topic.name, open_in, OffsetSpec.for_timestamp(before_ms), with_open_transactions=True
        )  # fmt: skip
        # -1: no record is newer.
        return tuple(number for number in open_in if not 0 <= newer[number] <= topic.end[number])

    def offsets_at(self, topic: str, partitions: Iterable[int], at_ms: int) -> dict[int, int]:
        """Return the first offset appended at an instant or later, by partition. Partitions without one are omitted."""
        found = self.offsets(topic, partitions, OffsetSpec.for_timestamp(at_ms))
        return {partition: offset for partition, offset in found.items() if offset >= 0}

    def group(self, name: str, topic: str) -> GroupFacts:
        """
        Return facts about a consumer group.

        Raises:
            KafkaClientError: The broker cannot be reached in time.
        """
        positions = {place.partition: place.offset for place in self.committed(name, topic)}
        try:
            (future,) = self.admin.describe_consumer_groups([name], request_timeout=self._timeout).values()
            described = answer_of(future, self._timeout)
        except KafkaException as error:
            failure = client_error(error, f"cannot read group {name}")
            if failure.retriable:
                raise failure from error
            # No consumer has joined the group yet, or this client may not describe it.
            return GroupFacts(name, "", {}, positions)
        members: dict[str, int] = {}
        for member in described.members:
            assigned = member.assignment.topic_partitions if member.assignment is not None else []
            members[member.client_id] = members.get(member.client_id, 0) + len(assigned)
        return GroupFacts(name, described.state.name, members, positions)

    def committed(self, group: str, topic: str) -> list[TopicPartition]:
        """
        Return the offsets that a group committed for a topic, with their metadata; empty if this client may not read
        them.

        Raises:
            KafkaClientError: The broker cannot be reached in time.
        """
        metadata = self.metadata(topic).topics.get(topic)
        wanted = [
            TopicPartition(topic, partition) for partition in (metadata.partitions if metadata is not None else ())
        ]
        if not wanted:
            return []
        if group not in self._groups:
            # Do not use the admin client: after a restart of the broker it did not find the group's coordinator again
            # for minutes (librdkafka 2.16); a consumer does. This consumer never subscribes, so it does not join the
            # group.
            config = reader_config(self._address, group, new_client_id("inspector"), self._extra)
            self._groups[group] = make_client(Consumer, config)

        def request() -> list[TopicPartition]:
            try:
                places = self._groups[group].committed(wanted, timeout=self._timeout)
            except KafkaException as error:
                if error.args[0].name() in DENIED:
                    return []
                raise
            return [place for place in places if place.offset >= 0]

        return retry_until_answered(request, f"cannot read the offsets of group {group}", self._timeout)

    def close(self) -> None:
        """Close the clients."""
        for client in self._groups.values():
            client.close()
        self._groups.clear()

    def _api_versions(self) -> dict[int, int]:
        """
        Return the newest version of each request that a broker supports.

        No call of the client returns these versions, but its log contains them. Therefore this opens one more client
        with `debug=feature` for a moment.
        """
        lines: list[str] = []
        listener = logging.Logger("kmq-features", logging.DEBUG)  # noqa: LOG001  # private: not in the logger hierarchy
        listener.addHandler(_Lines(lines))
        config = {**admin_config(self._address, extra=self._extra), "debug": "feature", "logger": listener}
        client = make_client(AdminClient, config)
        deadline_s = time.monotonic() + min(API_WAIT_S, self._timeout)
        try:
            client.list_topics(timeout=self._timeout)
        except KafkaException:
            return {}
        while time.monotonic() < deadline_s:
            client.poll(0.05)
            found = {int(match[2]): int(match[4]) for match in map(_API.search, list(lines)) if match}
            if _TXN_OFFSET_COMMIT in found:
                return found
        return {}


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())
