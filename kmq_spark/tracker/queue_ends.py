"""
Read the end offsets of a queue topic's partitions without blocking.

Rule 1: Best effort: an end offset that cannot be read is `NOT_KNOWN`, and nothing follows from it.
Rule 2: The end offset is the high watermark, which includes open transactions, since consumers may read these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from kmq_spark.kafka.client_errors import has_old_leader_epoch
from kmq_spark.kafka.lookups import LATEST
from kmq_spark.kafka.settings import make_client

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future

NOT_KNOWN = -1

TIMEOUT_S = 5.0


class QueueEnds:
    """
    Requests the end offsets of one queue topic.

    Args:
        config: librdkafka settings of the admin client.
        topic: The queue topic.
    """

    def __init__(self, config: Mapping[str, Any], topic: str) -> None:
        """Store the settings; the first `ask` connects."""
        self._config = dict(config)
        self._topic = topic
        self._admin: AdminClient | None = None
        self._answers: list[Future[Any]] = []

    @property
    def is_asking(self) -> bool:
        """Whether there is a request whose answer `take` has not returned yet."""
        return bool(self._answers)

    def ask(self, partition_count: int) -> None:
        """Request the end offsets of the partitions 0 to *partition_count* - 1; `take` returns the answer."""
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
        """
        Return the answer to `ask`, once.

        Returns:
            End offset of each partition, from 0 on; `NOT_KNOWN` where it could not be read. None without a request, and
            before all partitions have answered.
        """
        if not self._answers or not all(answer.done() for answer in self._answers):
            return None
        ends = tuple(NOT_KNOWN if answer.exception() else int(answer.result().offset) for answer in self._answers)
        if any(has_old_leader_epoch(answer.exception()) for answer in self._answers):
            # A new client reads the metadata anew. To have this one read them would block.
            self._admin = None
        self._answers = []
        return ends
