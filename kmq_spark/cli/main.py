"""The `kmq` command with all its subcommands."""

from __future__ import annotations

from typing import Annotated

import typer

from kmq_spark import __version__
from kmq_spark.cli import acls, broker, dlq, doctor, group, ledger, message, producer, queue, top, tracker, worker
from kmq_spark.cli import queue_view as _queue_view  # noqa: F401  # adds its commands to `kmq queue`
from kmq_spark.cli import tracker_fleet as _tracker_fleet  # noqa: F401  # adds its command to `kmq tracker`
from kmq_spark.cli.shared.common import command
from kmq_spark.cli.shared.options import Given, Kmq, note, spread

app = typer.Typer(
    name="kmq",
    cls=Kmq,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain text: rich reads `[tracker]` as markup.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_wanted: bool) -> None:  # noqa: FBT001  # typer calls it with the option's value
    if is_wanted:
        typer.echo(f"kmq {__version__}")
        raise typer.Exit


@app.callback()
@spread
def _kmq(
    shared: Given,
    is_version: Annotated[  # noqa: ARG001  # its callback does everything
        bool, typer.Option("--version", help="Print the version and end.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """
    Message-queue semantics on plain Kafka topics.

    The options of the connection and -h may stand anywhere on the line: `kmq doctor orders --bootstrap-server b:9092`.
    """
    note(shared)


for _name, _app in {
    "queue": queue.app,
    "message": message.app,
    "dlq": dlq.app,
    "producer": producer.app,
    "tracker": tracker.app,
    "group": group.app,
    "ledger": ledger.app,
}.items():
    app.add_typer(_app, name=_name)
_verbs = (message.send, message.receive, worker.worker, top.top, doctor.doctor, acls.acls, broker.up, broker.demo)
for _function in _verbs:
    command(app, _function.__name__)(_function)


def task() -> None:
    """Run as a Databricks wheel task: the platform takes every SystemExit for a failure, so return after success."""
    try:
        app(prog_name="kmq")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise


if __name__ == "__main__":
    app(prog_name="kmq")
