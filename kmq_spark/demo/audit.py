"""
Audit a queue by reading its topics; counters of the tracker and of workers are not used.

It computes the deadlines again, from STARTs and KEEPALIVEs and their append times on the broker's clock.
"""

from __future__ import annotations

from collections import defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kmq_spark.core.markers import MarkerType, MessageId, Outcome
from kmq_spark.errors import WireError
from kmq_spark.kafka.log_reader import read_committed
from kmq_spark.kafka.settings import reader_config
from kmq_spark.wire.codec import decode_marker
from kmq_spark.wire.headers import ORIGIN, PREVIOUS

if TYPE_CHECKING:
    from kmq_spark.core.markers import Marker
    from kmq_spark.kafka.topics import QueueLayout

OPEN_TRANSACTION_S = 10.0
"""How long an open transaction is waited for; a commit returns a moment before its readers see it."""


@dataclass(slots=True)
class Audit:
    """
    The history of a queue, read from its topics.

    Attributes:
        sent: First copies in the queue topic.
        acked: Messages (as first copies) with an END ACKED.
        rejected: Messages (as first copies) with a dead letter.
        lateness_ms: For each of these copies, append time minus deadline; negative means too early.
    """

    sent: set[MessageId] = field(default_factory=set)
    acked: set[MessageId] = field(default_factory=set)
    rejected: set[MessageId] = field(default_factory=set)
    redelivered: int = 0
    lateness_ms: list[int] = field(default_factory=list)

    @property
    def lost(self) -> set[MessageId]:
        """Messages that were sent and are neither acknowledged nor dead-lettered."""
        return self.sent - self.acked - self.rejected

    @property
    def early(self) -> int:
        """Number of redeliveries before their deadline."""
        return sum(lateness < 0 for lateness in self.lateness_ms)

    def percentile(self, share: float) -> int:
        """Return a percentile of the lateness in milliseconds; 0 if there was no redelivery."""
        return int(np.percentile(self.lateness_ms, share)) if self.lateness_ms else 0


def audit(layout: QueueLayout, bootstrap_servers: str) -> Audit:
    """Read the queue, markers and dead-letter topics from beginning to end and return the history."""
    config = reader_config(bootstrap_servers, f"{layout.topics.consumer_group}.audit")
    topics, result = layout.topics, Audit()
    read = partial(read_committed, config, patience_s=OPEN_TRANSACTION_S)
    story = MarkersStory()
    for record in read(topics.markers_topic, range(layout.partition_count)):
        with suppress(WireError):
            story.fold(record.partition() or 0, record.timestamp()[1], decode_marker(record.value()))
    origins: dict[MessageId, MessageId] = {}
    for record in read(topics.queue_topic, range(layout.partition_count)):
        copy = MessageId(record.partition() or 0, record.offset() or 0)
        headers = dict(record.headers() or [])
        origins[copy] = _id(headers[ORIGIN]) if ORIGIN in headers else copy
        if ORIGIN in headers:
            result.redelivered += 1
            deadline_ms = story.redelivered_deadlines[_id(headers[PREVIOUS])].popleft()
            result.lateness_ms.append(record.timestamp()[1] - deadline_ms)
        else:
            result.sent.add(copy)
    result.acked = {origins[copy] for copy in story.acked}
    for record in read(topics.dead_letter_topic, range(layout.dead_letter_partition_count)):
        headers = dict(record.headers() or [])
        if ORIGIN in headers:  # otherwise it is an unreadable record of the markers topic
            result.rejected.add(_id(headers[ORIGIN]))
    return result


@dataclass(slots=True)
class _Partition:
    """A markers partition: its newest term, the deadlines of copies, and of those that a TICK of this term decided."""

    term: int = 0
    deadlines: dict[MessageId, int] = field(default_factory=dict)
    decided: dict[MessageId, int] = field(default_factory=dict)


@dataclass(slots=True)
class MarkersStory:
    """Deadlines and outcomes of each copy, from the markers."""

    partitions: defaultdict[int, _Partition] = field(default_factory=lambda: defaultdict(_Partition))
    redelivered_deadlines: defaultdict[MessageId, deque[int]] = field(default_factory=lambda: defaultdict(deque))
    acked: set[MessageId] = field(default_factory=set)

    def fold(self, partition: int, appended_at_ms: int, marker: Marker) -> None:
        """Process the next marker of a markers partition. KeyError if a redelivered copy was not held."""
        of = self.partitions[partition]
        ids = [
            MessageId(marker.queue_partition, message_offset)
            for covered in marker.ranges
            for message_offset in range(covered.first, covered.first + covered.count)
        ]
        if marker.type in {MarkerType.START, MarkerType.KEEPALIVE}:
            of.deadlines.update(dict.fromkeys(ids, appended_at_ms + marker.redeliver_after_ms))
        elif marker.type is MarkerType.TERM and marker.term != of.term:
            of.term, of.decided = marker.term, {}
        elif marker.type is MarkerType.TICK and marker.term == of.term:
            # A worker that takes the place of a killed one may start a copy again between this TICK and the END.
            for copy, deadline_ms in of.deadlines.items():
                if deadline_ms < appended_at_ms:
                    of.decided.setdefault(copy, deadline_ms)
        elif marker.type is MarkerType.END and marker.outcome is Outcome.ACKED:
            self.acked.update(ids)
            for copy in ids:
                of.deadlines.pop(copy, None)
        elif marker.type is MarkerType.END and marker.outcome is Outcome.REDELIVERED:
            for copy in ids:
                deadline_ms = of.decided.pop(copy) if copy in of.decided else of.deadlines[copy]
                self.redelivered_deadlines[copy].append(deadline_ms)
                of.deadlines.pop(copy, None)


def _id(text: bytes | str | None) -> MessageId:
    partition, _, offset = (text.decode() if isinstance(text, bytes) else text or "").partition(":")
    return MessageId(int(partition), int(offset))
