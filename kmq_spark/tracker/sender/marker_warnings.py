"""Log markers of messages that do not exist."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kmq_spark.core.outcome import PartitionOutcome
    from kmq_spark.kafka.queue_topics import QueueTopics

logger = logging.getLogger(__name__)


class MarkerWarnings:
    """
    The warnings of one queue's sender.

    Args:
        topics: Topic names of the queue.
    """

    def __init__(self, topics: QueueTopics) -> None:
        """Begin with counters at 0."""
        self._topics = topics
        self._counted: dict[tuple[str, int], int] = {}

    def new_nonexistent(self, outcome: PartitionOutcome) -> int:
        """Return how many messages the fold has dropped, since the last call, because the queue topic lacks them."""
        return self._growth_of("nonexistent", outcome)

    def log_nonexistent(self, count: int) -> None:
        """Log that a batch dropped *count* messages that the queue topic does not have; 0: log nothing."""
        if count:
            logger.warning(
                "%d messages of %s were dropped without a dead letter: their markers name offsets that the queue topic "
                "does not have; find the client that writes such markers, or check whether the topic was deleted and "
                "created again",
                count, self._topics, extra={"action": "nonexistent_messages", "queue": str(self._topics)},
            )  # fmt: skip

    def _growth_of(self, counter: str, outcome: PartitionOutcome) -> int:
        """Return by how much a counter of a markers partition has grown since the last call; 0 if it has shrunk."""
        key = counter, outcome.marker_partition
        count = outcome.status.counters.get(counter, 0)
        before, self._counted[key] = self._counted.get(key, 0), count
        return max(0, count - before)
