"""
The rules of a queue on the tracker's side: read from `kmq.queues`, and written to every markers partition as RULES.

Rule 1: without a record, or without the right to read it, the newest rules that the log is known to have hold.
Rule 2: RULES are written where the log does not have the newest rules from this tracker.
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

    from kmq_spark.core.outcome import PartitionOutcome
    from kmq_spark.core.policy import QueueRules, Rules
    from kmq_spark.kafka.positions import ResumePoint
    from kmq_spark.kafka.queue_rules import RulesReader
    from kmq_spark.kafka.queue_topics import QueueTopics
    from kmq_spark.kafka.records import OutgoingRecord

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 3.0
"""How often a tracker looks whether the rules of its queue changed."""

RULES_AGAIN_S = 30.0
"""How long a tracker waits until it writes its rules again where the log says otherwise."""


class TrackerRules:
    """
    Follows the rules of one queue for its tracker. Its methods, except `look`, are called under the sender's lock.

    Args:
        topics: Names of the queue.
        tracker_id: Writer of the RULES.
        local: Rules of the tracker's settings.
        reader: Follows the rules that belong to the queue, which go before these; None for a tracker without.
    """

    def __init__(self, topics: QueueTopics, tracker_id: str, local: Rules, reader: RulesReader | None) -> None:
        """Know of no rules of the queue yet."""
        self._topics = topics
        self._tracker_id = tracker_id
        self._local = local
        self._reader = reader
        self._newest: QueueRules | None = None
        self._ruled: dict[int, QueueRules] = {}  # the newest rules that the log has from us, by markers partition
        self._ruled_at_s = self._looked_at_s = 0.0

    @property
    def in_force(self) -> Rules:
        """
        The rules by which payloads are judged: the newest that are in the log, as it was written.

        An END is folded again under the rules in force at its place, and RULES are written here alone.
        """
        return self._local.under(self._newest)

    def take(self, resume: ResumePoint) -> None:
        """Find the rules of the queue as it is opened; without a record, the newest that the log is known to have."""
        self._ruled = {}
        known = [rules for rules in resume.rules.values() if rules is not None]
        self._newest = max(known, key=lambda rules: rules.version, default=None)
        if self._reader is None:
            return
        stored = self._reader.look()
        self._looked_at_s = time.monotonic()
        if stored is not None:
            self._newest = stored.rules
        elif self._reader.is_refused:
            logger.warning(
                "the tracker of %s may not read %s: rules set with `kmq queue alter` are not applied; grant Read and "
                "Describe, see `kmq acls`",
                self._topics, RULES_TOPIC, extra={"action": "rules_refused", "queue": str(self._topics)},
            )  # fmt: skip

    def look(self) -> QueueRules | None:
        """
        Look for the rules of the queue, every `LOOK_INTERVAL_S`; a broker that does not answer is asked later.

        Returns:
            What `adopt` is to be called with; None where there are none, or it is not time yet.
        """
        if self._reader is None or time.monotonic() - self._looked_at_s <= LOOK_INTERVAL_S:
            return None
        self._looked_at_s = time.monotonic()
        try:
            stored = self._reader.look()
        except KafkaClientError as error:
            logger.warning("cannot look for the rules of %s, asking again later: %s", self._topics, error)
            return None
        if stored is not None and stored.rules != self._newest:
            logger.info(
                "rules of %s: version %d is in force from now on: %s",
                self._topics, stored.version, json.dumps(stored.to_dict()),
                extra={"action": "rules_changed", "queue": str(self._topics)},
            )  # fmt: skip
        return None if stored is None else stored.rules

    def adopt(self, rules: QueueRules | None) -> None:
        """Go by these rules from now on; None changes nothing."""
        self._newest = rules or self._newest

    def records(self, partitions: Iterable[int], key: bytes) -> list[OutgoingRecord]:
        """
        Return the RULES that the log does not have from us yet, one a markers partition.

        Args:
            partitions: Markers partitions.
            key: Signs them.
        """
        rules = self._newest
        if rules is None:
            return []
        return [
            rules_record(rules, self._topics.markers_topic, partition, self._tracker_id, key)
            for partition in partitions
            if self._ruled.get(partition) != rules
        ]

    def written(self, partitions: Iterable[int]) -> None:
        """Take note that what `records` returned is committed."""
        if self._newest is not None:
            self._ruled = dict.fromkeys(partitions, self._newest)
            self._ruled_at_s = time.monotonic()

    def note(self, outcome: PartitionOutcome) -> None:
        """
        Write the rules again where the log has others, long after they were written: somebody copied an older marker.

        A batch of a tracker that catches up may not have come to our marker yet: hence not at once.
        """
        is_settled = time.monotonic() - self._ruled_at_s > RULES_AGAIN_S
        if is_settled and self._newest is not None and outcome.status.rules != self._newest:
            self._ruled.pop(outcome.marker_partition, None)

    def close(self) -> None:
        """Close the client."""
        if self._reader is not None:
            self._reader.close()
