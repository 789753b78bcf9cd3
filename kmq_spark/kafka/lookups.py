"""Ask the broker for offsets, ids and settings of topics. What this client may not read is left out."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from confluent_kafka import OFFSET_END, IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, OffsetSpec, ResourceType

from kmq_spark.kafka.client_errors import (
    DENIED,
    answer_of,
    client_error,
    has_old_metadata,
    retry_until_answered,
)
from kmq_spark.kafka.settings import admin_config, make_client

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Mapping

    from confluent_kafka import Consumer

EARLIEST, LATEST = OffsetSpec.earliest(), OffsetSpec.latest()  # type: ignore[no-untyped-call]  # as shipped

PROBE_S = 1.0
"""Maximum time for the response to a probe, and the pause after a successful one."""

PROBE_PAUSE_S = 0.2


class Bounds(NamedTuple):
    """First offset of a partition, and its end as the client sees it: with `read_committed`, the last stable offset."""

    first: int
    end: int


def bounds_of(client: Consumer, place: TopicPartition, timeout_s: float) -> Bounds:
    """
    Return the bounds of a partition. Wait for its leader if it has none at the moment.

    Not by the admin client: its requests may abort the process while a broker goes away (librdkafka issue 4605).
    """
    operation = f"cannot read the offsets of {place.topic}"
    return retry_until_answered(partial(bounds_now, client, place, timeout_s), operation, timeout_s)


def bounds_now(client: Consumer, place: TopicPartition, timeout_s: float) -> Bounds:
    """
    Return the bounds of a partition without waiting for a leader.

    The error is `_UNKNOWN_PARTITION` if the partition does not exist, `LEADER_NOT_AVAILABLE` if it has no leader.
    """
    for is_last in (False, True):
        try:
            found = client.get_watermark_offsets(place, timeout=timeout_s, cached=False)
        except KafkaException as error:
            if error.args[0].code() != KafkaError._UNKNOWN_PARTITION:  # noqa: SLF001  # librdkafka's public name for it
                raise
            if is_last:
                break
            # Either the partition does not exist, or it is new and the client refreshes its metadata only every five
            # minutes, or its broker has just returned and no partition has a leader yet.
            if place.partition not in partitions_now(client, place.topic, timeout_s):
                raise
        else:
            if found is None:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT))  # noqa: SLF001  # as above
            return Bounds(*found)
    raise KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE))


def partitions_now(client: Consumer, topic: str, timeout_s: float) -> set[int]:
    """Return the partitions that a topic has, as one broker knows them: it may not know the newest yet."""
    found = client.list_topics(topic, timeout=timeout_s).topics[topic]
    if found.error is not None:
        raise KafkaException(found.error)
    return set(found.partitions)


def ends_now(client: Consumer, topic: str, partitions: Iterable[int], timeout_s: float) -> dict[int, int]:
    """
    Return the ends of partitions, as `bounds_now`, with one request for each broker.

    A partition whose end cannot be read is left out: ask `bounds_of` why.
    """
    # A negative time stands for the end in Kafka's protocol (ListOffsets), and the client passes it on.
    wanted = [TopicPartition(topic, partition, OFFSET_END) for partition in partitions]
    try:
        found = client.offsets_for_times(wanted, timeout=timeout_s)
    except KafkaException as error:
        failure = client_error(error, f"cannot read the offsets of {topic}")
        if failure.retriable and not has_old_metadata(error):
            raise
        # The client knows none of the partitions, or its metadata are out of date.
        return {}
    return {place.partition: place.offset for place in found if place.error is None and place.offset >= 0}


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
    Return one offset of each partition: the first, the end, or the first from an instant on.

    The end is the last stable offset, or the high watermark if *with_open_transactions*.
    """
    isolation = IsolationLevel.READ_UNCOMMITTED if with_open_transactions else IsolationLevel.READ_COMMITTED
    wanted = {TopicPartition(topic, partition): spec for partition in partitions}
    if not wanted:
        return {}

    def request() -> dict[int, int]:
        futures = admin.list_offsets(wanted, isolation_level=isolation, request_timeout=timeout_s)
        try:
            return {place.partition: answer_of(future, timeout_s).offset for place, future in futures.items()}
        except KafkaException as error:
            if has_old_metadata(error):
                admin.list_topics(topic, timeout=timeout_s)
            raise

    return retry_until_answered(request, f"cannot read the offsets of {topic}", timeout_s)


def topic_id_of(admin: AdminClient, topic: str, timeout_s: float) -> str:
    """Return the id of a topic; empty if unknown. A topic that was deleted and created again has another id."""

    def request() -> str:
        (future,) = admin.describe_topics(TopicCollection([topic]), request_timeout=timeout_s).values()
        topic_id = answer_of(future, timeout_s).topic_id
        # Brokers before 2.8 have no topic ids.
        return "" if topic_id is None or not topic_id.get_most_significant_bits() else str(topic_id)

    return retry_until_answered(request, f"cannot read the id of {topic}", timeout_s)


def settings_of(
    admin: AdminClient, topics: Iterable[str], timeout_s: float, *, skip_errors: bool = False
) -> dict[str, dict[str, str]]:
    """
    Return the settings of topics. A topic whose settings this client may not read is left out.

    With *skip_errors*, a topic is left out for every other error too that is not retriable.
    """
    wanted = [ConfigResource(ResourceType.TOPIC, topic) for topic in topics]
    futures: dict[Any, Any] = admin.describe_configs(wanted, request_timeout=timeout_s) if wanted else {}
    found = {}
    for resource, future in futures.items():
        try:
            entries = answer_of(future, timeout_s)
        except KafkaException as error:
            failure = client_error(error, f"cannot read the settings of topic {resource.name}")
            if error.args[0].name() in DENIED or (skip_errors and not failure.retriable):
                continue
            raise failure from error
        found[resource.name] = {key: str(entry.value) for key, entry in entries.items()}
    return found


def wait_for_broker(
    stopping: threading.Event,
    longest_s: float,
    *,
    is_unreachable: bool,
    bootstrap_servers: str,
    timeout: float,
    extra: Mapping[str, str] | None = None,
) -> None:
    """Wait for *longest_s*, or until an unreachable broker responds again, or *stopping* is set."""
    deadline_s = time.monotonic() + longest_s
    if longest_s <= 0:
        return
    admin = make_client(AdminClient, admin_config(bootstrap_servers, extra=extra))
    while (left_s := deadline_s - time.monotonic()) > 0 and not stopping.is_set():
        try:
            admin.list_topics(timeout=min(PROBE_S, left_s, timeout))
        except KafkaException:
            is_unreachable = True
            pause_s = PROBE_PAUSE_S
        else:
            if is_unreachable:
                return
            pause_s = PROBE_S
        stopping.wait(max(0.0, min(pause_s, deadline_s - time.monotonic())))


def broker_settings(admin: AdminClient, brokers: Iterable[int], timeout_s: float) -> dict[str, str]:
    """Return the settings of the broker with the lowest id, by name; empty if this client may not read them."""
    if not (lowest := sorted(brokers)[:1]):
        return {}
    resource = ConfigResource(ResourceType.BROKER, str(lowest[0]))
    (future,) = admin.describe_configs([resource], request_timeout=timeout_s).values()
    try:
        entries = answer_of(future, timeout_s)
    except KafkaException:
        return {}  # needs DescribeConfigs on the cluster: without it the checks of these settings are skipped
    return {name: entry.value for name, entry in entries.items() if entry.value is not None}
