"""
The tracker's side of the queue's rules: read them from `kmq.queues`, write them to every markers partition as RULES.

Rule 1: If the queue has no record there, or the tracker may not read it, the newest known rules from the log apply.
Rule 2: The tracker writes RULES to each markers partition to which it has not written the newest rules itself.
"""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING

from kmq_spark.errors import KafkaClientError
from kmq_spark.kafka.queue_rules import RULES_TOPIC, rules_record

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kmq_spark.core.policy import QueueRules, Rules
    from kmq_spark.kafka.positions import ResumePoint
    from kmq_spark.kafka.queue_rules import RulesReader
    from kmq_spark.kafka.queue_topics import QueueTopics
    from kmq_spark.kafka.records import OutgoingRecord

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 3.0
"""Time between two reads of the queue's rules."""


class TrackerRules:
    """
    Follows the rules of one queue for its tracker. The caller holds the sender's lock, except for `check`.

    Args:
        topics: Topic names of the queue.
        tracker_id: Id of the tracker that writes the RULES.
        local: Rules from the tracker's settings.
        reader: Reads the rules of the queue, which override *local*; None for a tracker that uses only its settings.
    """

    def __init__(self, topics: QueueTopics, tracker_id: str, local: Rules, reader: RulesReader | None) -> None:
        """Begin without rules of the queue."""
        self._topics = topics
        self._tracker_id = tracker_id
        self._local = local
        self._reader = reader
        self._newest: QueueRules | None = None
        self._written: dict[int, QueueRules] = {}  # the rules that this tracker wrote last, by markers partition
        self._checked_at_s = 0.0

    @property
    def in_force(self) -> Rules:
        """
        The rules for decisions that need the payload: the newest rules in the log at the time of writing.

        A rebuild folds each END again under the rules in force at its offset. These are the same rules, since only this
        object writes RULES.
        """
        return self._local.under(self._newest)

    def read(self) -> None:
        """
        Read the rules of the queue when the sender opens; `load` then uses them. The lock of the sender is not needed.

        Raises:
            KafkaClientError: The broker cannot be reached.
        """
        if self._reader is not None:
            self._reader.refresh()
            self._checked_at_s = time.monotonic()

    def load(self, resume: ResumePoint) -> None:
        """
        Use the rules that `read` found. Without a record, use the newest known rules from the log.

        Args:
            resume: Contains the rules in force where a rebuild begins, by markers partition.
        """
        self._written = {}
        known = [rules for rules in resume.rules.values() if rules is not None]
        self._newest = max(known, key=lambda rules: rules.version, default=None)
        if self._reader is None:
            return
        if (stored := self._reader.newest) is not None:
            self._newest = stored.rules
        elif self._reader.is_unauthorized:
            logger.warning(
                "the tracker of %s may not read %s: rules set with `kmq queue alter` are not applied; grant Read and "
                "Describe, see `kmq acls`",
                self._topics, RULES_TOPIC, extra={"action": "rules_refused", "queue": str(self._topics)},
            )  # fmt: skip

    def check(self) -> QueueRules | None:
        """
        Read the rules of the queue, at most every `CHECK_INTERVAL_S`. If the broker does not answer, try again later.

        Returns:
            The rules, to be passed to `adopt`; None if there are none, or the interval is not over.
        """
        if self._reader is None or time.monotonic() - self._checked_at_s <= CHECK_INTERVAL_S:
            return None
        self._checked_at_s = time.monotonic()
        try:
            stored = self._reader.refresh()
        except KafkaClientError as error:
            logger.warning("cannot read the rules of %s, trying again later: %s", self._topics, error)
            return None
        if stored is not None and stored.rules != self._newest:
            logger.info(
                "rules of %s changed to version %d: %s",
                self._topics, stored.version, json.dumps(stored.to_dict()),
                extra={"action": "rules_changed", "queue": str(self._topics)},
            )  # fmt: skip
        return None if stored is None else stored.rules

    def adopt(self, rules: QueueRules | None) -> None:
        """Use these rules from now on; None changes nothing."""
        self._newest = rules or self._newest

    def records(self, partitions: Iterable[int]) -> list[OutgoingRecord]:
        """Return the RULES that this tracker has yet to write, at most one per markers partition."""
        rules = self._newest
        if rules is None:
            return []
        return [
            rules_record(rules, self._topics.markers_topic, partition, self._tracker_id)
            for partition in partitions
            if self._written.get(partition) != rules
        ]

    def note_written(self, partitions: Iterable[int]) -> None:
        """Note that the records from `records` are committed."""
        if self._newest is not None:
            self._written = dict.fromkeys(partitions, self._newest)

    def close(self) -> None:
        """Close the client."""
        if self._reader is not None:
            self._reader.close()
