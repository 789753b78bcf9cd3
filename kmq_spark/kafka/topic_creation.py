"""
Create topics, and set what depends on the number of their replicas.

Rule 1: A topic that another process creates at the same time is not an error: the caller checks the topic afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from confluent_kafka import KafkaException
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from kmq_spark.failpoints import failpoint
from kmq_spark.kafka.bounded_calls import answer_of
from kmq_spark.kafka.client_errors import client_error, unreachable
from kmq_spark.kafka.lookups import NOT_ALLOWED
from kmq_spark.kafka.replication import replication_settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from confluent_kafka.admin import AdminClient, NewTopic


class TopicShape(NamedTuple):
    """Size of a topic: its partitions, and the replicas of its first partition; both 0 if it does not exist."""

    partitions: int
    replicas: int


def shape_of(client: Any, topic: str, bootstrap_servers: str, timeout: float) -> TopicShape:  # noqa: ANN401  # below
    """
    Return the size of a topic.

    Args:
        client: Any client with `list_topics`: producer, consumer and admin client have no common type.
        topic: Name of the topic.
        bootstrap_servers: For error messages only.
        timeout: Maximum time for the call.

    Raises:
        KafkaClientError: The broker cannot be reached.
    """
    try:
        metadata = client.list_topics(topic, timeout=timeout).topics.get(topic)
    except KafkaException as error:
        raise unreachable(error, client, bootstrap_servers) from error
    if metadata is None or metadata.error is not None or not metadata.partitions:
        return TopicShape(0, 0)
    return TopicShape(len(metadata.partitions), len(metadata.partitions[min(metadata.partitions)].replicas))


def create_topics(admin: AdminClient, missing: Sequence[NewTopic], timeout: float) -> None:
    """
    Create topics.

    Raises:
        KafkaClientError: The broker cannot be reached in time, or refuses.
    """
    futures = admin.create_topics(list(missing), operation_timeout=timeout, request_timeout=timeout)
    for name, future in futures.items():
        try:
            answer_of(future, timeout)
        except KafkaException as error:
            if error.args[0].name() != "TOPIC_ALREADY_EXISTS":
                raise client_error(error, f"cannot create topic {name}") from error
        failpoint("queue.topic-created")


def require_quorum(admin: AdminClient, made: Mapping[str, TopicShape], timeout: float) -> None:
    """
    Set `min.insync.replicas` of new topics whose number of replicas is the broker's default.

    Args:
        admin: Admin client.
        made: Topics that the caller has created, by name: existing topics are never changed.
        timeout: Maximum time for each call to the broker.

    Raises:
        KafkaClientError: The broker cannot be reached in time, or refuses.
    """
    key = "min.insync.replicas"
    wanted = {name: replication_settings(shape.replicas).get(key) for name, shape in made.items()}
    resources = [
        ConfigResource(
            ResourceType.TOPIC,
            name,
            incremental_configs=[ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)],
        )
        for name, value in wanted.items()
        if value is not None
    ]
    if not resources:
        return
    futures = admin.incremental_alter_configs(resources, request_timeout=timeout)
    for resource, future in futures.items():
        try:
            answer_of(future, timeout)
        except KafkaException as error:
            # The check that follows reports the setting and the command, for a user with the right to change it.
            if NOT_ALLOWED not in error.args[0].name():
                raise client_error(error, f"cannot set {key} of topic {resource.name}") from error
