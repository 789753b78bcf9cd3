"""
The ledger as a service: up to three streaming queries per queue, from its topics to Delta tables.

Rule 1: Every row is written exactly once: Delta accepts each batch of a query once, and the checkpoint defines the
content of a batch. A query without its checkpoint continues at the end of its table: Delta commits contain complete
ranges of offsets.
Rule 2: The ledger never affects the tracker: it has other consumer groups and checkpoints, and does not write to Kafka.
"""

from __future__ import annotations

import json
import logging
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812  # the field's name for it

from kmq_spark.config import plain
from kmq_spark.errors import ConfigError, LedgerError
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.topics import check_queue
from kmq_spark.ledger.schema import DEAD_LETTERS, MARKERS, MESSAGES, TABLES, Location, location_of
from kmq_spark.ledger.sources import dead_letter_rows, marker_rows, message_rows
from kmq_spark.ledger.tables import create_tables, exclusive
from kmq_spark.spark.queries import RestartedQuery, one_line, run_together, text_of
from kmq_spark.spark.session import local_checkpoint_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from kmq_spark.config import LedgerSettings, Settings
    from kmq_spark.kafka.topics import QueueLayout

logger = logging.getLogger(__name__)

RESTART_LIMIT = 20
"""How often in a row a failed query is started again."""

DATA_LOSS_TEXTS = (
    "KAFKA_DATA_LOSS",
    "offset was changed from",
    "Some data may have been lost",
    "may have been aged out",
)
"""
Texts in errors of Spark's Kafka source if records were removed before they were read, or the topic was created again.
"""


class Stream(NamedTuple):
    """A topic that is written to a table; `owner` separates its rows from those of other queues."""

    name: str
    table: str
    topic: str
    partition_count: int
    place_columns: tuple[str, str]
    owner: Mapping[str, str]
    rows: Callable[[DataFrame], DataFrame]


def streams_of(layouts: Sequence[QueueLayout]) -> list[Stream]:
    """Return the streams of the queues. The messages of each queue topic are written once, for all subscriptions."""
    streams: dict[str, Stream] = {}
    for layout in layouts:
        topics, count = layout.topics, layout.partition_count
        queue, subscription = topics.queue, topics.subscription
        owner = {"queue": queue, "subscription": subscription}
        for stream in (
            Stream(
                f"messages/{queue}", MESSAGES, topics.queue_topic, count, ("queue_partition", "message_offset"),
                {"queue": queue}, partial(message_rows, queue=queue),
            ),
            Stream(
                f"markers/{topics}", MARKERS, topics.markers_topic, count, ("marker_partition", "marker_offset"),
                owner, partial(marker_rows, queue=queue, subscription=subscription),
            ),
            Stream(
                f"dead_letters/{topics}", DEAD_LETTERS, topics.dead_letter_topic, layout.dead_letter_partition_count,
                ("dead_letter_partition", "dead_letter_offset"), owner,
                partial(dead_letter_rows, queue=queue, subscription=subscription),
            ),
        ):  # fmt: skip
            streams.setdefault(stream.name, stream)
    return list(streams.values())


class LedgerQuery(RestartedQuery):
    """The query of one stream; *on_start* is called with its name whenever it has started."""

    def __init__(
        self,
        spark: SparkSession,
        stream: Stream,
        settings: Settings,
        on_start: Callable[[str], None],
        *,
        once: bool,
    ) -> None:
        super().__init__(f"query {stream.name} of the ledger", stream.owner["queue"], RESTART_LIMIT)
        self._spark = spark
        self._stream = stream
        self._settings = settings
        self._on_start = on_start
        self._once = once

    @contextmanager
    def open(self) -> Iterator[StreamingQuery]:
        """Start the query; turn the loss of records into an error that says what to do."""
        checkpoint = f"{checkpoint_dir_of(self._settings.ledger)}/{self._stream.name}"
        try:
            query = self._start(checkpoint)
            self._on_start(self._stream.name)
            yield query
        except PySparkException as error:
            if not any(text in text_of(error) for text in DATA_LOSS_TEXTS):
                raise
            raise LedgerError(
                f"records of {self._stream.topic} were removed before the ledger read them, or the topic was deleted "
                f"and created again: got {one_line(error)}; to continue with the remaining records, run once with "
                f"KMQ_LEDGER__FAIL_ON_REMOVED=false; for a topic that was created again, move {checkpoint} away and "
                "start a new ledger"
            ) from error

    def _start(self, checkpoint: str) -> StreamingQuery:
        ledger, kafka, stream = self._settings.ledger, self._settings.kafka, self._stream
        location = location_of(ledger)
        known = next_offsets(self._spark, location, stream)
        options = {
            **{f"kafka.{key}": value for key, value in plain(kafka.spark_extra).items()},
            "kafka.bootstrap.servers": kafka.bootstrap_servers,
            "subscribe": stream.topic,
            "startingOffsets": json.dumps({stream.topic: known}) if known else "earliest",
            "maxOffsetsPerTrigger": str(ledger.max_records_per_batch),
            "groupIdPrefix": f"{QueueTopics(stream.owner['queue']).consumer_group}.ledger",
            # Skip the records of aborted transactions.
            "kafka.isolation.level": "read_committed",
            # As in the tracker: otherwise small partitions wait for the 500 ms long poll.
            "kafka.fetch.max.wait.ms": "10",
            "kafkaConsumer.pollTimeoutMs": "30000",
            "failOnDataLoss": str(ledger.fail_on_removed).lower(),
            "includeHeaders": "true",
        }
        records = self._spark.readStream.format("kafka").options(**options).load()
        # Each task writes one file per commit; a batch is seldom worth two files.
        rows = stream.rows(records.coalesce(1))
        writer = rows.writeStream.format("delta").outputMode("append").queryName(f"kmq-ledger {stream.name}")
        writer = writer.option("checkpointLocation", checkpoint)
        if self._once:
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime=f"{ledger.interval} seconds")
        if location.folder:
            return writer.start(location.path(stream.table))
        # This thread has no active session yet, by which Delta finds a table of a catalog.
        jvm, session = self._spark._jvm, self._spark._jsparkSession  # noqa: SLF001  # there is no other way to it
        assert jvm is not None
        jvm.org.apache.spark.sql.SparkSession.setActiveSession(session)
        return writer.toTable(location.sql_name(stream.table))


class LedgerService:
    """
    All streams of the queues of one application.

    Attributes:
        location: Location of the ledger.
        on_ready: Called once, when all queries have started.
        rows: Number of rows added since the start, by table; set when `run` has ended. None where the JVM ended before.
    """

    def __init__(self, spark: SparkSession, queues: Sequence[str], settings: Settings, *, once: bool = False) -> None:
        self._spark = spark
        self._once = once
        self._queues = queues
        self._settings = settings
        self.location = location_of(settings.ledger)
        checkpoint_dir_of(settings.ledger)
        self._queries: list[LedgerQuery] = []
        self._to_start: set[str] = set()
        self._lock = threading.Lock()
        self._is_stopping = False
        self.on_ready: Callable[[], None] = lambda: None
        self.rows: dict[str, int] | None = {}

    @property
    def restarts(self) -> int:
        """Number of query restarts."""
        return sum(query.restarts for query in self._queries)

    def stop(self) -> None:
        """Ask `run` to end. If this interrupts a batch, the next run writes it again or finds that it was written."""
        self._is_stopping = True
        for query in self._queries:
            query.stop()

    def run(self) -> None:
        """Write until stopped, or until all present records are written (*once*)."""
        spark, settings = self._spark, self._settings
        with exclusive(self.location):
            streams = streams_of([check_queue(queue, **settings.kafka.reach()) for queue in self._queues])
            create_tables(spark, self.location)
            before = self._counts()
            for key, value in local_checkpoint_settings(checkpoint_dir_of(settings.ledger), spark).items():
                spark.conf.set(key, value)
            self._to_start = {stream.name for stream in streams}
            self._queries = [LedgerQuery(spark, each, settings, self._note_start, once=self._once) for each in streams]
            if self._is_stopping:
                return
            run_together(self._queries)
            self.rows = self._written_since(before)

    def _note_start(self, name: str) -> None:
        with self._lock:
            is_last = self._to_start == {name}
            self._to_start.discard(name)
        if is_last:
            logger.info(
                "ledger %s is ready: %d queries of %s are running, rows are written with their first batches",
                self.location, len(self._queries), ", ".join(self._queues),
                extra={"action": "ready"},
            )  # fmt: skip
            self.on_ready()

    def _written_since(self, before: Mapping[str, int]) -> dict[str, int] | None:
        try:
            after = self._counts()
        except (PySparkException, Py4JError, ConnectionError):
            if not self._is_stopping:
                raise
            # With spark-submit, a signal ends the JVM first.
            logger.info("rows are not counted: Spark's JVM has ended", extra={"action": "rows_not_counted"})
            return None
        return {table: count - before[table] for table, count in after.items() if count > before[table]}

    def _counts(self) -> dict[str, int]:
        """Return the number of rows of each table, from Delta's own statistics without reading files."""
        return {table: self._spark.table(self.location.sql_name(table)).count() for table in TABLES}


def checkpoint_dir_of(settings: LedgerSettings) -> str:
    """Return the folder of the queries' checkpoints."""
    if settings.catalog and not settings.checkpoint_dir:
        message = (
            f"checkpoint folder is missing: got catalog {settings.catalog!r} and none; set [ledger] checkpoint_dir"
        )
        raise ConfigError(message)
    return (settings.checkpoint_dir or f"{location_of(settings).folder.rstrip('/')}/_checkpoints").rstrip("/")


def next_offsets(spark: SparkSession, location: Location, stream: Stream) -> dict[int, int]:
    """
    Return where a query without a checkpoint must begin, so that no row is written twice: at the end of its table.

    A partition without rows begins with its first record; empty if the table has nothing of this stream.
    """
    partition, offset = stream.place_columns
    rows = spark.table(location.sql_name(stream.table))
    for column, value in stream.owner.items():
        rows = rows.where(F.col(column) == value)
    found = {row[0]: row[1] + 1 for row in rows.groupBy(partition).agg(F.max(offset)).collect()}
    if not found:
        return {}
    earliest = -2  # Kafka's own value for it
    return {number: found.get(number, earliest) for number in range(stream.partition_count)}
