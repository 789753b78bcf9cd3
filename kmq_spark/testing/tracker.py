"""The redelivery tracker of a queue in memory: the fold, the rules and the records of the real one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kmq_spark.core.fold import PartitionState, fold
from kmq_spark.core.markers import Marker, MarkerType
from kmq_spark.core.outcome import PartitionOutcome
from kmq_spark.kafka.payloads import PayloadSlice
from kmq_spark.kafka.records import RejectedRecords
from kmq_spark.tracker.sender.attempts import Attempt
from kmq_spark.tracker.sender.due_decisions import DueDecisions
from kmq_spark.wire.marker_log import MarkerLog

if TYPE_CHECKING:
    from kmq_spark.core.policy import QueueRules
    from kmq_spark.kafka.queue_topics import QueueTopics
    from kmq_spark.testing.log import MemoryLog
    from kmq_spark.tracker.sender.due_decisions import DueRun

_ID, _TERM = "kmq-tracker-in-memory", 1


class MemoryTracker:
    """
    The tracker of a queue, or of one of its subscriptions.

    Attributes:
        decided: Queue partitions and offsets of the messages that were decided since the last look.
    """

    def __init__(self, log: MemoryLog, topics: QueueTopics, partitions: int, rules: QueueRules) -> None:
        self._log, self._topics, self._rules = log, topics, rules
        self._states = [PartitionState.empty() for _ in range(partitions)]
        self.decided: set[tuple[int, int]] = set()
        for partition in range(partitions):
            if rules.version:
                marker = Marker(MarkerType.RULES, consumer_id=_ID, rules=rules)
                log.append_marker(topics.markers_topic, partition, marker)
            log.append_marker(topics.markers_topic, partition, Marker(MarkerType.TERM, consumer_id=_ID, term=_TERM))

    @property
    def in_flight_count(self) -> int:
        """Messages that were started and have not ended: held, waiting for a redelivery, or delayed."""
        return sum(state.in_flight.message_count for state in self._states)

    def track(self) -> int | None:
        """Carry out what is overdue; return when the next message may fall due, epoch milliseconds, None for never."""
        has_ticked = False
        while True:
            outcomes = [self._fold(partition) for partition in range(len(self._states))]
            if self._carry_out(outcomes):
                has_ticked = False
                continue
            due = [each.status.next_deadline_at_ms for each in outcomes]
            next_ms = min((at for at in due if at is not None), default=None)
            if next_ms is None or next_ms > self._log.now_ms:
                return next_ms
            if has_ticked:
                return self._log.now_ms + 1  # jitter: a message may fall due later than it could
            # A TICK decides what was due before it.
            self._log.now_ms = max(self._log.now_ms, next_ms + 1)
            for partition in range(len(self._states)):
                tick = Marker(MarkerType.TICK, term=_TERM)
                self._log.append_marker(self._topics.markers_topic, partition, tick)
            has_ticked = True

    def _fold(self, partition: int) -> PartitionOutcome:
        state, read = self._states[partition], MarkerLog(self._topics.markers_topic, partition)
        records = self._log.records(self._topics.markers_topic, partition)
        for offset in range(state.next_marker_offset, len(records)):
            read.read(offset, records[offset].timestamp()[1], records[offset].value())
        result = fold(state, read.markers)
        self._states[partition] = result.state
        return PartitionOutcome(partition, result.status, result.decisions)

    def _carry_out(self, outcomes: list[PartitionOutcome]) -> bool:
        decisions = DueDecisions(outcomes)
        runs: list[DueRun] = []
        for partition, offsets in decisions.message_offsets().items():
            records = self._log.records(self._topics.queue_topic, partition)
            messages = [records[offset] for offset in offsets]
            runs += decisions.with_payloads(PayloadSlice(partition, 0, list(messages)))
            self.decided.update((partition, offset) for offset in offsets)
        attempt = Attempt(runs, RejectedRecords(), self._topics, self._rules, len(self._states))
        for record, _ in attempt.records():
            self._log.append(*record)
        for record in attempt.ends.records(self._topics, _ID, _TERM):
            self._log.append(*record)
        return bool(runs)
