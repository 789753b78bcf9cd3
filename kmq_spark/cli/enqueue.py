"""`kmq enqueue`: copy a table, a topic or files into a queue, one message a row, each exactly once."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kmq_spark.cli.shared.common import one_line_errors, print_json, run_alone, set_up_logs
from kmq_spark.cli.shared.options import Address, DriverMemory, Events, LogLevel, Master, Timeout, settings_from
from kmq_spark.cli.tracker import SUBMITTED_MARKS, StopOnSignals, log_level_of, stop_session
from kmq_spark.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kmq_spark.config import Settings
    from kmq_spark.sink.enqueue import Enqueuer


@dataclass(frozen=True)
class ColumnOptions:
    """What a row becomes."""

    value: Annotated[str, typer.Option(help="Column of the payload; default: JSON of --columns.", metavar="COLUMN")] = (
        ""
    )
    columns: Annotated[
        str, typer.Option(help="Columns of the JSON, comma-separated; default: all.", metavar="COLUMNS")
    ] = ""
    key: Annotated[str, typer.Option(help="Column of the key.", metavar="COLUMN")] = ""
    logical_queue: Annotated[str, typer.Option(help="Column of the logical queue.", metavar="COLUMN")] = ""
    delay: Annotated[str, typer.Option(help="Column of the delay, seconds.", metavar="COLUMN")] = ""
    ttl: Annotated[str, typer.Option(help="Column of the time to live, seconds.", metavar="COLUMN")] = ""


@one_line_errors
def enqueue(
    name: Annotated[str, typer.Argument(help="Name of the queue.", metavar="QUEUE")],
    address: Address,
    columns: ColumnOptions,
    source: Annotated[
        str,
        typer.Option("--from", help="delta:DIR, table:NAME, kafka:TOPIC, json:DIR, csv:, parquet: or text:DIR."),
    ],
    sink_id: Annotated[str, typer.Option(help="Name under which this copy continues after a restart.", metavar="ID")],
    checkpoint_dir: Annotated[str, typer.Option(help="Where Spark keeps how far it has read.", metavar="PATH")],
    changes: Annotated[bool, typer.Option("--changes", help="Read a Delta table's change feed.")] = False,
    trigger: Annotated[str, typer.Option(help="processing-time or available-now.")] = "processing-time",
    slots: Annotated[int, typer.Option(help="Parts of a batch; stays what it was first.", min=1, max=1000)] = 8,
    max_per_batch: Annotated[int, typer.Option(help="Files, or Kafka records, of a batch; 0 = Spark's.", min=0)] = 0,
    continue_from_batch: Annotated[
        int | None, typer.Option(help="With a new checkpoint: first batch that is written.", min=0, metavar="N")
    ] = None,
    oversize: Annotated[
        str,
        typer.Option(help="A row that is too large: fail, or dead-letter (its beginning).", metavar="fail|dead-letter"),
    ] = "fail",
    restart_limit: Annotated[
        int, typer.Option(help="Starts of a failed query in a row, before the command ends.", min=0, metavar="N")
    ] = 20,
    timeout: Timeout = None,
    master: Master = "local[2]",
    driver_memory: DriverMemory = "1g",
    events: Events = False,
    log_level: LogLevel = "INFO",
) -> None:
    """Copy rows into a queue until SIGTERM or Ctrl+C, or once (available-now); run it again to go on."""
    set_up_logs(log_level_of(log_level))
    if trigger not in {"processing-time", "available-now"}:
        message = f"trigger is not allowed: got {trigger!r}, processing-time or available-now; correct --trigger"
        raise ConfigError(message)
    settings = settings_from(address, timeout)
    from kmq_spark.kafka.topics import check_queue
    from kmq_spark.sink.enqueue import Columns, Enqueuer, Source

    kafka = settings.kafka.reach()
    layout = check_queue(name, **kafka)
    chosen = tuple(filter(None, columns.columns.split(",")))
    wanted = Columns(columns.value, chosen, columns.key, columns.logical_queue, columns.delay, columns.ttl)
    what = Source.parse(source, changes=changes, max_per_batch=max_per_batch, options=_kafka_options(settings))
    signals = StopOnSignals()
    spark = _session(master, driver_memory)
    try:
        _prepare(spark, checkpoint_dir)
        limit = {"max_message_bytes": layout.max_message_bytes - ROOM_BYTES} if layout.max_message_bytes else {}
        enqueuer = Enqueuer(
            spark, what, wanted, name, checkpoint_dir=checkpoint_dir, is_continuous=trigger == "processing-time",
            restart_limit=restart_limit, sink_id=sink_id, slots=slots, continue_from_batch=continue_from_batch,
            oversize=oversize, **kafka, **limit,
        )  # fmt: skip
        signals.attach(enqueuer)
        _run(enqueuer, name, events=events)
    finally:
        stop_session(spark)


ROOM_BYTES = 16 * 1024
"""What a queue topic has beyond the largest message, for the headers of redeliveries."""


def _run(enqueuer: Enqueuer, name: str, *, events: bool) -> None:
    def show(rows: int) -> None:
        sys.stderr.write(f"\r\033[Kenqueued {rows:,} rows to {name}")
        sys.stderr.flush()

    if sys.stderr.isatty():
        enqueuer.on_batch = show
    if events:
        print_json({"event": "ready", "queue": name})
    enqueuer.run()
    if events:
        print_json({"event": "ended", "queue": name, "rows": enqueuer.rows})
    else:
        sys.stderr.write(f"\nkmq: {enqueuer.rows} rows enqueued to {name}\n")


def _kafka_options(settings: Settings) -> dict[str, str]:
    from kmq_spark.config import plain

    return {
        **{f"kafka.{key}": value for key, value in plain(settings.kafka.spark_extra).items()},
        "kafka.bootstrap.servers": settings.kafka.bootstrap_servers,
        "kafka.isolation.level": "read_committed",
    }


def _session(master: str, driver_memory: str) -> SparkSession:
    # Loaded here: the other commands must not wait for Spark to load.
    from kmq_spark.local.jars import jar_paths
    from kmq_spark.spark.session import build_session, delta_settings, session_settings

    if SUBMITTED_MARKS & os.environ.keys():
        return build_session("kmq-enqueue", settings=delta_settings(is_local=False))
    settings = session_settings(jar_paths("spark"), driver_memory) | delta_settings()
    return build_session("kmq-enqueue", master=master, settings=settings)


def _prepare(spark: SparkSession, checkpoint_dir: str) -> None:
    from kmq_spark.spark.session import local_checkpoint_settings

    for key, value in local_checkpoint_settings(checkpoint_dir, spark).items():
        spark.conf.set(key, value)


def run_submitted() -> None:
    """Run with the arguments of `kmq enqueue`: for `jobs/enqueue.py` and Databricks wheel tasks."""
    run_alone(enqueue)
