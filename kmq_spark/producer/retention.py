"""
Read the retention of a queue's topics, to reject a delay that is longer.

Rule 1: best effort. A topic that does not exist, or whose settings this client has no permission to read, counts as a
topic without a retention limit.
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
        retention_ms: Milliseconds; -1 if there is no limit or the limit is unknown.
        topic: The topic with that retention; empty if there is none.
    """

    retention_ms: int = -1
    topic: str = ""


class KnownRetentions:
    """
    Cache of the retention of each queue, read when the first delayed message is sent to that queue.

    Args:
        bootstrap_servers: Comma-separated `host:port`.
        extra: librdkafka settings.
        timeout: Timeout of each request to the broker, seconds.
    """

    def __init__(self, bootstrap_servers: str, extra: Mapping[str, str] | None, timeout: float) -> None:
        """Start with an empty cache."""
        self._bootstrap_servers = bootstrap_servers
        self._extra = extra
        self._timeout = timeout
        self._known: dict[str, Retention] = {}

    def check(self, queue: str, waits_ms: int) -> None:
        """
        Reject a message if retention would delete it before its delivery time.

        Before it rejects a message, this method reads the retention again, because it may have been raised.

        Args:
            queue: Name of the queue and of its topic.
            waits_ms: Result of `wait_ms`; 0 needs no check.

        Raises:
            ConfigError: The wait is longer than the retention of the queue topic or of its markers topic.
            KafkaClientError: The broker does not answer within *timeout*.
        """
        if waits_ms == 0:
            return
        known = self._known.get(queue)
        if known is None or 0 <= known.retention_ms < waits_ms:
            topics = QueueTopics(queue)
            known = self._known[queue] = shortest_retention(
                (topics.queue_topic, topics.markers_topic), self._bootstrap_servers, self._extra, self._timeout
            )
        check_wait(waits_ms, *known)


def shortest_retention(
    topics: Sequence[str], bootstrap_servers: str, extra: Mapping[str, str] | None, timeout: float
) -> Retention:
    """
    Return the shortest `retention.ms` among topics.

    Args:
        topics: Topic names. A topic that does not exist, or whose settings this client has no permission to read, is
            skipped.
        bootstrap_servers: Comma-separated `host:port`.
        extra: librdkafka settings.
        timeout: Timeout of the call, seconds.

    Raises:
        KafkaClientError: The broker does not answer within *timeout*.
    """
    admin = make_client(AdminClient, admin_config(bootstrap_servers, extra=extra))
    found = settings_of(admin, topics, timeout, skip_errors=True)
    # A missing value and -1 both mean: no known limit.
    texts = {topic: settings.get("retention.ms", "") for topic, settings in found.items()}
    return min((Retention(int(text), topic) for topic, text in texts.items() if text.isdecimal()), default=Retention())
