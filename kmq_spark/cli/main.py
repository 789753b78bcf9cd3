"""The `kmq` command, put together from its nouns."""

from __future__ import annotations

import typer

from kmq_spark.cli import broker, demo, dlq, failpoints, ledger, queue, tracker
from kmq_spark.cli.one_line import OneLineGroup

app = typer.Typer(
    name="kmq",
    cls=OneLineGroup,
    help="Message-queue semantics on plain Kafka topics.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(queue.app, name="queue")
app.add_typer(tracker.app, name="tracker")
app.add_typer(dlq.app, name="dlq")
app.add_typer(ledger.app, name="ledger")
app.command("up")(broker.up)
app.command("demo")(demo.demo)
app.command("failpoints")(failpoints.failpoints)


if __name__ == "__main__":
    app(prog_name="kmq")
