"""
Generate one simulated hour of a queue, for the notebook and for tests: the records of its topics, without a broker.

Rule 1: The hour is generated from a seed. It is always the same, except for the instant at which it ends.
Rule 2: Bytes and headers are those that the clients and the tracker write. Only the events are simulated: a worker dies
at minute 20, a burst of messages begins at minute 33, the tracker is down from minute 44 to 46, because its process
died and the other process of the fleet waits for 2T, and three messages crash every handler.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from kmq_spark.coordination.topic import DEFAULT_PARTITIONS, partition_of
from kmq_spark.core.markers import Marker, MarkerType, OffsetRange, Outcome, Release
from kmq_spark.ledger.coordination_rows import FOLDED_SCHEMA, PartitionFold, TopicRecord
from kmq_spark.ledger.sample_fleet import FLEET_GROUP, fleet_records
from kmq_spark.ledger.schema import COORDINATION, DEAD_LETTERS, MARKERS, MESSAGES, Location
from kmq_spark.ledger.sources import change_rows, dead_letter_rows, marker_rows, message_rows
from kmq_spark.ledger.tables import create_tables
from kmq_spark.wire.codec import encode_marker
from kmq_spark.wire.headers import Headers, dead_letter_headers, redelivery_headers

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
LEASE_MS = 30_000
PARTITIONS = 4
MAX_DELIVERIES = 5
HANDLERS_OF_A_WORKER = 3
MESSAGES_A_SECOND, IN_THE_BURST = 1.2, 6.0
BURST_MS = (33 * MINUTE_MS, 35 * MINUTE_MS)
TRACKER_DOWN_MS = (44 * MINUTE_MS, 46 * MINUTE_MS)
DEAD_WORKER, DEAD_MS = "worker-2", (20 * MINUTE_MS, 26 * MINUTE_MS)
WORKERS = {"worker-1": 1_300, "worker-2": 1_500, "worker-3": 3_800}
"""Median duration of each worker's handlers, milliseconds."""
REASONS = ("no such customer", "no such customer", "amount is not a number", "country not served")
POISON = ("x-kind", b"poison")
POISON_NUMBERS = frozenset({180, 900, 2_400})
REJECTED, FAILED, HANGS = 0.012, 0.045, 0.052
"""
Upper bounds of a random number per delivery: the message is rejected, its handler raises, its handler hangs. Above the
last bound the message is acknowledged.
"""


class SampleRecord(NamedTuple):
    """A record of one of the four topics."""

    partition: int
    offset: int
    at_ms: int
    key: bytes | None
    value: bytes
    headers: Headers


@dataclass(slots=True)
class SampleHour:
    """
    The three topics of the queue, and the coordination topic.

    Attributes:
        records: Records by table of the ledger, in offset order within each partition.
    """

    records: dict[str, list[SampleRecord]] = field(
        default_factory=lambda: {MESSAGES: [], MARKERS: [], DEAD_LETTERS: [], COORDINATION: []}
    )
    _next: dict[tuple[str, int], int] = field(default_factory=dict)

    def append(
        self,
        table: str,
        partition: int,
        at_ms: int,
        value: bytes,
        *,
        key: bytes | None = None,
        headers: Headers | None = None,
    ) -> SampleRecord:
        """Append a record and assign its offset, as a broker does."""
        offset = self._next.get((table, partition), 0)
        self._next[table, partition] = offset + 1
        record = SampleRecord(partition, offset, at_ms, key, value, headers or [])
        self.records[table].append(record)
        return record


@dataclass(slots=True)
class _Delivery:
    """One delivery of a message to a worker."""

    message: SampleRecord
    count: int
    worker: str
    deadline_ms: int = 0
    is_open: bool = True


class _Simulation:
    """A discrete-event simulation: events are processed in order of time."""

    def __init__(self, seed: int) -> None:
        self.hour = SampleHour()
        self._random = random.Random(seed)  # noqa: S311  # a simulation, not a secret
        self._events: list[tuple[int, int, str, Any]] = []
        self._ready: list[tuple[SampleRecord, int]] = []
        self._free = dict.fromkeys(WORKERS, HANDLERS_OF_A_WORKER)
        self._number = 0
        self._arrived = 0

    def run(self) -> SampleHour:
        self._at(0, "arrive", None)
        while self._events and self._events[0][0] < HOUR_MS:
            now_ms, _, what, about = heapq.heappop(self._events)
            getattr(self, f"_{what}")(now_ms, about)
            self._hand_out(now_ms)
        for each in fleet_records("orders", dies_at_ms=TRACKER_DOWN_MS[0], end_at_ms=HOUR_MS):
            partition = partition_of(FLEET_GROUP, DEFAULT_PARTITIONS)
            self.hour.append(COORDINATION, partition, each.append_time_ms, each.value or b"", key=each.key)
        return self.hour

    def _at(self, at_ms: int, what: str, about: Any) -> None:  # noqa: ANN401  # depends on the event
        self._number += 1
        heapq.heappush(self._events, (at_ms, self._number, what, about))

    def _arrive(self, now_ms: int, _: None) -> None:
        key = f"customer-{self._random.randrange(400)}".encode()
        value = bytes(self._random.randrange(80, 2_000))
        self._arrived += 1
        headers: Headers = [POISON] if self._arrived in POISON_NUMBERS else []
        partition = self._random.randrange(PARTITIONS)
        self._ready.append((self.hour.append(MESSAGES, partition, now_ms, value, key=key, headers=headers), 1))
        rate = IN_THE_BURST if BURST_MS[0] <= now_ms < BURST_MS[1] else MESSAGES_A_SECOND
        self._at(now_ms + 1 + int(self._random.expovariate(rate) * 1_000), "arrive", None)

    def _hand_out(self, now_ms: int) -> None:
        for worker in WORKERS:
            is_dead = worker == DEAD_WORKER and DEAD_MS[0] <= now_ms < DEAD_MS[1]
            while self._ready and self._free[worker] and not is_dead:
                self._free[worker] -= 1
                self._start(now_ms, worker, *self._ready.pop(0))

    def _start(self, now_ms: int, worker: str, message: SampleRecord, count: int) -> None:
        delivery = _Delivery(message, count, worker, now_ms + LEASE_MS)
        self._mark(now_ms, delivery, MarkerType.START, redeliver_after_ms=LEASE_MS, delivery_count=count)
        took_ms = int(WORKERS[worker] * self._random.lognormvariate(0, 0.7)) + 20
        draw = self._random.random()
        dies = worker == DEAD_WORKER and now_ms < DEAD_MS[0] <= now_ms + took_ms
        if dies or POISON in message.headers:
            draw = 1.0
        if draw == 1.0 or FAILED < draw < HANGS:
            # No marker follows: the process died, or the handler hangs and nothing renews the lease.
            back_ms = DEAD_MS[1] if dies else now_ms + 2 * LEASE_MS
            self._at(back_ms, "freed", worker)
        elif draw < REJECTED:
            self._at(now_ms + took_ms, "reject", delivery)
        elif draw < FAILED:
            self._at(now_ms + took_ms, "fail", delivery)
        else:
            self._at(now_ms + took_ms, "ack", delivery)
        self._at(now_ms + LEASE_MS // 2, "renew", delivery) if took_ms > LEASE_MS // 2 and draw >= HANGS else None
        self._at(self._decided_at(delivery.deadline_ms), "due", delivery)

    def _decided_at(self, deadline_ms: int) -> int:
        """Return when the tracker decides after a deadline: a little later, or when it is running again."""
        late_ms = 120 + int(self._random.gammavariate(2.5, 90))
        down_ms, back_ms = TRACKER_DOWN_MS
        return max(deadline_ms, back_ms) + late_ms if down_ms <= deadline_ms < back_ms else deadline_ms + late_ms

    def _freed(self, _: int, worker: str) -> None:
        self._free[worker] += 1

    def _ack(self, now_ms: int, delivery: _Delivery) -> None:
        self._free[delivery.worker] += 1
        if delivery.is_open:
            delivery.is_open = False
            self._mark(now_ms, delivery, MarkerType.END)

    def _reject(self, now_ms: int, delivery: _Delivery) -> None:
        self._free[delivery.worker] += 1
        if delivery.is_open:
            delivery.is_open = False
            reason = self._random.choice(REASONS)
            self._mark(now_ms, delivery, MarkerType.END, outcome=Outcome.REJECTED, reason=reason)
            self._at(self._decided_at(now_ms), "bury", (delivery, reason))

    def _fail(self, now_ms: int, delivery: _Delivery) -> None:
        self._free[delivery.worker] += 1
        if delivery.is_open:
            delivery.deadline_ms = now_ms + 5_000
            self._mark(now_ms, delivery, MarkerType.KEEPALIVE, redeliver_after_ms=5_000, release=Release.FAILED)
            self._at(self._decided_at(delivery.deadline_ms), "due", delivery)

    def _renew(self, now_ms: int, delivery: _Delivery) -> None:
        if delivery.is_open:
            delivery.deadline_ms = now_ms + LEASE_MS
            self._mark(now_ms, delivery, MarkerType.KEEPALIVE, redeliver_after_ms=LEASE_MS)
            self._at(self._decided_at(delivery.deadline_ms), "due", delivery)

    def _due(self, now_ms: int, delivery: _Delivery) -> None:
        if not delivery.is_open or delivery.deadline_ms >= now_ms:
            return
        delivery.is_open = False
        message = delivery.message
        if delivery.count >= MAX_DELIVERIES:
            self._bury(now_ms, (delivery, f"delivered {delivery.count} times, the limit"))
            return
        headers = redelivery_headers(
            message.headers, delivery_count=delivery.count, queue_partition=message.partition,
            message_offset=message.offset, sent_at_ms=message.at_ms,
        )  # fmt: skip
        copy = self.hour.append(MESSAGES, message.partition, now_ms, message.value, key=message.key, headers=headers)
        self._mark(now_ms, delivery, MarkerType.END, outcome=Outcome.REDELIVERED)
        self._ready.append((copy, delivery.count + 1))

    def _bury(self, now_ms: int, about: tuple[_Delivery, str]) -> None:
        delivery, reason = about
        message = delivery.message
        headers = dead_letter_headers(
            message.headers, source_topic="orders", group="kmq.orders", delivery_count=delivery.count,
            queue_partition=message.partition, message_offset=message.offset, sent_at_ms=message.at_ms, reason=reason,
        )  # fmt: skip
        self.hour.append(DEAD_LETTERS, message.partition, now_ms, message.value, key=message.key, headers=headers)
        self._mark(now_ms, delivery, MarkerType.END, outcome=Outcome.DEAD_LETTERED, reason=reason)

    def _mark(self, now_ms: int, delivery: _Delivery, kind: MarkerType, **values: Any) -> None:
        partition, offset = delivery.message.partition, delivery.message.offset
        by_tracker = values.get("outcome") in {Outcome.REDELIVERED, Outcome.DEAD_LETTERED}
        writer_id = "kmq-tracker" if by_tracker else delivery.worker
        marker = Marker(kind, partition, (OffsetRange(offset, 1),), consumer_id=writer_id, **values)
        self.hour.append(MARKERS, partition, now_ms, encode_marker(marker))


def sample_hour(seed: int = 7) -> SampleHour:
    """Return the simulated hour; instants are milliseconds since its beginning."""
    return _Simulation(seed).run()


def write_sample(spark: SparkSession, folder: str, end_at_ms: int, seed: int = 7) -> None:
    """
    Create a ledger of a simulated hour of the queue `orders`.

    Args:
        spark: Session with Delta's extension.
        folder: Folder of the ledger; must be empty.
        end_at_ms: End of the hour, epoch milliseconds.
        seed: Seed of the simulation.
    """
    location = Location(folder)
    create_tables(spark, location)
    hour = sample_hour(seed)
    rows: dict[str, DataFrame] = {
        MESSAGES: message_rows(_records(spark, hour, MESSAGES, end_at_ms), "orders"),
        MARKERS: marker_rows(_records(spark, hour, MARKERS, end_at_ms), "orders", ""),
        DEAD_LETTERS: dead_letter_rows(_records(spark, hour, DEAD_LETTERS, end_at_ms), "orders", ""),
        COORDINATION: change_rows(_changes(spark, hour, end_at_ms)),
    }
    for table, frame in rows.items():
        frame.coalesce(1).write.format("delta").mode("append").save(location.path(table))


def _records(spark: SparkSession, hour: SampleHour, table: str, end_at_ms: int) -> DataFrame:
    """Return records in the form of Spark's Kafka source."""
    began_at_ms, records = end_at_ms - HOUR_MS, hour.records[table]
    headers = [
        [{"key": name, "value": _moved(name, value, began_at_ms)} for name, value in record.headers]
        for record in records
    ]
    values = pa.table(
        {
            "key": pa.array([record.key for record in records], pa.binary()),
            "value": pa.array([record.value for record in records], pa.binary()),
            "partition": pa.array([record.partition for record in records], pa.int32()),
            "offset": pa.array([record.offset for record in records], pa.int64()),
            "timestamp": pa.array([began_at_ms + record.at_ms for record in records], pa.timestamp("ms", "UTC")),
            "headers": pa.array(headers, pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
        }
    )
    return spark.createDataFrame(values)


def _changes(spark: SparkSession, hour: SampleHour, end_at_ms: int) -> DataFrame:
    """Fold the coordination records as the ledger does; its state function runs in streams only."""
    began_at_ms, records = end_at_ms - HOUR_MS, hour.records[COORDINATION]
    fold = PartitionFold(records[0].partition, records[0].offset)
    topic_records = (TopicRecord(each.offset, began_at_ms + each.at_ms, each.key, each.value) for each in records)
    return spark.createDataFrame([row for record in topic_records for row in fold.read(record)], FOLDED_SCHEMA)


def _moved(name: str, value: bytes | None, by_ms: int) -> bytes | None:
    """Return a header value. Convert instants from milliseconds since the hour's beginning to epoch milliseconds."""
    if not name.endswith("-ms") or value is None:
        return value
    return ",".join(str(int(text) + by_ms) for text in value.decode().split(",")).encode()
