"""The `kmq` command with all its subcommands."""

from __future__ import annotations

from typing import Annotated

import typer

from kmq_spark import __version__
from kmq_spark.cli import (
    acls,
    broker,
    demo,
    dlq,
    doctor,
    group,
    ledger,
    message,
    pipes,
    producer,
    queue,
    top,
    tracker,
)
from kmq_spark.cli import queue_view as _queue_view  # noqa: F401  # adds its commands to `kmq queue`
from kmq_spark.cli import tracker_fleet as _tracker_fleet  # noqa: F401  # adds its command to `kmq tracker`
from kmq_spark.cli import tracker_once as _tracker_once  # noqa: F401  # as above
from kmq_spark.cli import tracker_status as _tracker_status  # noqa: F401  # adds its command to `kmq tracker`
from kmq_spark.cli.shared.one_line import HELP_OPTIONS, OneLineGroup

app = typer.Typer(
    name="kmq",
    cls=OneLineGroup,
    help="Message-queue semantics on plain Kafka topics.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings=HELP_OPTIONS,
)


def _print_version(is_wanted: bool) -> None:  # noqa: FBT001  # typer calls it with the option's value
    if is_wanted:
        typer.echo(f"kmq {__version__}")
        raise typer.Exit


@app.callback()
def _kmq(
    is_version: Annotated[  # its callback does everything
        bool, typer.Option("--version", help="Print the version and end.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Message-queue semantics on plain Kafka topics."""


app.add_typer(queue.app, name="queue")
app.add_typer(tracker.app, name="tracker")
app.add_typer(dlq.app, name="dlq")
app.add_typer(producer.app, name="producer")
app.add_typer(group.app, name="group")
app.add_typer(ledger.app, name="ledger")
app.command("up")(broker.up)
app.command("demo")(demo.demo)
app.add_typer(message.app, name="message")
app.command("send")(pipes.send)
app.command("receive")(pipes.receive)
app.command("acls")(acls.acls)
app.command("doctor")(doctor.doctor)
app.command("top")(top.top)


if __name__ == "__main__":
    app(prog_name="kmq")
