"""
What the broker is asked about topics: offsets and settings.

Rule 1: a broker that does not answer is an error; what we may not read is left out.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from confluent_kafka import IsolationLevel, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, OffsetSpec, ResourceType

from kmq_spark.kafka.client_errors import client_error, until_answered
from kmq_spark.kafka.settings import admin_config, make_client

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Mapping

EARLIEST, LATEST = OffsetSpec.earliest(), OffsetSpec.latest()  # type: ignore[no-untyped-call]  # as shipped

PROBE_S = 1.0
"""How long a broker may take to answer a probe, and the pause after one that it answered."""

PROBE_PAUSE_S = 0.2

NOT_ALLOWED = "AUTHORIZATION_FAILED"
"""In the names of the codes that say so."""


def offsets_of(
    admin: AdminClient,
    topic: str,
    partitions: Iterable[int],
    spec: OffsetSpec,
    timeout_s: float,
    *,
    with_open_transactions: bool = False,
) -> dict[int, int]:
    """
    Return an offset of each partition: the first, the end, the first from an instant on.

    Args:
        admin: Admin client.
        topic: The topic.
        partitions: Its partitions.
        spec: Which offset.
        timeout_s: Bound on the answer, seconds.
        with_open_transactions: Whether the end is the very end; else it is that of what is committed.

    Raises:
        KafkaClientError: The broker cannot be reached in time.
    """
    isolation = IsolationLevel.READ_UNCOMMITTED if with_open_transactions else IsolationLevel.READ_COMMITTED
    wanted = {TopicPartition(topic, partition): spec for partition in partitions}
    if not wanted:
        return {}

    def ask() -> dict[int, int]:
        futures = admin.list_offsets(wanted, isolation_level=isolation, request_timeout=timeout_s)
        return {place.partition: future.result().offset for place, future in futures.items()}

    return until_answered(ask, f"cannot read the offsets of {topic}", timeout_s)


def topic_id_of(admin: AdminClient, topic: str, timeout_s: float) -> str:
    """
    Return the id of a topic, which a topic made anew under the same name does not share; empty where unknown.

    Args:
        admin: Admin client.
        topic: The topic.
        timeout_s: Bound on the answer, seconds.

    Raises:
        KmqError: The broker cannot be reached in time, or there is no such topic.
    """

    def ask() -> str:
        (future,) = admin.describe_topics(TopicCollection([topic]), request_timeout=timeout_s).values()
        topic_id = future.result().topic_id
        # Brokers before 2.8 have none.
        return "" if topic_id is None or not topic_id.get_most_significant_bits() else str(topic_id)

    return until_answered(ask, f"cannot read the id of {topic}", timeout_s)


def settings_of(
    admin: AdminClient, topics: Iterable[str], timeout_s: float, *, where_we_can: bool = False
) -> dict[str, dict[str, str]]:
    """
    Return the settings of topics; one whose settings we may not read is left out.

    Args:
        admin: Admin client.
        topics: Names.
        timeout_s: Bound on the answer, seconds.
        where_we_can: Whether a topic is left out for every other reason too that asking again would not change.

    Raises:
        KafkaClientError: The broker cannot be reached in time; or there is no such topic.
    """
    wanted = [ConfigResource(ResourceType.TOPIC, topic) for topic in topics]
    futures: dict[Any, Any] = admin.describe_configs(wanted, request_timeout=timeout_s) if wanted else {}
    found = {}
    for resource, future in futures.items():
        try:
            entries = future.result()
        except KafkaException as error:
            failure = client_error(error, f"cannot read the settings of topic {resource.name}")
            if NOT_ALLOWED in error.args[0].name() or (where_we_can and not failure.retriable):
                continue
            raise failure from error
        found[resource.name] = {key: str(entry.value) for key, entry in entries.items()}
    return found


def wait_for_broker(
    stopping: threading.Event,
    longest_s: float,
    *,
    was_away: bool,
    bootstrap_servers: str,
    timeout_ms: int,
    extra: Mapping[str, str] | None = None,
) -> None:
    """
    Wait for a time, or until a broker that did not answer answers.

    Args:
        stopping: Ends the wait.
        longest_s: The time, seconds.
        was_away: Whether the broker is known not to have answered.
        bootstrap_servers: Comma-separated `host:port`.
        timeout_ms: Upper bound on one probe.
        extra: librdkafka settings.
    """
    deadline_s = time.monotonic() + longest_s
    if longest_s <= 0:
        return
    admin = make_client(AdminClient, admin_config(bootstrap_servers, extra=extra))
    while (left_s := deadline_s - time.monotonic()) > 0 and not stopping.is_set():
        try:
            admin.list_topics(timeout=min(PROBE_S, left_s, timeout_ms / 1000))
        except KafkaException:
            was_away = True
            pause_s = PROBE_PAUSE_S
        else:
            if was_away:
                return
            pause_s = PROBE_S
        stopping.wait(max(0.0, min(pause_s, deadline_s - time.monotonic())))


def offsets_retention_ms(admin: AdminClient, brokers: Iterable[int], timeout_s: float) -> int | None:
    """
    Return after how long without members a group's offsets expire, milliseconds; None where we may not know.

    Args:
        admin: Admin client.
        brokers: Their ids; the first one is asked.
        timeout_s: Bound on the answer, seconds.
    """
    wanted = [ConfigResource(ResourceType.BROKER, str(broker)) for broker in sorted(brokers)[:1]]
    futures: dict[Any, Any] = admin.describe_configs(wanted, request_timeout=timeout_s) if wanted else {}
    for future in futures.values():
        try:
            entry = future.result().get("offsets.retention.minutes")
        except KafkaException:
            return None  # an extra right (DescribeConfigs on the cluster): the check is left out
        return None if entry is None or entry.value is None else int(entry.value) * 60_000
    return None
