"""
The tracker's side of the queue's rules: read them from `kmq.queues`, write them to every markers partition as RULES.

Rule 1: if the queue has no record there, or the tracker may not read it, the newest known rules from the log apply.
Rule 2: what a decision applies is what stands in the log below it: the rules that are written, not those just read.
"""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING

from kmq_spark.core.policy import DEFAULT_RULES, QueueRules
from kmq_spark.errors import KafkaClientError
from kmq_spark.kafka.queue_rules import RULES_TOPIC

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kmq_spark.kafka.queue_rules import RulesReader
    from kmq_spark.kafka.queue_topics import QueueTopics

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 3.0
"""Time between two reads of the queue's rules."""


class TrackerRules:
    """
    Follows the rules of one queue for its tracker.

    Attributes:
        written: The newest rules that stand in the log.
    """

    def __init__(self, topics: QueueTopics, reader: RulesReader) -> None:
        self._topics = topics
        self._reader = reader
        self._checked_at_s = 0.0
        self.written: QueueRules = DEFAULT_RULES

    def read_first(self, known: Iterable[QueueRules | None]) -> None:
        """Read the rules of the queue when a tracker starts."""
        self._checked_at_s = time.monotonic()
        stored = self._reader.refresh()
        in_log = max((each for each in known if each is not None), key=lambda each: each.version, default=DEFAULT_RULES)
        self.written = in_log if stored is None else stored.rules
        if self._reader.is_unauthorized:
            logger.warning(
                "the tracker of %s may not read %s: rules set with `kmq queue alter` are not applied; grant Read and "
                "Describe, see `kmq acls`",
                self._topics, RULES_TOPIC, extra={"action": "rules_refused", "queue": str(self._topics)},
            )  # fmt: skip

    def changed(self) -> QueueRules | None:
        """
        Return the rules of the queue if they are not yet written; looks at most every `CHECK_INTERVAL_S`.

        If the broker does not answer, try again later.
        """
        if time.monotonic() - self._checked_at_s <= CHECK_INTERVAL_S:
            return None
        self._checked_at_s = time.monotonic()
        try:
            stored = self._reader.refresh()
        except KafkaClientError as error:
            logger.warning("cannot read the rules of %s, trying again later: %s", self._topics, error)
            return None
        if stored is None or stored.rules == self.written:
            return None
        logger.info(
            "rules of %s changed to version %d: %s",
            self._topics, stored.version, json.dumps(stored.to_dict()),
            extra={"action": "rules_changed", "queue": str(self._topics)},
        )  # fmt: skip
        return stored.rules

    def close(self) -> None:
        """Close the client."""
        self._reader.close()
