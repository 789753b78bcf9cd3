"""
Log when a consumer starts without committed offsets: its group is new, or its offsets have expired.

If the offsets have expired, acknowledged messages are delivered again. Kafka does not distinguish the two cases and
logs nothing.

Rule 1: offsets expire when a group has had no members for `offsets.retention.minutes`. All messages that the group
acknowledged are then older than that. If no message in the topic is older, no acknowledged message can be repeated: log
one INFO line. Otherwise, or if this client has no permission to read the brokers' setting, log one WARNING.
Rule 2: best effort. The check delays the first batch of an assignment by one request, and never fails that batch.

Source: KIP-211.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from kmq_spark.errors import KmqError
from kmq_spark.kafka.lookups import EARLIEST, LATEST, broker_settings, offsets_of, offsets_retention_ms
from kmq_spark.kafka.settings import admin_config, make_client

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from confluent_kafka import Consumer

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 5.0

CLOCK_MARGIN = 0.9
"""Share of the retention after which a message counts as older, because clocks of brokers and consumers differ."""


class MissingOffsets:
    """
    Check whether assigned partitions have committed offsets.

    Args:
        group: Consumer group.
        topic: Queue topic.
        bootstrap_servers: Comma-separated `host:port`.
        extra: librdkafka settings.
    """

    def __init__(
        self, group: str, topic: str, *, bootstrap_servers: str, extra: Mapping[str, str] | None = None
    ) -> None:
        """Store the values. The first request is sent by `check`."""
        self._group = group
        self._topic = topic
        self._bootstrap_servers = bootstrap_servers
        self._extra = extra
        self._logged: set[int] = set()

    def check(self, client: Consumer, partitions: Collection[int]) -> None:
        """
        Log the partitions that have messages and no committed offset, each once.

        Args:
            client: Client of the consumer group.
            partitions: Partitions assigned since the last check. This consumer has not committed them yet.
        """
        topic_partitions = [TopicPartition(self._topic, partition) for partition in sorted(partitions)]
        try:
            committed = client.committed(topic_partitions, REQUEST_TIMEOUT_S)
            missing = {each.partition for each in committed if each.error is None and each.offset < 0} - self._logged
            if missing:
                self._log(missing)
        except (KafkaException, KmqError) as error:
            logger.info(
                "cannot check whether consumer group %s has committed offsets of %s: %s; the check is skipped",
                self._group, self._topic, error,
            )  # fmt: skip

    def _log(self, partitions: set[int]) -> None:
        admin = make_client(AdminClient, admin_config(self._bootstrap_servers, extra=self._extra))
        first, end = (
            offsets_of(admin, self._topic, partitions, spec, REQUEST_TIMEOUT_S) for spec in (EARLIEST, LATEST)
        )
        held = {partition: end[partition] - first[partition] for partition in partitions}
        held = {partition: count for partition, count in held.items() if count > 0}
        if not held:
            return
        self._logged |= held.keys()
        count = sum(held.values())
        starts = ", ".join(f"[{partition}] {first[partition]}" for partition in sorted(held))
        older = self._older_count(admin, first, end, held)
        extra = {"action": "no_committed_offsets", "topic": self._topic}
        if older == 0:
            logger.info(
                "consumer group %s has no committed offsets of %s yet: it starts at %s and receives %d messages",
                self._group, self._topic, starts, count, extra=extra,
            )  # fmt: skip
            return
        logger.warning(
            "consumer group %s has no committed offsets of %s: it starts at %s and receives all %d messages there. If "
            "this group has never read %s, that is its normal start. Otherwise its offsets expired "
            "(offsets.retention.minutes of the brokers) or were deleted, and messages that it acknowledged are "
            "delivered again: to skip them, stop its consumers and run kafka-consumer-groups.sh --group %s --topic %s "
            "--reset-offsets; see docs/operations.md",
            self._group, self._topic, starts, count, self._topic, self._group, self._topic, extra=extra,
        )  # fmt: skip

    def _older_count(
        self, admin: AdminClient, first: Mapping[int, int], end: Mapping[int, int], partitions: Collection[int]
    ) -> int | None:
        """Return how many messages are older than the offset retention of the brokers; None if that is unknown."""
        brokers = admin.list_topics(self._topic, timeout=REQUEST_TIMEOUT_S).brokers
        kept_ms = offsets_retention_ms(broker_settings(admin, brokers, REQUEST_TIMEOUT_S))
        if kept_ms is None:
            return None
        since = OffsetSpec.for_timestamp(int(time.time() * 1000 - CLOCK_MARGIN * kept_ms))
        younger = offsets_of(admin, self._topic, partitions, since, REQUEST_TIMEOUT_S)
        # `at` is negative if every message is older.
        return sum((at if at >= 0 else end[p]) - first[p] for p, at in younger.items())
