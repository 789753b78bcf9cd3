"""
The clock of a queue: append a TICK to a markers partition when a message there may be due.

Rule 1: Append times alone decide what is due. This thread's estimate of the broker's clock decides only when it writes
a TICK. A wrong estimate causes a late or an unnecessary TICK, nothing else.
Rule 2: A partition gets at most one TICK per `TICK_INTERVAL_S`, and none while nothing is in flight. While the broker's
clock is behind that of the partition (`core.clock`), it gets one every `BEHIND_INTERVAL_S`, since the partition's clock
advances only with records.
Rule 3: No lock is held while a record is produced.
Rule 4: the producer is not fenced: a TICK that is written too late names an old term and decides nothing.
Rule 5: A producer with a fatal error is replaced. If an exception ends the thread, it is kept as `failure`, and the
tracker then fails its query.

The delivery report of a TICK contains its append time. From it this thread estimates the broker's clock, so that it can
write the next TICK at the earliest deadline instead of at a fixed interval.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, KafkaException, Producer

from kmq_spark.core.clock import LONGEST_STEP_MS
from kmq_spark.core.markers import Marker, MarkerType
from kmq_spark.errors import KafkaClientError, KmqError
from kmq_spark.failpoints import failpoint
from kmq_spark.kafka.records import place_of
from kmq_spark.kafka.settings import make_client
from kmq_spark.pauses import RateLimit
from kmq_spark.wire.codec import encode_marker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from confluent_kafka import Message

    from kmq_spark.core.outcome import PartitionOutcome

logger = logging.getLogger(__name__)

AIM_PAST_DEADLINE_MS = 2
"""A TICK decides deadlines *before* its append time. The estimate of the broker's clock is right to about 1 ms."""

BEHIND_INTERVAL_S = LONGEST_STEP_MS / 2000
"""
Interval of the TICKs while the broker's clock is behind. A gap of more than `LONGEST_STEP_MS` between two records then
does not count as time.
"""

TOLERATED_BEHIND_MS = 50
"""
How far the broker's clock may be behind before this causes additional TICKs. A deadline may be late by as much. The
clocks of partition leaders differ by some milliseconds, which must not cause constant TICKs.
"""

MANY_DECISIONS, MANY_IN_FLIGHT = 5_000, 20_000
"""
Limits of one partition: decisions in a batch, messages in flight after it. From the first on, the partition gets at
most one TICK while the batch sends its decisions, and one more until the next batch is folded; from the second on, two
each.

Every TICK can decide as many messages again, and the next batch contains all TICKs that were written during this one.
When very many leases end at once and there is no limit, the first batch takes 1 s, the second 4 s, and the third
contains all the rest; an END or a new deadline waits as long. More TICKs are not needed: the end of a batch allows one,
which decides what has become due meanwhile.
"""

TICK_INTERVAL_S = 0.25
"""Shortest time between two TICKs of a markers partition: a bound on the clock's share of the lateness."""

LONGEST_WAIT_S = 1.0

REPORT_POLL_S = 0.005

METADATA_TIMEOUT_S = 1.0

REPLACE_PAUSE_S = 1.0
"""Pause before the next replacement if the replaced producer had a fatal error, too."""

WARN_INTERVAL_S = 60.0
"""While the broker is unreachable, there is one log line a minute, not one for each TICK."""


@dataclass(slots=True)
class _PartitionTicks:
    """The state of one markers partition."""

    next_deadline_at_ms: int | None = None
    in_flight: int = 0
    behind_ms: int = 0
    broker_ahead_ms: float | None = None  # broker's epoch milliseconds minus our monotonic ones; leaders' clocks differ
    last_tick_s: float = -1e9
    written_s: float = -1e9
    max_ticks: float = math.inf  # until the next `observe` or `batch_ends`
    ticks_left: float = math.inf
    read_to: int = 0
    """First marker offset that the newest batch did not read."""
    newest_tick: int = -1
    """Marker offset of the newest TICK with a delivery report, -1 for none."""
    unread_since_s: float | None = None  # since when a TICK is in the log and no batch has read further, monotonic
    wanted_since_s: float | None = None  # when a TICK became due, monotonic; None if it is in the log, or none is due
    wants_tick: bool = True  # a tracker that starts writes one at once, for what became due while no tracker ran

    def raise_estimate(self, broker_ahead_ms: float) -> None:
        """Raise the estimate of the broker's clock to a lower bound: a record that was read has that append time."""
        if self.broker_ahead_ms is not None:
            self.broker_ahead_ms = max(self.broker_ahead_ms, broker_ahead_ms)


def _max_ticks(outcome: PartitionOutcome) -> float:
    """Return how many TICKs a partition may get until the next `observe` or `batch_ends`."""
    if outcome.decisions.total_messages >= MANY_DECISIONS:
        return 1
    return 2 if outcome.status.in_flight >= MANY_IN_FLIGHT else math.inf


def _until_due_s(ticks: _PartitionTicks, deadline_at_ms: int, now_s: float) -> float:
    """Return the seconds until the broker's clock is past a deadline; 0 where the broker's clock is not known."""
    if ticks.broker_ahead_ms is None:
        return 0.0
    return (deadline_at_ms + AIM_PAST_DEADLINE_MS - ticks.broker_ahead_ms) / 1000 - now_s


class Ticker(threading.Thread):
    """
    The thread that writes TICKs.

    Attributes:
        periodic_work: Called about once a second from this thread; does work that must not wait for a batch.
        failure: The exception that ended the thread; None while it runs, and after `stop`.
        term: The term that the TICKs name; 0 before the first.
    """

    def __init__(
        self,
        config: Mapping[str, str | int | float | bool],
        markers_topic: str,
        partition_count: int,
        interval_s: float = TICK_INTERVAL_S,
    ) -> None:
        super().__init__(name=f"kmq-ticker-{markers_topic}", daemon=True)
        self._config = dict(config)
        self._producer = make_client(Producer, config)
        self._fatal: KafkaError | None = None
        self._topic = markers_topic
        self._interval_s = interval_s
        self._partitions = {partition: _PartitionTicks() for partition in range(partition_count)}
        self.periodic_work: Callable[[], None] | None = None
        self.failure: Exception | None = None
        self.term = 0
        self._tick = encode_marker(Marker(MarkerType.TICK))
        self._lock = threading.Lock()
        self._ticked = threading.Condition(self._lock)
        self._changed = threading.Event()
        self._stopping = threading.Event()
        self._warning_limit = RateLimit(WARN_INTERVAL_S)
        self._replacement_limit = RateLimit(WARN_INTERVAL_S)
        self._reported_partitions: set[int] = set()
        self._all_reported = threading.Event()
        self._has_pauses = True

    def begin_term(self, term: int) -> None:
        """Name this term in all TICKs from now on, and write one to every partition, unless it is named already."""
        if term == self.term:
            return
        with self._lock:
            self.term, self._tick = term, encode_marker(Marker(MarkerType.TICK, term=term))
            self._reported_partitions.clear()
            self._all_reported.clear()
            for ticks in self._partitions.values():
                ticks.wants_tick = True
        self._changed.set()

    def observe(self, outcomes: Iterable[PartitionOutcome]) -> None:
        """Update the state of the partitions from the outcomes of a batch."""
        now_ms = time.monotonic() * 1000
        with self._lock:
            for outcome in outcomes:
                ticks = self._partitions.setdefault(outcome.marker_partition, _PartitionTicks())
                ticks.in_flight = outcome.status.in_flight
                ticks.behind_ms = outcome.status.behind_ms
                # If the broker's clock was set forward by an hour while nothing was in flight, no TICK has reported it.
                # Without this update the next deadline would be decided an hour late.
                ticks.raise_estimate(outcome.status.appended_at_ms - now_ms)
                ticks.next_deadline_at_ms = outcome.status.next_deadline_at_ms
                ticks.max_ticks = ticks.ticks_left = _max_ticks(outcome)
                if outcome.status.next_marker_offset != ticks.read_to:
                    ticks.read_to = outcome.status.next_marker_offset
                    ticks.unread_since_s = now_ms / 1000 if ticks.newest_tick >= ticks.read_to else None
        self._changed.set()

    def batch_ends(self) -> None:
        """Allow TICKs for what is due at once, without regard to the interval: the next batch is about to read them."""
        with self._lock:
            for ticks in self._partitions.values():
                ticks.last_tick_s = -1e9
                ticks.ticks_left = ticks.max_ticks
        self._changed.set()

    def expect(self, partition: int, due_at_ms: int) -> None:
        """Note that a message may be due earlier than the newest batch knows, because of an unread marker."""
        with self._lock:
            ticks = self._partitions.setdefault(partition, _PartitionTicks())
            is_known = ticks.next_deadline_at_ms is not None and ticks.next_deadline_at_ms <= due_at_ms
            if is_known and ticks.in_flight > 0:
                return
            ticks.next_deadline_at_ms, ticks.in_flight = due_at_ms, max(1, ticks.in_flight)
        self._changed.set()

    def due_in_s(self) -> float:
        """Return the time until the earliest deadline that is known, seconds; infinity for none."""
        now_s = time.monotonic()
        with self._lock:
            known_s = [
                _until_due_s(each, each.next_deadline_at_ms, now_s)
                for each in self._partitions.values()
                if each.in_flight > 0 and each.next_deadline_at_ms is not None
            ]
        return min(known_s, default=math.inf)

    def pause(self, longest_s: float) -> bool:
        """
        Wait until the log contains an unread TICK that may decide something, at most *longest_s* seconds.

        Nothing is decided between two TICKs, so a batch there costs as much as any other and decides nothing.
        """
        with self._ticked:
            return self._ticked.wait_for(self._is_pause_over, longest_s)

    def end_pauses(self) -> None:
        """End a running `pause` and every later one at once."""
        with self._ticked:
            self._has_pauses = False
            self._ticked.notify_all()

    def wait_first_ticks(self, timeout_s: float) -> None:
        """Wait until every partition has a TICK from this thread."""
        if not self._all_reported.wait(timeout_s):
            message = f"cannot write TICKs to {self._topic} within {timeout_s:g} s; check the broker"
            raise KafkaClientError(message, code="_TIMED_OUT", retriable=True)

    def late_s(self) -> float:
        """Return for how long a TICK has been due that is not in the log, seconds: the maximum over the partitions."""
        return self._longest_s(lambda ticks: ticks.wanted_since_s)

    def unread_s(self) -> float:
        """Return for how long TICKs are in the log and no batch has read further, seconds: the maximum, as above."""
        return self._longest_s(lambda ticks: ticks.unread_since_s)

    def _longest_s(self, since_s: Callable[[_PartitionTicks], float | None]) -> float:
        now_s = time.monotonic()
        with self._lock:
            known_s = [each for each in map(since_s, self._partitions.values()) if each is not None]
        return max((now_s - each for each in known_s), default=0.0)

    def stop(self) -> None:
        """Stop the thread and wait for its end, at most 5 s."""
        self._stopping.set()
        self._changed.set()
        with self._ticked:
            self._ticked.notify_all()
        if self.is_alive():
            self.join(timeout=5)

    def run(self) -> None:
        """Write TICKs until `stop`; `start` calls this in the new thread."""
        try:
            self._run()
        except Exception as error:  # no caller could catch it: this is the thread's first function
            self.failure = error
            logger.exception(
                "the ticker of %s failed and writes no more TICKs", self._topic, extra={"action": "ticker_ended"}
            )
            with self._ticked:
                self._ticked.notify_all()

    def _run(self) -> None:
        worked_at_s = time.monotonic()
        while not self._stopping.is_set():
            now_s = time.monotonic()
            for partition in self._due_partitions(now_s):
                self._write(partition)
            self._producer.poll(0)
            if self._fatal is not None:
                self._replace_producer(self._fatal)
            if self.periodic_work is not None and now_s - worked_at_s > LONGEST_WAIT_S:
                worked_at_s = now_s
                self._do_periodic_work(self.periodic_work)
            self._changed.wait(self._wait_s(time.monotonic()))
            self._changed.clear()
        if self._fatal is None:  # after a fatal error confluent-kafka's flush raises SystemError
            self._producer.flush(2)

    def _replace_producer(self, fatal: KafkaError) -> None:
        """Create a new producer: after a fatal error librdkafka refuses every record."""
        if self._replacement_limit.allows():
            logger.warning(
                "replacing the producer of TICKs to %s after a fatal error: %s", self._topic, fatal.str(),
                extra={"action": "producer_replaced"},
            )  # fmt: skip
        elif self._stopping.wait(REPLACE_PAUSE_S):
            return
        self._producer.purge()
        self._producer, self._fatal = make_client(Producer, self._config), None
        with self._lock:
            for ticks in self._partitions.values():
                # The partition's TICK may be among the failed records.
                ticks.wants_tick = ticks.wants_tick or ticks.wanted_since_s is not None

    def _is_pause_over(self) -> bool:
        if self._stopping.is_set() or self.failure is not None or not self._has_pauses:
            return True
        return any(each.newest_tick >= each.read_to for each in self._partitions.values())

    def _due_partitions(self, now_s: float) -> list[int]:
        """Return the partitions for which a TICK is due now, and update their state as if it were written."""
        with self._lock:
            due = [p for p, ticks in self._partitions.items() if self._due_in_s(ticks, now_s) <= 0]
            for partition in due:
                ticks = self._partitions[partition]
                ticks.wanted_since_s = ticks.wanted_since_s or now_s
                self._partitions[partition].last_tick_s = now_s
                self._partitions[partition].written_s = now_s
                self._partitions[partition].ticks_left -= 1
                self._partitions[partition].wants_tick = False
        return due

    def _due_in_s(self, ticks: _PartitionTicks, now_s: float) -> float:
        """Return the seconds until the partition's next TICK is due; infinity for never."""
        interval_left_s = ticks.last_tick_s + self._interval_s - now_s
        if ticks.wants_tick:
            return interval_left_s
        if ticks.in_flight == 0 or ticks.next_deadline_at_ms is None:
            return math.inf
        aimed_s = math.inf
        if ticks.ticks_left >= 1:
            aimed_s = max(interval_left_s, _until_due_s(ticks, ticks.next_deadline_at_ms, now_s))
        if ticks.behind_ms <= TOLERATED_BEHIND_MS:
            return aimed_s
        return min(aimed_s, ticks.written_s + BEHIND_INTERVAL_S - now_s)

    def _wait_s(self, now_s: float) -> float:
        with self._lock:
            nearest_s = min((self._due_in_s(c, now_s) for c in self._partitions.values()), default=LONGEST_WAIT_S)
        # librdkafka calls delivery callbacks only in `poll`. They contain the broker's time, so poll soon.
        longest_s = REPORT_POLL_S if len(self._producer) else LONGEST_WAIT_S
        return min(max(nearest_s, 0.001), longest_s)

    def _write(self, partition: int) -> None:
        on_delivery = partial(self._report, time.monotonic())
        try:
            self._producer.produce(self._topic, value=self._tick, partition=partition, on_delivery=on_delivery)
        except (KafkaException, BufferError) as error:
            self._note_fatal(error.args[0])
            self._request_tick(partition)
            self._refresh_metadata(error)
        failpoint("ticker.tick-sent")

    def _report(self, sent_s: float, error: KafkaError | None, tick: Message) -> None:
        """Update the estimate of the broker's clock from a delivered TICK; request another one if delivery failed."""
        if error is not None:
            self._note_fatal(error)
            self._request_tick(tick.partition())
            self._warn(error)
            return
        place = place_of(tick)
        with self._ticked:
            ticks = self._partitions.get(tick.partition() or 0)
            if ticks is not None:
                if place is not None:
                    offset, appended_at_ms = place
                    # The broker appended between send and report. The midpoint is wrong by half a round trip at most.
                    ticks.broker_ahead_ms = appended_at_ms - (sent_s + time.monotonic()) / 2 * 1000
                    ticks.newest_tick = max(ticks.newest_tick, offset)
                    if ticks.newest_tick >= ticks.read_to:
                        ticks.unread_since_s = ticks.unread_since_s or time.monotonic()
                ticks.wanted_since_s = None
            self._ticked.notify_all()
        self._reported_partitions.add(tick.partition() or 0)
        if len(self._reported_partitions) >= len(self._partitions):
            self._all_reported.set()

    def _note_fatal(self, error: object) -> None:
        if isinstance(error, KafkaError) and (error.fatal() or error.code() == KafkaError._FATAL):  # noqa: SLF001  # librdkafka's public name for it
            self._fatal = error

    def _refresh_metadata(self, error: KafkaException | BufferError) -> None:
        """
        Refresh the topic's metadata after the error "unknown partition"; log any other error.

        The topic may have new partitions, and the client by itself refreshes its metadata only every five minutes.
        """
        cause = error.args[0]
        if not isinstance(cause, KafkaError) or cause.code() != KafkaError._UNKNOWN_PARTITION:  # noqa: SLF001  # librdkafka's public name for it
            self._warn(cause)
            return
        try:
            self._producer.list_topics(self._topic, timeout=METADATA_TIMEOUT_S)
        except KafkaException as failure:
            self._warn(failure.args[0])

    def _warn(self, cause: object) -> None:
        if self._warning_limit.allows():
            text = cause.str() if isinstance(cause, KafkaError) else cause
            logger.warning(
                "cannot write TICKs to %s: %s; no message is redelivered until this works", self._topic, text,
                extra={"action": "tick_failed"},
            )  # fmt: skip

    def _request_tick(self, partition: int | None) -> None:
        with self._lock:
            ticks = self._partitions.get(-1 if partition is None else partition)
            if ticks is not None:
                ticks.wants_tick = True

    def _do_periodic_work(self, periodic_work: Callable[[], None]) -> None:
        try:
            periodic_work()
        except KmqError as error:
            # Not fatal: the next batch does the same work and fails if it cannot. This call is only for an idle queue.
            logger.warning("periodic work for %s failed: %s; trying again", self._topic, error)
