"""
The clock of a queue: append a TICK to a markers partition when something there may be due.

Rule 1: only the broker's append time counts; what this thread believes of the time decides when to write, never what is
due. A wrong belief costs lateness or a TICK too many, nothing else.
Rule 2: at most one TICK each `interval_ms` and partition, none where nothing is in flight. While the broker's clock is
behind that of the partition (`core.clock`) there is one every `BEHIND_INTERVAL_S`, since no time passes without.
Every `ENDS_INTERVAL_S` a partition with new STARTs gets one that carries the ends of the queue topic.
Rule 3: no lock is held while a record is produced.
Rule 4: a producer that met a fatal error is replaced. A thread that ends by an exception keeps it as `failure`, and the
tracker fails its query then.

The delivery report of a TICK carries its append time: that is how the broker's clock is known here, and why a TICK can
be aimed at the earliest deadline instead of being thrown every so often.
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
from kmq_spark.errors import KafkaClientError, KmqError
from kmq_spark.failpoints import failpoint
from kmq_spark.kafka.settings import make_client
from kmq_spark.wire.codec import encode_marker, tick_marker
from kmq_spark.wire.signature import signed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from confluent_kafka import Message

    from kmq_spark.core.outcome import PartitionOutcome
    from kmq_spark.tracker.queue_ends import QueueEnds

logger = logging.getLogger(__name__)

AIM_PAST_DEADLINE_MS = 2
"""A deadline is due when it lies *below* the TICK's append time; the broker's clock is known to about a millisecond."""

BEHIND_INTERVAL_S = LONGEST_STEP_MS / 2000
"""While the broker's clock is behind, a gap of more than `LONGEST_STEP_MS` between two records is lost to the clock."""

TOLERATED_BEHIND_MS = 50
"""What a deadline may be late by, rather than have TICKs written all the time: leaders' clocks differ by some ms."""

MANY_DECISIONS, MANY_IN_FLIGHT = 5_000, 20_000
"""
Of a partition, in one batch or after it: from these on it gets one or two TICKs while the decisions are sent, and as
many from the batch's end until the next one is folded.

Each TICK decides as much again, and all those of one batch's time are in the next batch. Without a bound, of a mass
expiry the first batch takes a second, the second four, the third all the rest, and an END or a new deadline of the
queue waits as long. No more are needed: the batch's end brings one, at which all is due that fell due meanwhile.
"""

LONGEST_WAIT_S = 1.0

ENDS_INTERVAL_S = 5.0
"""Between two readings of the ends of the queue topic, while something was started that no such reading covers."""

ENDS_POLL_S = 0.05

REPORT_POLL_S = 0.005

METADATA_TIMEOUT_S = 1.0

REPLACE_PAUSE_S = 1.0
"""Before another new producer where the last one met a fatal error, too."""

WARN_INTERVAL_S = 60.0
"""A broker that is away costs a line a minute, not one a TICK."""


@dataclass(slots=True)
class _Clockwork:
    """What is known of one markers partition."""

    next_deadline_at_ms: int | None = None
    in_flight: int = 0
    behind_ms: int = 0
    broker_ahead_ms: float | None = None  # broker's epoch milliseconds less our monotonic ones; leaders' clocks differ
    last_tick_s: float = -1e9
    written_s: float = -1e9
    most_ticks: float = math.inf  # until the next news of a batch
    ticks_left: float = math.inf
    read_to: int = 0
    """Marker offset behind what the newest batch has read."""
    ticked_at: int = -1
    """Marker offset of the newest TICK that is known to be in the log."""
    worth_reading: int = -1
    """That of the newest one that may decide something; one for the sake of the ends alone can wait."""
    wanted_since_s: float | None = None  # monotonic; None where it has its TICK or wants none
    starts: int = 0
    """STARTs that the newest batch has counted."""
    started_below: int = 0
    """Marker offset below which all of them lie."""
    checked_below: int = 0
    """Marker offset below which STARTs were compared with the ends of the queue topic."""
    asked_as_of: int = -1
    """`ticked_at` when the ends were asked for that are being read; -1 where they were not asked for this partition."""
    queue_ends: tuple[int, ...] = ()
    """Ends that the next TICK is to carry."""
    ends_as_of: int = 0
    wants_tick: bool = True  # a starting tracker writes one at once: what became due while none ran is decided by it

    @property
    def is_unchecked(self) -> bool:
        """Whether something is in flight that may not have been compared with the ends of the queue topic."""
        return self.in_flight > 0 and self.checked_below < self.started_below

    @property
    def has_its_tick(self) -> bool:
        """Whether its newest TICK is known to be in the log."""
        return self.ticked_at >= 0 and not self.wants_tick and self.wanted_since_s is None

    def learn(self, broker_ahead_ms: float) -> None:
        """Take in that the broker's clock is at least so far ahead: a record that was read has that append time."""
        if self.broker_ahead_ms is not None:
            self.broker_ahead_ms = max(self.broker_ahead_ms, broker_ahead_ms)


def _most_ticks(outcome: PartitionOutcome) -> float:
    """Return how many TICKs may follow until the next news of a batch."""
    if len(outcome.decisions) >= MANY_DECISIONS:
        return 1
    return 2 if outcome.status.in_flight >= MANY_IN_FLIGHT else math.inf


def _until_due_s(clockwork: _Clockwork, deadline_at_ms: int, now_s: float) -> float:
    """Return in how many seconds the broker's clock is past a deadline; 0 where that is not known."""
    if clockwork.broker_ahead_ms is None:
        return 0.0
    return (deadline_at_ms + AIM_PAST_DEADLINE_MS - clockwork.broker_ahead_ms) / 1000 - now_s


class Ticker(threading.Thread):
    """
    The thread that writes TICKs.

    Args:
        config: librdkafka settings of a producer.
        markers_topic: Where the TICKs go.
        partition_count: Markers partitions.
        interval_ms: Shortest time between two TICKs of a partition.
        key: By which TICKs are signed; empty for none.
        ends: Reads the ends of the queue topic; None for TICKs without them.

    Attributes:
        on_pause: Called about once a second from this thread, for upkeep that must go on without batches.
        failure: The exception that ended the thread; None while it runs, and after `stop`.
    """

    def __init__(
        self,
        config: Mapping[str, str | int | float | bool],
        markers_topic: str,
        partition_count: int,
        interval_ms: int,
        key: bytes = b"",
        *,
        ends: QueueEnds | None = None,
    ) -> None:
        """Connect lazily; `start` begins to tick."""
        super().__init__(name=f"kmq-ticker-{markers_topic}", daemon=True)
        self._config = dict(config)
        self._producer = make_client(Producer, config)
        self._fatal: KafkaError | None = None
        self._topic = markers_topic
        self._interval_s = interval_ms / 1000
        self._partitions = {partition: _Clockwork() for partition in range(partition_count)}
        self.on_pause: Callable[[], None] | None = None
        self.failure: Exception | None = None
        self._lock = threading.Lock()
        self._ticked = threading.Condition(self._lock)
        self._changed = threading.Event()
        self._stopping = threading.Event()
        self._key = key
        self._ends = ends
        self._ends_asked_s = -ENDS_INTERVAL_S
        self._warned_at_s = self._replaced_at_s = -WARN_INTERVAL_S
        self._first_reported: set[int] = set()
        self._all_reported = threading.Event()

    def observe(self, outcomes: Iterable[PartitionOutcome]) -> None:
        """Take in where the partitions stand after a batch."""
        now_ms = time.monotonic() * 1000
        with self._lock:
            for outcome in outcomes:
                clockwork = self._partitions.setdefault(outcome.marker_partition, _Clockwork())
                clockwork.in_flight = outcome.status.in_flight
                clockwork.behind_ms = outcome.status.behind_ms
                # Without this a clock that was set forward while nothing was in flight would be found out an hour late.
                clockwork.learn(outcome.status.appended_at_ms - now_ms)
                clockwork.next_deadline_at_ms = outcome.status.next_deadline_at_ms
                clockwork.most_ticks = clockwork.ticks_left = _most_ticks(outcome)
                clockwork.read_to = outcome.status.next_marker_offset
                counters = outcome.status.counters
                starts = counters.get("started", 0) + counters.get("renewed", 0)
                if starts != clockwork.starts:
                    clockwork.starts, clockwork.started_below = starts, clockwork.read_to
        self._changed.set()

    def batch_ends(self) -> None:
        """Let what is due have its TICK now: the next batch is about to look for markers and will find it."""
        with self._lock:
            for clockwork in self._partitions.values():
                clockwork.last_tick_s = -1e9
                clockwork.ticks_left = clockwork.most_ticks
        self._changed.set()

    def rest(self, longest_s: float) -> None:
        """
        Wait until a TICK that may decide something is in the log and no batch has read it, at most *longest_s*.

        Between two TICKs nothing is decided: a batch there would cost as much as any other, for nobody.
        """
        with self._ticked:
            self._ticked.wait_for(self._may_go_on, longest_s)

    def wait_first_ticks(self, timeout_s: float) -> None:
        """
        Wait until every partition has got a TICK from this thread.

        Raises:
            KafkaClientError: One has not, in time.
        """
        if not self._all_reported.wait(timeout_s):
            message = f"cannot write TICKs to {self._topic} within {timeout_s:g} s; check the broker"
            raise KafkaClientError(message, code="_TIMED_OUT", retriable=True)

    def late_s(self) -> float:
        """Return for how long a partition has wanted a TICK that is not in the log, seconds; the longest."""
        now_s = time.monotonic()
        with self._lock:
            since_s = [each.wanted_since_s for each in self._partitions.values() if each.wanted_since_s is not None]
        return max((now_s - each for each in since_s), default=0.0)

    def stop(self) -> None:
        """Stop ticking and wait for the thread."""
        self._stopping.set()
        self._changed.set()
        with self._ticked:
            self._ticked.notify_all()
        if self.is_alive():
            self.join(timeout=5)

    def run(self) -> None:
        """Tick until stopped; called by `start`."""
        try:
            self._run()
        except Exception as error:  # nothing above this thread sees it
            self.failure = error
            logger.exception("the ticker of %s ended", self._topic, extra={"action": "ticker_ended"})
            with self._ticked:
                self._ticked.notify_all()

    def _run(self) -> None:
        paused_at_s = time.monotonic()
        while not self._stopping.is_set():
            now_s = time.monotonic()
            if self._ends is not None:
                self._look_at_ends(self._ends, now_s)
            for partition in self._due(now_s):
                self._write(partition)
            self._producer.poll(0)
            if self._fatal is not None:
                self._replace_producer(self._fatal)
            if self.on_pause is not None and now_s - paused_at_s > LONGEST_WAIT_S:
                paused_at_s = now_s
                self._upkeep(self.on_pause)
            self._changed.wait(self._wait_s(time.monotonic()))
            self._changed.clear()
        if self._fatal is None:  # after a fatal error confluent-kafka's flush raises SystemError
            self._producer.flush(2)

    def _look_at_ends(self, ends: QueueEnds, now_s: float) -> None:
        """Ask for the ends of the queue topic, or give the answer to the partitions for whose TICKs it is."""
        if ends.is_asking:
            found = ends.take()
            if found is None:
                return
            with self._lock:
                for clockwork in self._partitions.values():
                    if clockwork.asked_as_of >= 0:
                        clockwork.queue_ends, clockwork.ends_as_of = found, clockwork.asked_as_of
                        clockwork.wants_tick, clockwork.asked_as_of = True, -1
        elif now_s - self._ends_asked_s >= ENDS_INTERVAL_S:
            with self._lock:
                # The TICK is in the log before the ends are asked for: `core.fold` relies on that.
                unchecked = [each for each in self._partitions.values() if each.is_unchecked and each.has_its_tick]
                for clockwork in unchecked:
                    clockwork.asked_as_of = clockwork.ticked_at
                partition_count = len(self._partitions)
            if unchecked:
                self._ends_asked_s = now_s
                ends.ask(partition_count)

    def _replace_producer(self, fatal: KafkaError) -> None:
        """Take a new client: one that met a fatal error refuses every record from then on."""
        now_s = time.monotonic()
        if now_s - self._replaced_at_s > WARN_INTERVAL_S:
            logger.warning(
                "the producer of TICKs to %s met a fatal error and is replaced: %s", self._topic, fatal.str(),
                extra={"action": "producer_replaced"},
            )  # fmt: skip
        elif self._stopping.wait(REPLACE_PAUSE_S):
            return
        self._replaced_at_s = now_s
        self._producer.purge()
        self._producer, self._fatal = make_client(Producer, self._config), None
        with self._lock:
            for clockwork in self._partitions.values():
                # Its TICK may have been among those that failed.
                clockwork.wants_tick = clockwork.wants_tick or clockwork.wanted_since_s is not None

    def _may_go_on(self) -> bool:
        if self._stopping.is_set() or self.failure is not None:
            return True
        return any(each.worth_reading >= each.read_to for each in self._partitions.values())

    def _due(self, now_s: float) -> list[int]:
        """Return the partitions that want a TICK now, and note that they get it."""
        with self._lock:
            due = [p for p, clockwork in self._partitions.items() if self._due_in_s(clockwork, now_s) <= 0]
            for partition in due:
                clockwork = self._partitions[partition]
                clockwork.wanted_since_s = clockwork.wanted_since_s or now_s
                self._partitions[partition].last_tick_s = now_s
                self._partitions[partition].written_s = now_s
                self._partitions[partition].ticks_left -= 1
                self._partitions[partition].wants_tick = False
        return due

    def _due_in_s(self, clockwork: _Clockwork, now_s: float) -> float:
        """Return in how many seconds a partition wants a TICK; infinity for never."""
        rest_s = clockwork.last_tick_s + self._interval_s - now_s
        if clockwork.wants_tick:
            return rest_s
        if clockwork.in_flight == 0 or clockwork.next_deadline_at_ms is None:
            return math.inf
        aimed_s = math.inf
        if clockwork.ticks_left >= 1:
            aimed_s = max(rest_s, _until_due_s(clockwork, clockwork.next_deadline_at_ms, now_s))
        if clockwork.behind_ms <= TOLERATED_BEHIND_MS:
            return aimed_s
        return min(aimed_s, clockwork.written_s + BEHIND_INTERVAL_S - now_s)

    def _wait_s(self, now_s: float) -> float:
        with self._lock:
            nearest_s = min((self._due_in_s(c, now_s) for c in self._partitions.values()), default=LONGEST_WAIT_S)
        # A delivery report waits until it is polled for, and it carries the broker's clock.
        longest_s = REPORT_POLL_S if len(self._producer) else LONGEST_WAIT_S
        if self._ends is not None and self._ends.is_asking:
            longest_s = min(longest_s, ENDS_POLL_S)
        return min(max(nearest_s, 0.001), longest_s)

    def _write(self, partition: int) -> None:
        with self._lock:
            clockwork = self._partitions[partition]
            marker = tick_marker(clockwork.queue_ends, clockwork.ends_as_of)
            clockwork.queue_ends = ()
        on_delivery = partial(self._report, time.monotonic(), marker.ends_as_of)
        tick = signed(encode_marker(marker), partition, self._key)
        try:
            self._producer.produce(self._topic, value=tick, partition=partition, on_delivery=on_delivery)
        except (KafkaException, BufferError) as error:
            self._note_fatal(error.args[0])
            self._ask_again(partition)
            self._look_again(error)
        failpoint("ticker.tick-sent")

    def _report(self, sent_s: float, ends_as_of: int, error: KafkaError | None, tick: Message) -> None:
        """Learn the broker's clock from a TICK that arrived; ask for another one where it did not."""
        if error is not None:
            self._note_fatal(error)
            self._ask_again(tick.partition())
            self._warn(error)
            return
        _, appended_at_ms = tick.timestamp()
        with self._ticked:
            clockwork = self._partitions.get(tick.partition() or 0)
            if clockwork is not None:
                # The append lies between the sending and this report; half way is off by half a round trip at most.
                clockwork.broker_ahead_ms = appended_at_ms - (sent_s + time.monotonic()) / 2 * 1000
                clockwork.ticked_at = max(clockwork.ticked_at, tick.offset() or 0)
                next_ms = clockwork.next_deadline_at_ms
                if not ends_as_of or (next_ms is not None and next_ms < appended_at_ms):
                    clockwork.worth_reading = clockwork.ticked_at
                clockwork.checked_below = max(clockwork.checked_below, ends_as_of)
                clockwork.wanted_since_s = None
            self._ticked.notify_all()
        self._first_reported.add(tick.partition() or 0)
        if len(self._first_reported) >= len(self._partitions):
            self._all_reported.set()

    def _note_fatal(self, error: object) -> None:
        if isinstance(error, KafkaError) and (error.fatal() or error.code() == KafkaError._FATAL):  # noqa: SLF001  # librdkafka's public name for it
            self._fatal = error

    def _look_again(self, error: KafkaException | BufferError) -> None:
        """Learn of partitions that the topic has got since: the client looks by itself every five minutes only."""
        cause = error.args[0]
        if not isinstance(cause, KafkaError) or cause.code() != KafkaError._UNKNOWN_PARTITION:  # noqa: SLF001  # librdkafka's public name for it
            self._warn(cause)
            return
        try:
            self._producer.list_topics(self._topic, timeout=METADATA_TIMEOUT_S)
        except KafkaException as failure:
            self._warn(failure.args[0])

    def _warn(self, cause: object) -> None:
        if time.monotonic() - self._warned_at_s > WARN_INTERVAL_S:
            self._warned_at_s = time.monotonic()
            text = cause.str() if isinstance(cause, KafkaError) else cause
            logger.warning(
                "cannot write TICKs to %s: %s; nothing is redelivered until it can", self._topic, text,
                extra={"action": "tick_failed"},
            )  # fmt: skip

    def _ask_again(self, partition: int | None) -> None:
        with self._lock:
            clockwork = self._partitions.get(-1 if partition is None else partition)
            if clockwork is not None:
                clockwork.wants_tick = True

    def _upkeep(self, on_pause: Callable[[], None]) -> None:
        try:
            on_pause()
        except KmqError as error:
            # What matters is done with the next batch, which fails loudly; this is only for an idle queue.
            logger.warning("upkeep of %s failed: %s", self._topic, error)
