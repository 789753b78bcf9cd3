"""
`kmq ledger`: write, query and maintain the ledger.

Rule 1: Spark writes and maintains the ledger. A ledger in a local folder is read without Spark, because starting a JVM
takes half a minute.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kmq_spark.cli.shared.common import command, print_json, run_alone, set_up_logs
from kmq_spark.cli.shared.options import (
    Address,
    ConfigFile,
    DriverMemory,
    Events,
    LogLevel,
    Master,
    Timeout,
    settings_from,
)
from kmq_spark.cli.shared.output import Output, OutputForm
from kmq_spark.cli.tracker import SUBMITTED_MARKS, StopOnSignals, log_level_of, stop_session
from kmq_spark.cli.views.ledger import print_rows
from kmq_spark.core.markers import MessageId
from kmq_spark.errors import ConfigError
from kmq_spark.inspection.spans import counted
from kmq_spark.ledger.queries import known_view
from kmq_spark.ledger.schema import Location

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from kmq_spark.config import Settings

app = typer.Typer(help="The ledger: every message's life in Delta tables.", no_args_is_help=True)

LedgerDir = Annotated[str | None, typer.Option(help="Folder of the ledger.", metavar="PATH")]
Catalog = Annotated[str | None, typer.Option(help="catalog.schema in place of a folder.", metavar="NAME")]


class Engine(StrEnum):
    """The engine that reads a ledger."""

    DUCKDB = "duckdb"
    SPARK = "spark"


MASTER, DRIVER_MEMORY = "local[2]", "1g"


@command(app, "run")
def run(
    address: Address,
    queues: Annotated[
        list[str] | None,
        typer.Argument(
            help="Queues, or queue@subscription; default: those of [ledger], else of [tracker].", metavar="QUEUE"
        ),
    ] = None,
    ledger_dir: LedgerDir = None,
    catalog: Catalog = None,
    checkpoint_dir: Annotated[str | None, typer.Option(help="Where Spark keeps how far it has read.")] = None,
    coordination: Annotated[
        bool | None, typer.Option("--coordination", help="Also who owned what: groups and fleets.", show_default=False)
    ] = None,
    trigger: Annotated[str | None, typer.Option(help="processing-time or available-now.")] = None,
    master: Master = MASTER,
    driver_memory: DriverMemory = DRIVER_MEMORY,
    timeout: Timeout = None,
    events: Events = False,
    log_level: LogLevel = "INFO",
) -> None:
    """Write what happens in queues to Delta tables until SIGTERM or Ctrl+C, or once (available-now)."""
    set_up_logs(log_level_of(log_level))
    settings = settings_from(
        address,
        timeout,
        ledger={
            **_place(ledger_dir, catalog),
            "checkpoint_dir": checkpoint_dir,
            "coordination": coordination,
            "trigger": trigger,
            "queues": tuple(queues) if queues else None,
        },
    )
    names = _queues(settings)
    signals = StopOnSignals()
    spark = _session(master, driver_memory)
    try:
        _run(spark, names, settings, signals, events=events)
    finally:
        stop_session(spark)


@command(app, "show")
def show(
    view: Annotated[str, typer.Argument(help="deliveries, message_story, slowest_handlers, …", metavar="VIEW")],
    config: ConfigFile = None,
    ledger_dir: LedgerDir = None,
    catalog: Catalog = None,
    queue: Annotated[str, typer.Option(help="Only this queue, or queue@subscription.", metavar="QUEUE")] = "",
    message: Annotated[
        str, typer.Option(help="Of message_story: any copy, partition:offset; needs --queue.", metavar="P:O")
    ] = "",
    limit: Annotated[int, typer.Option(min=1, help="Most rows.", metavar="N")] = 20,
    form: Output = OutputForm.TABLE,
    engine: Annotated[
        Engine | None, typer.Option(help="duckdb or spark; default: duckdb for a local folder, spark otherwise.")
    ] = None,
    master: Master = MASTER,
    driver_memory: DriverMemory = DRIVER_MEMORY,
) -> None:
    """Ask the ledger: the rows of a view or a table."""
    set_up_logs("WARNING")
    settings = settings_from(Address(config=config), ledger=_place(ledger_dir, catalog))
    known_view(view)
    place = _message_place(view, queue, message)
    location = Location("" if settings.ledger.catalog else settings.ledger.dir, settings.ledger.catalog)
    if engine is None:
        engine = Engine.DUCKDB if location.local_folder is not None else Engine.SPARK
    if engine is Engine.DUCKDB:
        from kmq_spark.ledger.reader import read_rows

        rows = read_rows(location, view, queue=queue, message=place, limit=limit)
    else:
        rows = _read_by_spark(location, view, queue, place, limit, master, driver_memory)
    print_rows(rows, form)


@command(app, "maintain")
def maintain(
    config: ConfigFile = None,
    ledger_dir: LedgerDir = None,
    catalog: Catalog = None,
    keep_days: Annotated[int | None, typer.Option(help="Whole days that stay; 0 = all.", metavar="DAYS")] = None,
    upgrade: Annotated[bool, typer.Option("--upgrade", help="First add the columns of this version.")] = False,
    master: Master = MASTER,
    driver_memory: DriverMemory = DRIVER_MEMORY,
) -> None:
    """Delete days past [ledger] keep_days, compact files, remove files that no row needs."""
    set_up_logs("WARNING")
    settings = settings_from(Address(config=config), ledger={**_place(ledger_dir, catalog), "keep_days": keep_days})
    from kmq_spark import ledger
    from kmq_spark.ledger.service import location_of

    location = location_of(settings.ledger)
    spark = _session(master, driver_memory)
    try:
        if upgrade:
            added = ledger.upgrade_tables(spark, location)
            typer.echo(f"upgraded: {', '.join(added) or 'nothing was missing'}")
        limits = settings.ledger
        for done in ledger.maintain(spark, location, keep_days=limits.keep_days, vacuum_hours=limits.vacuum_hours):
            typer.echo(
                f"{done.table}: {counted(done.deleted_rows, 'row')} of old days deleted, "
                f"{counted(done.compacted_files, 'file')} compacted into {done.into_files}"
            )
    finally:
        stop_session(spark)


def _place(ledger_dir: str | None, catalog: str | None) -> dict[str, str | None]:
    """Return the flags for the ledger's location; `--ledger-dir` takes precedence over a catalog in the settings."""
    if ledger_dir and catalog:
        message = f"the location of the ledger is ambiguous: got --ledger-dir {ledger_dir!r} and --catalog; give one"
        raise ConfigError(message)
    return {"dir": ledger_dir, "catalog": "" if ledger_dir else catalog}


def _queues(settings: Settings) -> tuple[str, ...]:
    """Check names, broker and topics before the JVM, which takes seconds to start and stop; return the queues."""
    from kmq_spark.kafka.topics import check_queue

    queues = settings.ledger.queues or settings.tracker.queues
    if not queues:
        message = "name at least one queue: as an argument, or in [ledger] queues"
        raise ConfigError(message)
    for queue in queues:
        check_queue(queue, **settings.kafka.reach())
    return tuple(dict.fromkeys(queues))


def _message_place(view: str, queue: str, message: str) -> MessageId | None:
    if not message:
        return None
    if view != "message_story" or not queue:
        text = f"--message needs message_story and --queue: got {view!r} and {queue!r}; add what is missing"
        raise ConfigError(text)
    if (place := MessageId.parse(message)) is None:
        text = f"message is not allowed: got {message!r}, partition:offset such as 3:17; correct --message"
        raise ConfigError(text)
    return place


def _session(master: str, driver_memory: str) -> SparkSession:
    # Imported here, so that the other commands do not load Spark.
    from kmq_spark.local.jars import jar_paths
    from kmq_spark.spark.session import build_session, delta_settings, session_settings

    if SUBMITTED_MARKS & os.environ.keys():
        return build_session("kmq-ledger", settings=delta_settings(is_local=False))
    settings = session_settings(jar_paths("spark"), driver_memory) | delta_settings()
    with _stdout_as_stderr():
        return build_session("kmq-ledger", master=master, settings=settings)


@contextmanager
def _stdout_as_stderr() -> Iterator[None]:
    """Redirect stdout to stderr for a JVM that is started in this context, because VACUUM prints to stdout."""
    sys.stdout.flush()
    ours = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(ours, 1)
        os.close(ours)


def _read_by_spark(
    location: Location, view: str, queue: str, place: MessageId | None, limit: int, master: str, driver_memory: str
) -> list[dict[str, Any]]:
    from kmq_spark import ledger

    spark = _session(master, driver_memory)
    try:
        ledger.open_ledger(spark, location.folder, catalog=location.catalog)
        if place is not None:
            # The first three columns are the same in every row of a message's history; `step` only sorts.
            found = ledger.story(spark, queue, *place).drop("queue", "origin_partition", "origin_offset", "step")
        else:
            found = ledger.of_queue(ledger.read_view(spark, view), queue)
        return [row.asDict() for row in found.limit(limit).collect()]
    finally:
        stop_session(spark)


def _run(
    spark: SparkSession, queues: tuple[str, ...], settings: Settings, signals: StopOnSignals, *, events: bool
) -> None:
    from kmq_spark.ledger.service import LedgerService

    service = LedgerService(spark, queues, settings)
    signals.attach(service)
    if events:
        service.on_ready = lambda: print_json({"event": "ready", "queues": list(queues)})
    service.run()
    if events:
        rows = service.rows if service.is_counted else None
        print_json({"event": "ended", "rows": rows, "restarts": service.restarts})
    else:
        counts = ", ".join(f"{counted(count, 'row')} of {table}" for table, count in sorted(service.rows.items()))
        wrote = f"wrote {counts or 'nothing new'}" if service.is_counted else "stopped"
        sys.stderr.write(f"kmq: ledger {service.location}: {wrote}\n")


def run_submitted() -> None:
    """Run with the arguments of `kmq ledger run`, for `jobs/ledger.py` and Databricks wheel tasks."""
    run_alone(run)
