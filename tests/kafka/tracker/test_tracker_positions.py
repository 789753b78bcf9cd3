"""What a starting tracker asks the broker, and in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka.admin import AdminClient

from kmq_spark.kafka.positions import TrackerPositions
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.settings import admin_config, reader_config

if TYPE_CHECKING:
    from tests.kafka.conftest import Queue

pytestmark = pytest.mark.kafka


class RecordingAdmin(AdminClient):
    """An admin client that keeps the names of its requests."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.requests: list[str] = []

    def describe_topics(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401  # as the client
        """Request topics."""
        self.requests.append("topics")
        return super().describe_topics(*arguments, **options)

    def list_offsets(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401  # as the client
        """Request offsets."""
        self.requests.append("offsets")
        return super().list_offsets(*arguments, **options)


def test_first_request_of_a_starting_tracker_is_not_for_offsets(queue: Queue) -> None:
    """While a client connects, librdkafka may answer a request for offsets only after 3 s."""
    admin = RecordingAdmin(admin_config(queue.bootstrap_servers, "test"))
    reading = reader_config(queue.bootstrap_servers, f"kmq.{queue.name}.tracker")
    beginning = TrackerPositions(reading, admin, QueueTopics(queue.name), 1, 10).beginning()
    assert beginning.first == {0: 0}
    assert admin.requests == ["topics", "offsets", "topics"]
