"""
The names of a queue's topics, consumer groups and transactional ids, all derived from the name of the queue.

Two queues never share a name. In kafka-mq-go the group's name does not depend on the queue, so two of its queues share
one group.
"""

from __future__ import annotations

from dataclasses import dataclass

from kmq_spark.core.names import LONGEST_QUEUE, LONGEST_SUBSCRIPTION, is_name, name_error
from kmq_spark.errors import ConfigError

MAX_TOPIC_CHARS = 249
"""Maximum length of a topic name; Kafka's own limit."""


@dataclass(frozen=True, slots=True)
class QueueTopics:
    """
    The names that belong to a queue, or to one of its subscriptions.

    Each subscription receives every message, and has its own markers topic, dead-letter topic and tracker.
    """

    queue: str
    subscription: str = ""

    @classmethod
    def parse(cls, text: str) -> QueueTopics:
        """Return the names for `queue` or `queue@subscription`, the form of the command line and the settings."""
        queue, at, subscription = text.partition("@") if isinstance(text, str) else (text, "", "")
        if at and not subscription:
            raise ConfigError(
                f"subscription is missing: got {text!r}; expected queue@subscription; name it or leave out the @"
            )
        return cls(queue, subscription)

    def __str__(self) -> str:
        """Return the form that `parse` accepts."""
        return f"{self.queue}@{self.subscription}" if self.subscription else self.queue

    def __post_init__(self) -> None:
        if self.subscription and not is_name(self.subscription, LONGEST_SUBSCRIPTION):
            raise name_error("subscription", self.subscription, LONGEST_SUBSCRIPTION)
        if not is_name(self.queue) or set(self.queue) <= {"."}:
            raise name_error("queue", self.queue)
        if len(self.redrive_topic) > MAX_TOPIC_CHARS:
            raise ConfigError(
                f"names are too long together: got {str(self)!r}; expected at most {MAX_TOPIC_CHARS} characters in the "
                f"topic name {self.redrive_topic!r}; choose shorter names"
            )

    @property
    def queue_topic(self) -> str:
        """The topic of the messages."""
        return self.queue

    @property
    def markers_topic(self) -> str:
        """The topic of the markers."""
        return f"{self._own}.markers"

    @property
    def dead_letter_topic(self) -> str:
        """The topic of the dead letters."""
        return f"{self._own}.dlq"

    @property
    def redrive_topic(self) -> str:
        """The topic of the ENDs of dead letters, as the markers topic contains the ENDs of messages."""
        return f"{self.dead_letter_topic}.markers"

    @property
    def consumer_group(self) -> str:
        """The consumer group of the queue's consumers."""
        return f"kmq.{self._own}"

    @property
    def tracker_group(self) -> str:
        """The consumer group with whose name the tracker commits its positions."""
        return f"kmq.{self._own}.tracker"

    def logical_group(self, logical_queue: str) -> str:
        """Return the consumer group of one logical queue."""
        if not is_name(logical_queue, LONGEST_QUEUE):
            raise name_error("logical queue", logical_queue)
        return f"{self.logical_group_prefix}{logical_queue}"

    @property
    def logical_group_prefix(self) -> str:
        """The prefix of the names of the consumer groups of logical queues."""
        return f"{self.consumer_group}.queue-"

    @property
    def outcome_group(self) -> str:
        """The group name with which a consumer reads the outcome of its transaction; it commits nothing."""
        return f"{self.consumer_group}.outcomes"

    def consumer_transactional_id(self, consumer_id: str) -> str:
        """Return the transactional id of a consumer; with an empty *consumer_id*, the common prefix of all of them."""
        return f"{self.consumer_group}.consumer.{consumer_id}"

    @property
    def producers_topic(self) -> str:
        """The topic of the positions of resuming producers; the same for all subscriptions of the queue."""
        return f"{self.queue}.producers"

    def producer_transactional_id(self, producer_id: str) -> str:
        """Return the transactional id of a producer; with an empty *producer_id*, the common prefix of all of them."""
        return f"kmq.{self.queue}.producer.{producer_id}"

    def sink_transactional_id(self, sink_id: str, slot: int | str) -> str:
        """Return the transactional id of a slot of a Spark sink."""
        return f"{self.sink_transactional_prefix}{sink_id}.{slot}"

    @property
    def sink_transactional_prefix(self) -> str:
        """The common prefix of the transactional ids of all Spark sinks."""
        return f"kmq.{self.queue}.sink."

    @property
    def redrive_id(self) -> str:
        """The transactional id with which dead letters are redriven and purged."""
        return f"kmq.{self._own}.redrive"

    @property
    def _own(self) -> str:
        return f"{self.queue}.subscription-{self.subscription}" if self.subscription else self.queue

    @property
    def all_topics(self) -> tuple[str, str, str]:
        """The topics that every queue must have, in the order in which they are created."""
        return (self.queue_topic, self.markers_topic, self.dead_letter_topic)
