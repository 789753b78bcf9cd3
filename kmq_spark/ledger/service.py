"""
The ledger as a service: up to three streaming queries per queue, from its topics to Delta tables, and one for the
coordination topic.

Rule 1: Every row is written exactly once: Delta accepts each batch of a query once, and the checkpoint defines the
content of a batch.
Rule 2: A query without its checkpoint continues at the end of its table: Delta commits contain complete ranges of
offsets. The query of the coordination topic reads from the beginning again and leaves out the rows of its table.
Rule 3: A failed query is restarted, with backoff and a limit. A final failure is reported in one line.
Rule 4: The messages of a queue are written once, for any number of groups that read it.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from confluent_kafka.admin import AdminClient
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812  # the field's name for it

from kmq_spark.config import plain
from kmq_spark.coordination.topic import check_coordination_topic
from kmq_spark.errors import ConfigError, LedgerError
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.settings import admin_config, make_client
from kmq_spark.kafka.topics import check_queue
from kmq_spark.ledger.lock import exclusive
from kmq_spark.ledger.schema import COORDINATION, DEAD_LETTERS, MARKERS, MESSAGES, TABLES, Location
from kmq_spark.ledger.sources import (
    TopicSource,
    coordination_rows,
    dead_letter_rows,
    marker_rows,
    message_rows,
    read_topic,
)
from kmq_spark.ledger.tables import create_tables
from kmq_spark.ledger.views import create_catalog_views
from kmq_spark.spark.queries import one_line, text_of
from kmq_spark.spark.restarts import restart_backoff_s
from kmq_spark.spark.session import local_checkpoint_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from kmq_spark.config import LedgerSettings, Settings
    from kmq_spark.kafka.topics import QueueLayout

logger = logging.getLogger(__name__)

POLL_S = 0.1

_SHUFFLE_PARTITIONS = "spark.sql.shuffle.partitions"

DATA_LOSS_TEXTS = (
    "KAFKA_DATA_LOSS",
    "offset was changed from",
    "Some data may have been lost",
    "may have been aged out",
)
"""
Texts in errors of Spark's Kafka source if records were removed before they were read, or the topic was created again.
"""


@dataclass(frozen=True, slots=True)
class Stream:
    """
    The definition of one query: a topic to a table.

    Attributes:
        name: Name of the query in Spark, and of its folder below the checkpoint folder.
        table: Table to which the rows are written.
        topic: Topic from which the records are read.
        partition_count: Number of partitions of the topic.
        place_columns: Columns of the table that contain partition and offset of a record.
        owner: Column values that separate its rows from those of other queues.
        group_id_prefix: Prefix of the consumer group names that Spark generates.
        rows: Converts Kafka records to rows of the table.
        is_folded: Whether a row depends on all records before it. Without a checkpoint the query then begins with the
            first record of the topic.
    """

    name: str
    table: str
    topic: str
    partition_count: int
    place_columns: tuple[str, str]
    owner: dict[str, str]
    group_id_prefix: str
    rows: Callable[[DataFrame], DataFrame]
    is_folded: bool = False


def streams_of(layouts: Sequence[QueueLayout]) -> list[Stream]:
    """Return the queries that the queues need. The messages of each queue topic have only one query."""
    streams: dict[str, Stream] = {}
    for layout in layouts:
        topics, count = layout.topics, layout.partition_count
        queue, group = topics.queue, topics.subscription
        owner, prefix = {"queue": queue, "group_name": group}, f"{QueueTopics(queue).consumer_group}.ledger"
        for stream in (
            Stream(
                f"messages/{queue}", MESSAGES, topics.queue_topic, count, ("queue_partition", "message_offset"),
                {"queue": queue}, prefix, partial(message_rows, queue=queue),
            ),
            Stream(
                f"markers/{topics}", MARKERS, topics.markers_topic, count, ("marker_partition", "marker_offset"),
                owner, prefix, partial(marker_rows, queue=queue, group=group),
            ),
            Stream(
                f"dead_letters/{topics}", DEAD_LETTERS, topics.dead_letter_topic, layout.dead_letter_partition_count,
                ("dead_letter_partition", "dead_letter_offset"), owner, prefix,
                partial(dead_letter_rows, queue=queue, group=group),
            ),
        ):  # fmt: skip
            streams.setdefault(stream.name, stream)
    return list(streams.values())


def coordination_stream(
    topic: str, partition_count: int, written: Callable[[], Mapping[tuple[int, str], int]]
) -> Stream:
    """Return the query of the coordination topic; *written* returns `written_changes` whenever the query starts."""
    return Stream(
        f"coordination/{topic}", COORDINATION, topic, partition_count, ("coordination_partition", "record_offset"), {},
        f"{topic}.ledger", lambda records: coordination_rows(records, written()), is_folded=True,
    )  # fmt: skip


@dataclass(slots=True)
class _Run:
    """A stream and its running query."""

    stream: Stream
    query: StreamingQuery | None = None
    failures: int = 0
    polls_to_wait: int = 0
    is_done: bool = field(default=False)


class LedgerService:
    """
    All streams of the queues of one application.

    Args:
        spark: Session with Delta's extension.
        queues: `queue` or `queue@subscription` for each queue.
        settings: All settings.

    Attributes:
        location: Location of the ledger.
        on_ready: Called once, when all queries have started.
        restarts: Number of query restarts.
        rows: Number of rows added since the start, by table; set when `run` has ended.
        is_counted: Whether `rows` is known: not where the JVM ended before `run` did.

    Raises:
        ConfigError: The location of the ledger is not allowed.
    """

    def __init__(self, spark: SparkSession, queues: Sequence[str], settings: Settings) -> None:
        """Keep the arguments; `run` does the work."""
        self._spark = spark
        self._queues = queues
        self._settings = settings
        self.location = location_of(settings.ledger)
        if self.location.catalog and not settings.ledger.checkpoint_dir:
            message = (
                f"checkpoint folder is missing: got catalog {self.location.catalog!r} and none; set [ledger] "
                "checkpoint_dir or --checkpoint-dir"
            )
            raise ConfigError(message)
        self._checkpoints = settings.ledger.checkpoint_dir or f"{self.location.folder.rstrip('/')}/_checkpoints"
        self._stopping = threading.Event()
        self.on_ready: Callable[[], None] = lambda: None
        self.restarts = 0
        self.rows: dict[str, int] = {}
        self.is_counted = True

    def stop(self) -> None:
        """Ask `run` to end. If this interrupts a batch, the next run writes it again or finds that it was written."""
        self._stopping.set()

    def run(self) -> None:
        """
        Write until stopped, or until all present records are written (`available-now`).

        Raises:
            TopicError: A topic of a queue is missing or not correct.
            LedgerError: The location contains no ledger, another process uses it, or a query failed too often.
        """
        with exclusive(self.location):
            layouts = [self._layout(queue) for queue in self._queues]
            coordination = self._coordination()
            create_tables(self._spark, self.location)
            before = self._counts()
            if self.location.catalog:
                create_catalog_views(self._spark, self.location)
            for key, value in local_checkpoint_settings(self._checkpoints, self._spark).items():
                self._spark.conf.set(key, value)
            runs = [_Run(stream) for stream in (*streams_of(layouts), *coordination)]
            try:
                self._keep_running(runs)
            finally:
                for run in runs:
                    _stop(run)
            self.rows = self._written_since(before)

    def _written_since(self, before: Mapping[str, int]) -> dict[str, int]:
        try:
            after = self._counts()
        except (PySparkException, Py4JError, ConnectionError):
            if not self._stopping.is_set():
                raise
            # With spark-submit, a signal ends the JVM first.
            logger.info("rows are not counted: Spark's JVM has ended", extra={"action": "rows_not_counted"})
            self.is_counted = False
            return {}
        return {table: count - before[table] for table, count in after.items() if count > before[table]}

    def _counts(self) -> dict[str, int]:
        """Return the number of rows of each table, from Delta's own statistics without reading files."""
        return {table: self._spark.table(self.location.sql_name(table)).count() for table in TABLES}

    def _layout(self, queue: str) -> QueueLayout:
        kafka = self._settings.kafka
        return check_queue(
            queue, bootstrap_servers=kafka.bootstrap_servers, timeout=kafka.timeout, extra=plain(kafka.extra)
        )

    def _coordination(self) -> list[Stream]:
        """Return the query of the coordination topic, if the ledger is to contain it."""
        if not self._settings.ledger.coordination:
            return []
        kafka, topic = self._settings.kafka, self._settings.tracker.coordination_topic
        admin = make_client(AdminClient, admin_config(kafka.bootstrap_servers, extra=plain(kafka.extra)))
        check_coordination_topic(admin, topic, kafka.bootstrap_servers, kafka.timeout)
        found = admin.list_topics(topic, timeout=kafka.timeout)
        written = partial(written_changes, self._spark, self.location)
        return [coordination_stream(topic, len(found.topics[topic].partitions), written)]

    def _keep_running(self, runs: list[_Run]) -> None:
        """Start the queries and restart failed ones until all are done or a stop is requested."""
        is_ready = False
        while not self._stopping.is_set() and not all(run.is_done for run in runs):
            for run in runs:
                if run.is_done or (run.query is not None and run.query.isActive):
                    continue
                if run.polls_to_wait > 0:
                    run.polls_to_wait -= 1
                    continue
                self._step(run)
            if not is_ready and all(run.query is not None for run in runs):
                is_ready = True
                logger.info(
                    "ledger %s is ready: %d queries of %s are running, rows are written with their first batches",
                    self.location, len(runs), ", ".join(self._queues),
                    extra={"action": "ready"},
                )  # fmt: skip
                self.on_ready()
            self._stopping.wait(POLL_S)

    def _step(self, run: _Run) -> None:
        """Start the query of a run if there is none; otherwise handle the end of its query."""
        try:
            if run.query is None:
                run.query = self._start(run.stream)
                return
            if run.query.lastProgress is not None:
                run.failures = 0
            ended, run.query = run.query, None
            ended.awaitTermination()
            run.is_done = True
        except (PySparkException, Py4JError, ConnectionError) as error:
            self._handle_failure(run, error)
        else:
            run.query = ended

    def _handle_failure(self, run: _Run, error: Exception) -> None:
        if self._stopping.is_set():
            return
        limit, run.failures = self._settings.ledger.restart_limit, run.failures + 1
        line = one_line(error)
        if any(text in text_of(error) for text in DATA_LOSS_TEXTS):
            raise LedgerError(
                f"records of {run.stream.topic} were removed before the ledger read them, or the topic was deleted and "
                f"created again: got {line}; to continue with the remaining records, run once with "
                "KMQ_LEDGER__FAIL_ON_REMOVED=false; for a topic that was created again, move "
                f"{self._checkpoints}/{run.stream.name} away and start a new ledger"
            ) from error
        if run.failures > limit or isinstance(error, ConnectionError):
            raise LedgerError(
                f"the query {run.stream.name} of the ledger failed {run.failures} times in a row: got {line}; correct "
                "the cause and start the ledger again, no row is lost or written twice"
            ) from error
        backoff_s = restart_backoff_s(run.failures)
        run.polls_to_wait = int(backoff_s / POLL_S)
        self.restarts += 1
        logger.warning(
            "query %s of the ledger failed, restarting in %g s (%d of %d): %s",
            run.stream.name, backoff_s, run.failures, limit, line, extra={"action": "restart"},
        )  # fmt: skip

    def _start(self, stream: Stream) -> StreamingQuery:
        ledger, kafka = self._settings.ledger, self._settings.kafka
        checkpoint = f"{self._checkpoints.rstrip('/')}/{stream.name}"
        source = TopicSource(
            bootstrap_servers=kafka.bootstrap_servers,
            topic=stream.topic,
            group_id_prefix=stream.group_id_prefix,
            starting_offsets={} if stream.is_folded else next_offsets(self._spark, self.location, stream),
            max_records_per_batch=ledger.max_records_per_batch,
            fail_on_removed=ledger.fail_on_removed,
            extra=plain(kafka.spark_extra),
        )
        # Each task writes one file per commit. Few tasks avoid many small files between two runs of `maintain`.
        rows = stream.rows(read_topic(self._spark, source).coalesce(ledger.tasks))
        writer = rows.writeStream.format("delta").outputMode("append").queryName(f"kmq-ledger {stream.name}")
        writer = writer.option("checkpointLocation", checkpoint)
        if ledger.trigger == "available-now":
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime=f"{ledger.trigger_interval_ms} milliseconds")
        # The first run of a checkpoint fixes the number of state partitions; each batch writes a file for each of them.
        shuffle_partitions = str(self._spark.conf.get(_SHUFFLE_PARTITIONS))
        self._spark.conf.set(_SHUFFLE_PARTITIONS, str(ledger.tasks))
        try:
            if self.location.folder:
                return writer.start(self.location.path(stream.table))
            return writer.toTable(self.location.sql_name(stream.table))
        finally:
            self._spark.conf.set(_SHUFFLE_PARTITIONS, shuffle_partitions)


def location_of(settings: LedgerSettings) -> Location:
    """
    Return the location of the ledger according to the settings.

    Raises:
        ConfigError: The location is not allowed.
    """
    return Location("" if settings.catalog else settings.dir, settings.catalog)


def next_offsets(spark: SparkSession, location: Location, stream: Stream) -> dict[int, int]:
    """
    Return where a query without a checkpoint must begin, so that no row is written twice: at the end of its table.

    Returns:
        The next offset of every partition; empty if the table contains nothing of this stream. A partition without rows
        begins with its first record.
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


def written_changes(spark: SparkSession, location: Location) -> dict[tuple[int, str], int]:
    """Return the offset of the newest record whose rows the table `coordination` has, by partition and group."""
    rows = spark.table(location.sql_name(COORDINATION)).groupBy("coordination_partition", "coordination_group")
    return {(row[0], row[1]): row[2] for row in rows.agg(F.max("record_offset")).collect()}


def _stop(run: _Run) -> None:
    if run.query is None:
        return
    try:
        run.query.stop()
    except (PySparkException, Py4JError, ConnectionError):
        # Nothing to stop: the JVM has exited, or the query failed while it ended.
        logger.debug("query %s did not stop", run.stream.name, exc_info=True)
