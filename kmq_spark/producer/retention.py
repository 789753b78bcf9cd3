"""
How long the topics of a queue keep what is in them, as far as a sender may know.

Rule 1: who may not read a topic's settings, or finds no such topic, is told no limit: the check is a courtesy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from confluent_kafka.admin import AdminClient

from kmq_spark.kafka.lookups import settings_of
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.settings import admin_config, make_client
from kmq_spark.producer.send_options import check_wait

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Retention(NamedTuple):
    """
    The shortest retention among some topics.

    Attributes:
        retention_ms: Milliseconds; -1 for no limit, or for none that we may know.
        topic: The topic that has it, empty for none.
    """

    retention_ms: int = -1
    topic: str = ""


class KnownRetentions:
    """
    How long queues keep a message that waits, each read when the first such message is sent to it.

    Args:
        bootstrap_servers: Comma-separated `host:port`.
        extra: librdkafka settings.
        timeout_ms: Bound on each look.
    """

    def __init__(self, bootstrap_servers: str, extra: Mapping[str, str] | None, timeout_ms: int) -> None:
        """Know none yet."""
        self._bootstrap_servers = bootstrap_servers
        self._extra = extra
        self._timeout_ms = timeout_ms
        self._known: dict[str, Retention] = {}

    def check(self, queue: str, waits_ms: int) -> None:
        """
        Refuse what retention would remove before its time; it is read again first: it may have been raised.

        Args:
            queue: The queue, and its topic.
            waits_ms: From `wait_ms`.

        Raises:
            ConfigError: The wait is longer than the queue topic or its markers topic keeps anything.
            KafkaClientError: The broker cannot be reached in time.
        """
        if waits_ms == 0:
            return
        known = self._known.get(queue)
        if known is None or 0 <= known.retention_ms < waits_ms:
            topics = QueueTopics(queue)
            known = self._known[queue] = shortest_retention(
                (topics.queue_topic, topics.markers_topic), self._bootstrap_servers, self._extra, self._timeout_ms
            )
        check_wait(waits_ms, *known)


def shortest_retention(
    topics: Sequence[str], bootstrap_servers: str, extra: Mapping[str, str] | None, timeout_ms: int
) -> Retention:
    """
    Return the shortest `retention.ms` of some topics.

    Args:
        topics: Names of topics; those that do not exist, or that we may not look at, are passed over.
        bootstrap_servers: Comma-separated `host:port`.
        extra: librdkafka settings.
        timeout_ms: Bound on the call.

    Raises:
        KafkaClientError: The broker cannot be reached in time.
    """
    admin = make_client(AdminClient, admin_config(bootstrap_servers, extra=extra))
    found = settings_of(admin, topics, timeout_ms / 1000, where_we_can=True)
    # No number, or -1: no limit that we know.
    texts = {topic: settings.get("retention.ms", "") for topic, settings in found.items()}
    return min((Retention(int(text), topic) for topic, text in texts.items() if text.isdecimal()), default=Retention())
