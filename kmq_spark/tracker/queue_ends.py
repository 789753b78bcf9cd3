"""
Where the partitions of a queue topic end, read without waiting for the broker.

Rule 1: best effort: an end that cannot be read is not known, and says nothing.
Rule 2: the end is the high watermark, open transactions included: a consumer may read those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from kmq_spark.kafka.lookups import LATEST
from kmq_spark.kafka.settings import make_client

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future

NOT_KNOWN = -1

TIMEOUT_S = 5.0


class QueueEnds:
    """
    Asks for the ends of a queue topic.

    Args:
        config: librdkafka settings of an admin client; it connects with the first question.
        topic: The queue topic.
    """

    def __init__(self, config: Mapping[str, Any], topic: str) -> None:
        """Connect lazily."""
        self._config = dict(config)
        self._topic = topic
        self._admin: AdminClient | None = None
        self._answers: list[Future[Any]] = []

    @property
    def is_asking(self) -> bool:
        """Whether there is a question whose answer was not taken."""
        return bool(self._answers)

    def ask(self, partition_count: int) -> None:
        """Ask where the partitions end, from 0 on; `take` has the answer."""
        if self._admin is None:
            self._admin = make_client(AdminClient, self._config)
        places = [TopicPartition(self._topic, partition) for partition in range(partition_count)]
        try:
            futures = self._admin.list_offsets(
                dict.fromkeys(places, LATEST),
                isolation_level=IsolationLevel.READ_UNCOMMITTED,
                request_timeout=TIMEOUT_S,
            )
        except KafkaException:
            return
        self._answers = [futures[place] for place in places]

    def take(self) -> tuple[int, ...] | None:
        """Return the end of each partition, `NOT_KNOWN` where it could not be read; None before all have answered."""
        if not self._answers or not all(answer.done() for answer in self._answers):
            return None
        ends = tuple(NOT_KNOWN if answer.exception() else int(answer.result().offset) for answer in self._answers)
        self._answers = []
        return ends
