"""
How long the topics of a queue keep what is in them, as far as a sender may know.

Rule 1: who may not read a topic's settings, or finds no such topic, is told no limit: the check is a courtesy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from confluent_kafka.admin import AdminClient

from kmq_spark.kafka.lookups import settings_of
from kmq_spark.kafka.settings import admin_config, make_client

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
    kept = [Retention(int(settings.get("retention.ms", "-1")), topic) for topic, settings in found.items()]
    return min((each for each in kept if each.retention_ms >= 0), default=Retention())
