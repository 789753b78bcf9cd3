"""
Back-pressure: a queue with too much in flight is full, and its consumers fetch nothing until it is not.

Rule 1: the tracker writes the record `<queue>#full` of the topic `kmq.queues` when a markers partition holds more than
the queue's `max_in_flight`, and again every `RENEW_S`. It removes the record when each holds less than `CLEAR` of that.
Rule 2: a consumer asks for the end of the topic every `LOOK_S`, by the client that it has for its group, in a thread of
its own. It reads the topic when the end has changed, by a client that is closed after `FRESH_S` without a change.
Rule 3: a record that is not renewed within `FRESH_S` does not count: its tracker is gone.
Rule 4: best effort: without the topic, or the right to it, there is no back-pressure, and everything else goes on.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient

from kmq_spark.errors import KmqError
from kmq_spark.kafka.queue_rules import RULES_TOPIC, RulesReader, full_key
from kmq_spark.kafka.settings import admin_config, make_client, marker_producer_config, new_client_id, reader_config
from kmq_spark.kafka.topics import ensure_compacted_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from confluent_kafka import Consumer, KafkaError, Message

    from kmq_spark.core.outcome import PartitionOutcome
    from kmq_spark.kafka.intake import Intake
    from kmq_spark.kafka.queue_rules import FullRecord
    from kmq_spark.kafka.topics import QueueTopics

logger = logging.getLogger(__name__)

CLEAR = 0.9
"""Share of `max_in_flight` below which a full partition is full no more."""

RENEW_S = 20.0

FRESH_S = 60.0

LOOK_S = 10.0

LOOK_TIMEOUT_MS = 3_000

END_TIMEOUT_S = 1.0
"""How long the broker may take to return the end of the topic; `FullWatch.stop` may wait for so long."""

WARN_INTERVAL_S = 60.0


class FullSign:
    """
    The tracker's side: says whether its queue is full.

    One thread calls `keep`; another may call `observe`.

    Args:
        topics: Names of the queue.
        reader: Reads the rules of the queue; somebody else calls its `look`.
        local_max_in_flight: Limit of a queue without rules, messages per markers partition.
        bootstrap_servers: Comma-separated `host:port`.
        extra: librdkafka settings.

    Attributes:
        is_ready: Whether `observe` got the present state; `keep` does nothing before.
    """

    def __init__(
        self,
        topics: QueueTopics,
        reader: RulesReader,
        local_max_in_flight: int,
        bootstrap_servers: str,
        extra: Mapping[str, str],
    ) -> None:
        """Make no client: most queues are never full."""
        self._topics = topics
        self._reader = reader
        self._local_max_in_flight = local_max_in_flight
        self._bootstrap_servers = bootstrap_servers
        self._extra = extra
        self._in_flight: dict[int, int] = {}
        self._full: dict[int, int] = {}
        self._producer: Producer | None = None
        self._has_failed = False
        self._written: set[int] = set()
        self._written_s = self._warned_s = float("-inf")
        self.is_ready = False

    @property
    def is_full(self) -> bool:
        """Whether a markers partition holds too much."""
        return bool(self._full)

    def observe(self, outcomes: Sequence[PartitionOutcome]) -> None:
        """Take in what a batch says."""
        # A new dict: another thread may go through the old one.
        self._in_flight = self._in_flight | {outcome.marker_partition: outcome.status.in_flight for outcome in outcomes}

    def keep(self) -> None:
        """Write, renew or remove the record where that is due; call it about once a second."""
        if not self.is_ready:
            return
        if self._has_failed:
            self._producer, self._has_failed = None, False
        newest = self._reader.newest
        limit = self._local_max_in_flight if newest is None else newest.settings.max_in_flight
        self._full = {
            partition: count
            for partition, count in self._in_flight.items()
            if count > limit or (partition in self._full and count >= CLEAR * limit)
        }
        is_due = time.monotonic() - self._written_s > RENEW_S
        if self._full.keys() != self._written or (is_due and (self._full or self._reader.full is not None)):
            self._write(limit)
        if self._producer is not None:
            self._producer.poll(0)

    def _write(self, limit: int) -> None:
        if not self._reader.has_topic and not self._make_topic():
            return
        if self._producer is None:
            config = marker_producer_config(self._bootstrap_servers, new_client_id("full"), self._extra)
            self._producer = make_client(Producer, config)
        value = None
        if self._full:
            told = {"max_in_flight": limit, "in_flight": self._full, "at_ms": time.time_ns() // 1_000_000}
            value = json.dumps(told).encode()
        if self._full.keys() != self._written:
            logger.log(
                logging.WARNING if self._full else logging.INFO,
                "queue %s is %s: in flight by markers partition %s, max_in_flight %d; its consumers %s",
                self._topics, "full" if self._full else "full no more", self._full or self._in_flight, limit,
                "fetch nothing" if self._full else "go on", extra={"action": "queue_full", "queue": str(self._topics)},
            )  # fmt: skip
        self._written, self._written_s = set(self._full), time.monotonic()
        try:
            self._producer.produce(
                RULES_TOPIC, key=full_key(self._topics), value=value, partition=0, on_delivery=self._report
            )
        except (KafkaException, BufferError) as error:
            self._fail(error)

    def _make_topic(self) -> bool:
        """Make the topic where the queue is full and no rules were ever written; return whether it may be there."""
        if not self._full or time.monotonic() - self._warned_s < WARN_INTERVAL_S:
            return False
        try:
            admin = make_client(AdminClient, admin_config(self._bootstrap_servers, extra=self._extra))
            ensure_compacted_topic(RULES_TOPIC, -1, admin, self._bootstrap_servers, LOOK_TIMEOUT_MS)
        except KmqError as error:
            self._fail(error)
            return False
        return True

    def _report(self, error: KafkaError | None, _record: Message) -> None:
        if error is not None:
            self._fail(error.str())

    def _fail(self, cause: object) -> None:
        """Take a new producer for the next time, `RENEW_S` from now."""
        self._has_failed = True
        if time.monotonic() - self._warned_s < WARN_INTERVAL_S:
            return
        self._warned_s = time.monotonic()
        logger.warning(
            "cannot write to %s whether %s is full: %s; its consumers do not slow down; grant the tracker Write, see "
            "`kmq acls`, and make the topic with `kmq queue alter`",
            RULES_TOPIC, self._topics, cause, extra={"action": "queue_full_failed", "queue": str(self._topics)},
        )  # fmt: skip


class Freshness:
    """Tells whether a record counts, by when it was seen: the clocks of two hosts may differ."""

    def __init__(self) -> None:
        """Nothing was seen yet."""
        self._offset: int | None = None
        self._has_looked = False
        self._seen_s = float("-inf")

    def is_fresh(self, record: FullRecord | None, now_s: float, epoch_s: float) -> bool:
        """
        Return whether a queue is full.

        Args:
            record: The newest record, None where there is none.
            now_s: Monotonic seconds.
            epoch_s: Epoch seconds; they count for a record that was there before the first look.
        """
        is_first_look, self._has_looked = not self._has_looked, True
        if record is None:
            self._offset = None
            return False
        if record.offset != self._offset:
            self._offset = record.offset
            is_old = is_first_look and epoch_s - record.at_ms / 1000 > FRESH_S
            self._seen_s = float("-inf") if is_old else now_s
        return now_s - self._seen_s <= FRESH_S


class FullWatch(threading.Thread):
    """
    The consumer's side: looks whether the queue is full.

    Args:
        topics: Names of the queue.
        bootstrap_servers: Comma-separated `host:port`.
        extra: librdkafka settings.

    Attributes:
        is_full: What the last look has found.
    """

    def __init__(self, topics: QueueTopics, bootstrap_servers: str, extra: Mapping[str, str] | None) -> None:
        """Open no client; `start_on` begins to look."""
        super().__init__(name=f"kmq-full-{topics}", daemon=True)
        self._topics = topics
        config = reader_config(bootstrap_servers, topics.consumer_group, new_client_id("full"), extra)
        self._reader = RulesReader(topics, config, LOOK_TIMEOUT_MS)
        self._freshness = Freshness()
        self._intake: Callable[[], Intake | None] = lambda: None
        self._intake_use = threading.Lock()
        self._end: int | None = None
        self._changed_s = float("-inf")
        self._stopping = threading.Event()
        self._logged_s = float("-inf")
        self.is_full = False

    @property
    def client(self) -> Consumer | None:
        """The client, to be left alone in a child process; None while none is open."""
        return self._reader.client

    def start_on(self, intake: Intake) -> None:
        """Begin to look, by the client of *intake*."""
        # A consumer that is dropped without `close` must take its client along: this thread keeps no reference.
        self._intake = weakref.ref(intake)
        self.start()

    def run(self) -> None:
        """Look until stopped, or until the intake is gone; called by `start_on`."""
        try:
            while not self._stopping.is_set() and self._look():
                self._stopping.wait(LOOK_S)
        finally:
            self.is_full = False
            self._reader.close()

    def stop(self) -> None:
        """Stop looking; when this returns, the client of the intake is no longer in use here and may be closed."""
        self._stopping.set()
        with self._intake_use:
            pass

    def close(self) -> None:
        """Stop looking; a look that is under way is waited for."""
        self.stop()
        if self.is_alive():
            self.join(LOOK_TIMEOUT_MS / 1000)

    def _look(self) -> bool:
        """Look once; return whether there is something left to look with."""
        try:
            with self._intake_use:
                intake = self._intake()
                if intake is None or self._stopping.is_set():
                    return False
                end = intake.end_of(RULES_TOPIC, END_TIMEOUT_S)
                del intake
            self._read(end)
        except (KmqError, KafkaException) as error:
            # What is known stays, until it is too old.
            logger.debug("cannot look whether %s is full: %s", self._topics, error)
        self._judge()
        return True

    def _read(self, end: int) -> None:
        now_s = time.monotonic()
        if end != self._end:
            # An empty topic needs no reader.
            if end or self._end:
                self._reader.look()
            self._end, self._changed_s = end, now_s
        elif now_s - self._changed_s > FRESH_S:
            self._reader.close()

    def _judge(self) -> None:
        now_s, was_full = time.monotonic(), self.is_full
        self.is_full = self._freshness.is_fresh(self._reader.full, now_s, time.time())
        if self.is_full and now_s - self._logged_s >= WARN_INTERVAL_S:
            self._logged_s = now_s
            logger.warning(
                "receiving nothing: queue %s has more in flight than its max_in_flight; acknowledge messages, or raise "
                "it with `kmq queue alter %s --max-in-flight`",
                self._topics, self._topics, extra={"action": "queue_full", "queue": str(self._topics)},
            )  # fmt: skip
        elif was_full and not self.is_full:
            logger.info(
                "queue %s is full no more, receiving goes on", self._topics,
                extra={"action": "queue_full", "queue": str(self._topics)},
            )  # fmt: skip
