"""
The ledger as a service: three streaming queries a queue, from its topics into Delta.

Rule 1: a row is written exactly once: Delta takes a batch of a query once, and the checkpoint says what a batch holds.
Rule 2: without its checkpoint a query goes on where its table ends: Delta's commits hold whole ranges of offsets.
Rule 3: a failed query is started again, with backoff and a limit; what stopped it for good is one line.
Rule 4: the messages of a queue are written once, however many groups read it.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812  # the field's name for it

from kmq_spark.config import plain
from kmq_spark.errors import ConfigError, LedgerError
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.topics import check_queue
from kmq_spark.ledger.lock import exclusive
from kmq_spark.ledger.schema import DEAD_LETTERS, MARKERS, MESSAGES, TABLES, Location
from kmq_spark.ledger.sources import TopicSource, dead_letter_rows, marker_rows, message_rows, read_topic
from kmq_spark.ledger.tables import create_tables
from kmq_spark.ledger.views import create_catalog_views
from kmq_spark.spark.session import local_checkpoint_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from kmq_spark.config import LedgerSettings, Settings
    from kmq_spark.kafka.topics import QueueLayout

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 30.0
POLL_S = 0.1

REMOVED_MARKS = ("KAFKA_DATA_LOSS", "offset was changed from", "Some data may have been lost", "may have been aged out")
"""What Spark's Kafka source says when records are gone before they were read, or the topic was made anew."""


@dataclass(frozen=True, slots=True)
class Stream:
    """
    What one query does: a topic into a table.

    Attributes:
        name: Shown by Spark; its folder below the checkpoint folder too.
        table: Where its rows go.
        topic: Where they come from.
        partition_count: Of the topic.
        place_columns: Columns of the table that say partition and offset of a record.
        owner: Values of the table's columns by which its rows are told from other queues'.
        rows: Kafka records in, rows of the table out.
    """

    name: str
    table: str
    topic: str
    partition_count: int
    place_columns: tuple[str, str]
    owner: dict[str, str]
    rows: Callable[[DataFrame], DataFrame]


def streams_of(layouts: Sequence[QueueLayout]) -> list[Stream]:
    """Return the queries that the queues need, the messages of each queue topic once."""
    streams: dict[str, Stream] = {}
    for layout in layouts:
        topics, count = layout.topics, layout.partition_count
        queue, group = topics.queue, topics.group
        whose = {"queue": queue, "group_name": group}
        for stream in (
            Stream(
                f"messages/{queue}", MESSAGES, topics.queue_topic, count, ("queue_partition", "message_offset"),
                {"queue": queue}, partial(message_rows, queue=queue),
            ),
            Stream(
                f"markers/{topics}", MARKERS, topics.markers_topic, count, ("marker_partition", "marker_offset"),
                whose, partial(marker_rows, queue=queue, group=group),
            ),
            Stream(
                f"dead_letters/{topics}", DEAD_LETTERS, topics.dead_letter_topic, layout.dead_letter_partition_count,
                ("dead_letter_partition", "dead_letter_offset"), whose,
                partial(dead_letter_rows, queue=queue, group=group),
            ),
        ):  # fmt: skip
            streams.setdefault(stream.name, stream)
    return list(streams.values())


@dataclass(slots=True)
class _Run:
    """A stream and its query."""

    stream: Stream
    query: StreamingQuery | None = None
    failures: int = 0
    rests: int = 0
    is_done: bool = field(default=False)


class LedgerService:
    """
    Everything that one application writes: all streams of its queues.

    Args:
        spark: Session with Delta's extension.
        queues: `queue` or `queue@group` each.
        settings: All settings.

    Attributes:
        location: Of the ledger.
        on_ready: Called once, when every query has begun.
        restarts: How often a query was started again.
        rows: Rows that the tables have more than when it began, by table; known when it has ended.

    Raises:
        ConfigError: The place of the ledger is not allowed.
    """

    def __init__(self, spark: SparkSession, queues: Sequence[str], settings: Settings) -> None:
        """Keep what is needed; `run` does the work."""
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

    def stop(self) -> None:
        """Ask `run` to end; a batch that this interrupts is written anew, or known as written, by the next run."""
        self._stopping.set()

    def run(self) -> None:
        """
        Write until stopped, or until everything there is was written (`available-now`).

        Raises:
            TopicError: A topic of a queue is missing or does not fit.
            LedgerError: What lies there is no ledger, another process has it, or a query failed for good.
        """
        with exclusive(self.location):
            layouts = [self._layout(queue) for queue in self._queues]
            create_tables(self._spark, self.location)
            before = self._counts()
            if self.location.catalog:
                create_catalog_views(self._spark, self.location)
            for key, value in local_checkpoint_settings(self._checkpoints, self._spark).items():
                self._spark.conf.set(key, value)
            runs = [_Run(stream) for stream in streams_of(layouts)]
            try:
                self._keep_running(runs)
            finally:
                for run in runs:
                    _stop(run)
            self.rows = {
                table: count - before[table] for table, count in self._counts().items() if count > before[table]
            }

    def _counts(self) -> dict[str, int]:
        """Return the rows of each table: from Delta's own statistics, no file is read."""
        return {table: self._spark.table(self.location.sql_name(table)).count() for table in TABLES}

    def _layout(self, queue: str) -> QueueLayout:
        kafka = self._settings.kafka
        return check_queue(
            queue, bootstrap_servers=kafka.bootstrap_servers, timeout_ms=kafka.timeout_ms, extra=plain(kafka.extra)
        )

    def _keep_running(self, runs: list[_Run]) -> None:
        """Start the queries, and those that fail again, until all are done or a stop is asked for."""
        is_ready = False
        while not self._stopping.is_set() and not all(run.is_done for run in runs):
            for run in runs:
                if run.is_done or (run.query is not None and run.query.isActive):
                    continue
                if run.rests > 0:
                    run.rests -= 1
                    continue
                self._step(run)
            if not is_ready and all(run.query is not None for run in runs):
                is_ready = True
                logger.info(
                    "ledger %s is ready: %d queries of %s, the first rows come with their first batches",
                    self.location, len(runs), ", ".join(self._queues),
                    extra={"action": "ready"},
                )  # fmt: skip
                self.on_ready()
            self._stopping.wait(POLL_S)

    def _step(self, run: _Run) -> None:
        """Start a query that was not started, look how one ended that was."""
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
            self._failed(run, error)
        else:
            run.query = ended

    def _failed(self, run: _Run, error: Exception) -> None:
        if self._stopping.is_set():
            return
        limit, run.failures = self._settings.ledger.restart_limit, run.failures + 1
        line = _first_line(error)
        if any(mark in str(error) for mark in REMOVED_MARKS):
            raise LedgerError(
                f"records of {run.stream.topic} were removed before the ledger read them, or the topic was made anew: "
                f"got {line}; to go on with what is left, run once with KMQ_LEDGER__FAIL_ON_REMOVED=false; for a topic "
                f"made anew, move {self._checkpoints}/{run.stream.name} away and begin another ledger"
            ) from error
        if run.failures > limit or isinstance(error, ConnectionError):
            raise LedgerError(
                f"the query {run.stream.name} of the ledger failed {run.failures} times in a row: got {line}; correct "
                "the cause and start the ledger again, no row is lost or written twice"
            ) from error
        backoff_s = min(FIRST_BACKOFF_S * 2 ** (run.failures - 1), LONGEST_BACKOFF_S)
        run.rests = int(backoff_s / POLL_S)
        self.restarts += 1
        logger.warning(
            "query %s of the ledger failed, starting again in %g s (%d of %d): %s",
            run.stream.name, backoff_s, run.failures, limit, line, extra={"action": "restart"},
        )  # fmt: skip

    def _start(self, stream: Stream) -> StreamingQuery:
        ledger, kafka = self._settings.ledger, self._settings.kafka
        checkpoint = f"{self._checkpoints.rstrip('/')}/{stream.name}"
        source = TopicSource(
            bootstrap_servers=kafka.bootstrap_servers,
            topic=stream.topic,
            group_id_prefix=f"{QueueTopics(stream.owner['queue']).consumer_group}.ledger",
            starting_offsets=next_offsets(self._spark, self.location, stream),
            max_records_per_batch=ledger.max_records_per_batch,
            fail_on_removed=ledger.fail_on_removed,
            extra=plain(kafka.spark_extra),
        )
        # As many files a commit as tasks: few, so that the tables do not fall to pieces between two `maintain`.
        rows = stream.rows(read_topic(self._spark, source).coalesce(ledger.tasks))
        writer = rows.writeStream.format("delta").outputMode("append").queryName(f"kmq-ledger {stream.name}")
        writer = writer.option("checkpointLocation", checkpoint)
        if ledger.trigger == "available-now":
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime=f"{ledger.trigger_interval_ms} milliseconds")
        if self.location.folder:
            return writer.start(self.location.path(stream.table))
        return writer.toTable(self.location.sql_name(stream.table))


def location_of(settings: LedgerSettings) -> Location:
    """
    Return where the settings say that the ledger lies.

    Raises:
        ConfigError: The place is not allowed.
    """
    return Location("" if settings.catalog else settings.dir, settings.catalog)


def next_offsets(spark: SparkSession, location: Location, stream: Stream) -> dict[int, int]:
    """
    Return where a query without checkpoint has to begin, so that no row is written twice: where its table ends.

    Returns:
        The next offset of every partition; empty where the table holds nothing of this stream. A partition of which
        nothing is there begins with its first record.
    """
    partition, offset = stream.place_columns
    rows = spark.table(location.sql_name(stream.table))
    for column, value in stream.owner.items():
        rows = rows.where(F.col(column) == value)
    found = {row[0]: row[1] + 1 for row in rows.groupBy(partition).agg(F.max(offset)).collect()}
    if not found:
        return {}
    earliest = -2  # Kafka's own name for it
    return {number: found.get(number, earliest) for number in range(stream.partition_count)}


def _stop(run: _Run) -> None:
    if run.query is None:
        return
    try:
        run.query.stop()
    except (PySparkException, Py4JError, ConnectionError):
        # A JVM that is gone is stopped, and so is a query that failed while it ended.
        logger.debug("query %s did not stop", run.stream.name, exc_info=True)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
