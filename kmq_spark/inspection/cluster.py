"""
Read facts about a cluster, its queues, its topics and its consumer groups, for programs that only observe.

Rule 1: What this client may not read is left out and is never an error. A broker that does not respond is an error.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from kmq_spark.inspection.facts import ClusterFacts, GroupFacts, TopicFacts
from kmq_spark.kafka.client_errors import DENIED, answer_of, client_error, retry_until_answered, unreachable
from kmq_spark.kafka.lookups import EARLIEST, LATEST, broker_settings, offsets_of, settings_of
from kmq_spark.kafka.settings import admin_config, make_client, new_client_id, reader_config

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from confluent_kafka.admin import ClusterMetadata

_SUBSCRIPTION = re.compile(r"(?P<queue>.+)\.subscription-(?P<subscription>[A-Za-z0-9._-]+)")

MARKERS, DEAD_LETTERS = ".markers", ".dlq"

CONTACT_S = 5.0
"""Longest wait for the first answer: somebody sits in front of the command."""


def queues_of(topics: Iterable[str]) -> list[str]:
    """
    Return the queues to which these topics belong, subscriptions as `queue@subscription`, sorted.

    A dead-letter topic also has a markers topic, the redrive topic. It is not a queue of its own.
    """
    names = set(topics)
    found = []
    for name in names:
        base = name.removesuffix(MARKERS)
        if base == name:
            continue
        if base.endswith(DEAD_LETTERS) and f"{base.removesuffix(DEAD_LETTERS)}{MARKERS}" in names:
            continue
        subscription = _SUBSCRIPTION.fullmatch(base)
        if base in names:
            found.append(base)
        elif subscription is not None and subscription["queue"] in names:
            found.append(f"{subscription['queue']}@{subscription['subscription']}")
    return sorted(found)


class Cluster:
    """Reads facts from one cluster; a broker that cannot be reached in time is a `KafkaClientError`."""

    def __init__(self, bootstrap_servers: str, timeout: float, extra: Mapping[str, str] | None = None) -> None:
        self._address = bootstrap_servers
        self._timeout = timeout
        self._contact_s = min(timeout, CONTACT_S)
        self._extra = dict(extra or {})
        self._groups: dict[str, Consumer] = {}
        self.admin = make_client(AdminClient, admin_config(bootstrap_servers, extra=extra))

    def metadata(self, topic: str | None = None) -> ClusterMetadata:
        """Return the cluster's metadata of all its topics, or of one topic."""
        try:
            found = self.admin.list_topics(*([topic] if topic else []), timeout=self._contact_s)
        except KafkaException as error:
            raise unreachable(error, self.admin, self._address) from error
        self._contact_s = self._timeout
        return found

    def facts(self) -> ClusterFacts:
        """Return facts about the brokers."""
        brokers = self.metadata().brokers
        settings = broker_settings(self.admin, brokers, self._timeout)
        return ClusterFacts(self._address, len(brokers), int(settings.get("transaction.max.timeout.ms", 0)))

    def topics(self, names: Iterable[str]) -> dict[str, TopicFacts]:
        """Return facts about topics, by name. A topic that does not exist has no partitions."""
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
        """Return one offset of each partition: the first, the end, or the first from an instant on."""
        return offsets_of(
            self.admin, topic, partitions, spec, self._timeout, with_open_transactions=with_open_transactions
        )

    def blocked(self, topic: TopicFacts, before_ms: int) -> tuple[int, ...]:
        """Return the partitions in which a transaction was begun before an instant (broker clock) and is still open."""
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

    def group(self, name: str, topic: str, *, with_members: bool) -> GroupFacts:
        """Return facts about a consumer group."""
        positions = {place.partition: place.offset for place in self.committed(name, topic)}
        if not with_members:
            return GroupFacts(name, positions=positions)
        try:
            (future,) = self.admin.describe_consumer_groups([name], request_timeout=self._timeout).values()
            described = answer_of(future, self._timeout)
        except KafkaException as error:
            failure = client_error(error, f"cannot read group {name}")
            if failure.retriable:
                raise failure from error
            # No consumer has joined the group yet, or this client may not describe it.
            return GroupFacts(name, "", {}, positions)
        members: dict[str, frozenset[int]] = {}
        for member in described.members:
            assigned = member.assignment.topic_partitions if member.assignment is not None else []
            theirs = members.get(member.client_id, frozenset())
            members[member.client_id] = theirs.union(place.partition for place in assigned)
        return GroupFacts(name, described.state.name, members, positions)

    def groups(self, prefix: str) -> list[str]:
        """Return the consumer groups whose names begin with a prefix, as far as this client may see them, sorted."""
        try:
            found = answer_of(self.admin.list_consumer_groups(request_timeout=self._timeout), self._timeout)
        except KafkaException as error:
            raise client_error(error, "cannot list the consumer groups") from error
        return sorted(each.group_id for each in found.valid if each.group_id.startswith(prefix))

    def let_go(self, group: str) -> None:
        """Close the client of a group."""
        if (client := self._groups.pop(group, None)) is not None:
            client.close()

    def committed(self, group: str, topic: str) -> list[TopicPartition]:
        """
        Return the offsets that a group committed for a topic, with their metadata; empty if this client may not read
        them.
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
