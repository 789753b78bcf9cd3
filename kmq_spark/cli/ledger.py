"""
`kmq ledger`: write, query and maintain the ledger.

Rule 1: Spark writes and maintains the ledger. It is read without Spark, because starting a JVM takes half a minute.
Rule 2: Control characters in text from a message are escaped, never written to the terminal.
"""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import contextmanager
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kmq_spark.cli.shared.common import StopOnSignals, command, print_json, set_up_logs
from kmq_spark.cli.shared.options import Connection, DriverMemory, Events, Master
from kmq_spark.cli.shared.output import Output, OutputForm, print_data, shown
from kmq_spark.cli.tracker import SUBMITTED_MARKS
from kmq_spark.core.markers import MessageId
from kmq_spark.errors import ConfigError
from kmq_spark.inspection.spans import counted
from kmq_spark.spark.session import stop_session

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyspark.sql import SparkSession

    from kmq_spark.config import Settings

app = typer.Typer(help="The ledger: every message's life in Delta tables.", no_args_is_help=True)

MASTER, DRIVER_MEMORY = "local[2]", "1g"


@command(app, "run")
def run(
    connection: Connection,
    queues: Annotated[
        list[str] | None,
        typer.Argument(help="Queues, or queue@subscription; default: [tracker] queues.", metavar="QUEUE"),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Write what is there, and end.")] = False,
    master: Master = MASTER,
    driver_memory: DriverMemory = DRIVER_MEMORY,
    events: Events = False,
) -> None:
    """Write what happens in queues to the Delta tables of [ledger], until SIGTERM or Ctrl+C."""
    set_up_logs()
    settings = connection.settings(tracker={"queues": tuple(queues) if queues else None})
    names = _queues(settings)
    signals = StopOnSignals()
    with signals.ends_quietly():
        spark = _session(master, driver_memory)
    try:
        _run(spark, names, settings, signals, once=once, events=events)
    finally:
        stop_session(spark)


@command(app, "show")
def show(
    view: Annotated[str, typer.Argument(help="deliveries, message_story, slowest_handlers, …", metavar="VIEW")],
    connection: Connection,
    queue: Annotated[str, typer.Option(help="Only this queue, or queue@subscription.", metavar="QUEUE")] = "",
    message: Annotated[
        str, typer.Option(help="Of message_story: any copy, partition:offset; needs --queue.", metavar="P:O")
    ] = "",
    limit: Annotated[int, typer.Option(min=1, help="Most rows.", metavar="N")] = 20,
    form: Output = OutputForm.TABLE,
) -> None:
    """Ask the ledger: the rows of a view or a table."""
    set_up_logs("WARNING")
    settings = connection.settings()
    place = _message_place(view, queue, message)
    from kmq_spark.ledger.reader import read_rows
    from kmq_spark.ledger.schema import location_of

    rows = read_rows(location_of(settings.ledger), view, queue=queue, message=place, limit=limit)
    if form is not OutputForm.TABLE:
        print_data(form, ({name: _json_value(value) for name, value in row.items()} for row in rows))
    else:
        typer.echo(_table(rows) if rows else "no rows")


@command(app, "maintain")
def maintain(connection: Connection, master: Master = MASTER, driver_memory: DriverMemory = DRIVER_MEMORY) -> None:
    """Delete days past [ledger] keep_days, compact files, remove files that no row needs."""
    set_up_logs("WARNING")
    settings = connection.settings()
    from kmq_spark.ledger.schema import location_of
    from kmq_spark.ledger.tables import maintain as maintain_tables

    location = location_of(settings.ledger)
    spark = _session(master, driver_memory)
    try:
        for done in maintain_tables(spark, location, keep_days=settings.ledger.keep_days):
            typer.echo(
                f"{done.table}: {counted(done.deleted_rows, 'row')} of old days deleted, "
                f"{counted(done.compacted_files, 'file')} compacted into {done.into_files}"
            )
    finally:
        stop_session(spark)


def _queues(settings: Settings) -> tuple[str, ...]:
    """Check names, broker and topics before the JVM, which takes seconds to start and stop; return the queues."""
    from kmq_spark.kafka.topics import check_queue

    queues = settings.tracker.queues
    if not queues:
        message = "name at least one queue: as an argument, or in [tracker] queues"
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
        text = f"message is not allowed: got {message!r}; expected partition:offset such as 3:17; correct --message"
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


def _run(
    spark: SparkSession,
    queues: tuple[str, ...],
    settings: Settings,
    signals: StopOnSignals,
    *,
    once: bool,
    events: bool,
) -> None:
    from kmq_spark.ledger.service import LedgerService

    service = LedgerService(spark, queues, settings, once=once)
    signals.attach(service)
    if events:
        service.on_ready = lambda: print_json({"event": "ready", "queues": list(queues)})
    service.run()
    if events:
        print_json({"event": "ended", "rows": service.rows, "restarts": service.restarts})
    else:
        counts = ", ".join(
            f"{counted(count, 'row')} of {table}" for table, count in sorted((service.rows or {}).items())
        )
        wrote = "stopped" if service.rows is None else f"wrote {counts or 'nothing new'}"
        sys.stderr.write(f"kmq: ledger {service.location}: {wrote}\n")


def _json_value(value: object) -> object:
    if isinstance(value, datetime):
        return _instant(value)
    if isinstance(value, date):
        return value.isoformat()
    return [_json_value(each) for each in value] if isinstance(value, list) else value


def _instant(value: datetime) -> str:
    return value.astimezone(UTC).isoformat(" ", "milliseconds").replace("+00:00", "Z")


def _text(value: object) -> str:
    if isinstance(value, datetime):
        return _instant(value)
    if isinstance(value, list):
        return ", ".join(_text(each) for each in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return shown(None if value is None else str(value))


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as a table without its empty columns, or with one line a column if it is too wide for a terminal."""
    names = [name for name in rows[0] if any(row[name] not in (None, "") for row in rows)]
    cells = [[_text(row[name]) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[index]) for line in cells)) for index, name in enumerate(names)]
    if sys.stdout.isatty() and sum(widths) + 2 * len(widths) > shutil.get_terminal_size().columns:
        width = max(map(len, names))
        return "\n\n".join(
            "\n".join(f"{name.rjust(width)}  {cell}" for name, cell in zip(names, line, strict=True)) for line in cells
        )
    is_number = [all(isinstance(row[name], int | float | None) for row in rows) for name in names]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in [names, *cells]
    )
