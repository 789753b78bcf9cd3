"""
Copy a table, a topic or files into a queue, one message a row, each exactly once.

Rule 1: a source is read as a stream, continuous or until all that is there was written; the checkpoint says how far.
Rule 2: what a row becomes is chosen by names of columns: one column, or the JSON of several.
Rule 3: a query that failed is started again, with backoff and a limit, as the tracker's is. It is not started again
where a repetition cannot help: the batch is refused, another process writes with this sink id, or the queue does not
exist at the first batch (later a broker that restarts may not know its topics for a moment).
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F  # noqa: N812  # the field's name for it

from kmq_spark.errors import ConfigError, FencedError, KmqError, SinkError, TopicError
from kmq_spark.sink.frames import exactly_once_sink
from kmq_spark.spark.queries import one_line, text_of
from kmq_spark.spark.restarts import restart_backoff_s

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyspark.sql import Column, DataFrame, SparkSession

logger = logging.getLogger(__name__)

KINDS = ("delta", "table", "kafka", "json", "csv", "parquet", "text")
_FILES = frozenset({"json", "csv", "parquet", "text"})
_CHANGES = ("insert", "update_postimage")
_CHANGE_COLUMNS = ("_change_type", "_commit_version", "_commit_timestamp")
POLL_S = 1

RESTART_LIMIT = 20
"""How many times in a row a failed query is started again, by default; as `[tracker] restart_limit`."""


@dataclass(frozen=True, slots=True)
class Source:
    """
    What is copied.

    Attributes:
        kind: One of `KINDS`.
        place: Folder, table, or topic.
        changes: Whether a Delta table's change feed is read: inserted rows, and updated ones as they are now.
        max_per_batch: Files (Delta and files) or records (Kafka) of one batch; 0 leaves it to Spark.
        options: Options of Spark's Kafka source: brokers, credentials.
    """

    kind: str
    place: str
    changes: bool = False
    max_per_batch: int = 0
    options: Mapping[str, str] | None = None

    @classmethod
    def parse(cls, text: str, **values: Any) -> Source:
        """
        Read `kind:place`.

        Raises:
            ConfigError: It is none.
        """
        kind, colon, place = text.partition(":")
        if not colon or kind not in KINDS or not place:
            message = f"source is not allowed: got {text!r}, kind:place with one of {', '.join(KINDS)}; correct --from"
            raise ConfigError(message)
        source = cls(kind, place, **values)
        if source.changes and kind not in {"delta", "table"}:
            message = (
                f"source has no change feed: got {text!r} with --changes, allowed with delta and table; leave it out"
            )
            raise ConfigError(message)
        return source


@dataclass(frozen=True, slots=True)
class Columns:
    """
    Which columns make a message.

    Attributes:
        value: One column that is the payload; empty for the JSON of *chosen*.
        chosen: Columns of the JSON; none: all.
        key: Column of the key; empty for none.
        queue: Column of the logical queue; empty for none.
        delay: Column of the delay, seconds; empty for none.
        ttl: Column of the time to live, seconds; empty for none.
    """

    value: str = ""
    chosen: tuple[str, ...] = ()
    key: str = ""
    queue: str = ""
    delay: str = ""
    ttl: str = ""

    def arguments(self, frame: DataFrame) -> dict[str, str | Column | None]:
        """
        Return the arguments of a sink for a frame.

        Raises:
            ConfigError: A column does not exist.
        """
        names = [self.value, *self.chosen, self.key, self.queue, self.delay, self.ttl]
        for name in filter(None, names):
            if name not in frame.columns:
                message = f"source has no column {name!r}: got {', '.join(frame.columns)}; name one of these"
                raise ConfigError(message)
        chosen = self.chosen or tuple(name for name in frame.columns if name not in _CHANGE_COLUMNS)
        value = self.value or F.to_json(F.struct(*(F.col(f"`{name}`") for name in chosen)))
        key: str | Column | None = self.key or None
        if key is not None and dict(frame.dtypes)[self.key] not in {"string", "binary"}:
            key = F.col(f"`{self.key}`").cast("string")
        return {
            "value": value, "key": key, "queue": self.queue or None, "delay": self.delay or None,
            "ttl": self.ttl or None,
        }  # fmt: skip


def read_source(spark: SparkSession, source: Source) -> DataFrame:
    """
    Return a source as a stream of rows.

    Raises:
        ConfigError: There is nothing to read.
    """
    reader = spark.readStream
    if source.kind == "kafka":
        options = {"subscribe": source.place, "startingOffsets": "earliest", **(source.options or {})}
        if source.max_per_batch:
            options["maxOffsetsPerTrigger"] = str(source.max_per_batch)
        return reader.format("kafka").options(**options).load().select("key", "value", "partition", "offset")
    if source.max_per_batch:
        reader = reader.option("maxFilesPerTrigger", str(source.max_per_batch))
    if source.kind in _FILES:
        if source.kind == "text":
            return reader.format("text").load(source.place)
        # A stream of files wants its schema said: that of the files that are there holds.
        found = spark.read.format(source.kind)
        found = found.option("header", "true") if source.kind == "csv" else found
        reader = reader.option("header", "true") if source.kind == "csv" else reader
        return reader.format(source.kind).schema(found.load(source.place).schema).load(source.place)
    if source.changes:
        reader = reader.option("readChangeFeed", "true")
    reader = reader.format("delta")
    frame = reader.table(source.place) if source.kind == "table" else reader.load(source.place)
    return frame.filter(F.col("_change_type").isin(*_CHANGES)) if source.changes else frame


class Enqueuer:
    """
    Copies one source into one queue.

    Args:
        spark: The session.
        source: What is copied.
        columns: What a row becomes.
        topic: Name of the queue.
        checkpoint_dir: Where Spark keeps how far it has read; one folder for each sink.
        is_continuous: Whether it runs until stopped; else it ends when all that was there is written.
        restart_limit: How many times in a row a failed query is started again; a batch that is written ends the row.
        sink: Arguments of `exactly_once_sink`: `sink_id`, `bootstrap_servers` and more.

    Attributes:
        rows: Rows written so far.
        restarts: How often the query was started again.
        on_batch: Called with them behind each batch.
    """

    def __init__(
        self,
        spark: SparkSession,
        source: Source,
        columns: Columns,
        topic: str,
        *,
        checkpoint_dir: str,
        is_continuous: bool = True,
        restart_limit: int = RESTART_LIMIT,
        **sink: Any,
    ) -> None:
        """Keep what is needed; `run` does the work."""
        self._spark = spark
        self._source = source
        self._columns = columns
        self._topic = topic
        self._checkpoint_dir = checkpoint_dir
        self._is_continuous = is_continuous
        self._sink = sink
        self._restart_limit = restart_limit
        self._failures_in_a_row = 0
        self._has_written = False
        self._stopping = threading.Event()
        self.rows = 0
        self.restarts = 0
        self.on_batch: Callable[[int], None] = lambda _rows: None

    def stop(self) -> None:
        """Ask `run` to end; a batch that this interrupts is continued by the next run."""
        self._stopping.set()

    def run(self) -> None:
        """
        Copy until stopped, or until all that was there is written.

        Raises:
            ConfigError: A column does not exist or has the wrong type.
            SinkError: A batch must not be written; the message says why.
            TopicError: The queue does not exist.
            FencedError: Another process writes with this sink id.
            KmqError: The query failed more often in a row than *restart_limit* allows.
            Exception: Spark's, where the source cannot be read.
        """
        while not self._stopping.is_set():
            try:
                self._run_once()
            except StreamingQueryException as error:
                if (ours := final_error(text_of(error), is_first=not self._has_written)) is not None:
                    raise ours from error
                if self._stopping.is_set():
                    logger.warning("the query to %s failed while it stopped: %s", self._topic, _cause_of(error))
                    return
                self._failures_in_a_row += 1
                if self._failures_in_a_row > self._restart_limit:
                    message = (
                        f"the query to {self._topic} failed {self._failures_in_a_row} times in a row: got "
                        f"{_cause_of(error)}; correct the cause and run it again, no row is lost or sent twice"
                    )
                    raise KmqError(message) from error
                self._rest(error)
            else:
                return

    def _run_once(self) -> None:
        frame = read_source(self._spark, self._source)
        sink = exactly_once_sink(
            self._topic, on_batch=self._note, **{**self._columns.arguments(frame), **self._sink}
        )  # fmt: skip
        writer = frame.writeStream.foreachBatch(sink).option("checkpointLocation", self._checkpoint_dir)
        writer = writer if self._is_continuous else writer.trigger(availableNow=True)
        query = writer.queryName(f"kmq enqueue {self._topic}").start()
        while not query.awaitTermination(POLL_S):
            if self._stopping.is_set():
                query.stop()

    def _rest(self, error: StreamingQueryException) -> None:
        backoff_s = restart_backoff_s(self._failures_in_a_row)
        self.restarts += 1
        logger.warning(
            "the query to %s failed, starting again in %g s (%d of %d): %s",
            self._topic, backoff_s, self._failures_in_a_row, self._restart_limit, _cause_of(error),
            extra={"action": "restart", "queue": self._topic},
        )  # fmt: skip
        self._stopping.wait(backoff_s)

    def _note(self, written: int) -> None:
        self._failures_in_a_row, self._has_written = 0, True
        self.rows += written
        self.on_batch(self.rows)


_FINAL: tuple[type[KmqError], ...] = (SinkError, ConfigError, FencedError)
"""Errors of a batch that a repetition does not correct."""


def final_error(text: str, *, is_first: bool) -> KmqError | None:
    """
    Return our own error that Spark raised as text, if a repetition does not correct it; None for any other one.

    Args:
        text: What Spark raised.
        is_first: Whether no batch is written yet.
    """
    name, _, what = (_last_of_ours(text) or "").partition(": ")
    for kind in (*_FINAL, TopicError) if is_first else _FINAL:
        if name == kind.__name__:
            return SinkError(what) if kind is ConfigError else kind(what)
    return None


def _cause_of(error: StreamingQueryException) -> str:
    """Return the line that names the cause: our own error's, else the first one."""
    return _last_of_ours(text_of(error)) or one_line(error)


def _last_of_ours(text: str) -> str | None:
    """Return name and message of the last of our own errors in a traceback: the ones above it are its causes."""
    prefix = f"{KmqError.__module__}."
    found = [line.partition(prefix)[2].strip() for line in text.splitlines() if prefix in line]
    return found[-1] if found else None
