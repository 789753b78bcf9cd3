"""`kmq queue`: make and look at a queue's topics."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from kmq_spark.cli.common import told_clearly
from kmq_spark.cli.options import Connection
from kmq_spark.cli.output import Output, OutputForm

app = typer.Typer(help="Queues: their topics.", no_args_is_help=True)

NEW_PARTITIONS = 4

Name = Annotated[str, typer.Argument(help="Name of the queue and its topic, or queue@group.", metavar="QUEUE")]


@app.command("create")
@told_clearly
def create(
    name: Name,
    connection: Connection,
    partitions: Annotated[
        int | None,
        typer.Option(
            help=f"Partitions of each topic; default: {NEW_PARTITIONS}, or those of the queue where it exists."
        ),
    ] = None,
    replication_factor: Annotated[int, typer.Option(help="Copies; -1 = the broker's default.")] = -1,
) -> None:
    """Make the queue, markers, dead-letter and redrive topics where they do not exist, and check them."""
    from kmq_spark.kafka.topics import create_queue  # noqa: PLC0415  # `kmq --help` must not load the client

    layout = create_queue(
        name,
        partitions=NEW_PARTITIONS if partitions is None else partitions,
        is_exact=partitions is not None,
        replication_factor=replication_factor,
        **connection.reach(),
    )
    names = ", ".join((*layout.topics.all_topics, layout.topics.redrive_topic))
    typer.echo(f"queue {name}: {names}, {layout.partition_count} partitions")


@app.command("describe")
@told_clearly
def describe(
    name: Name,
    connection: Connection,
    output: Output = OutputForm.TABLE,
) -> None:
    """Check the queue's topics, and say how each finding is repaired."""
    from kmq_spark.kafka.topics import check_queue  # noqa: PLC0415  # `kmq --help` must not load the client

    layout = check_queue(name, **connection.reach())
    if output is not OutputForm.TABLE:
        # One object, not a list: there is one queue.
        typer.echo(json.dumps({"queue": name, **asdict(layout)}, indent=2 if output is OutputForm.JSON else None))
        return
    typer.echo(f"queue {name}: {layout.partition_count} partitions, set up correctly")
    typer.echo(f"  queue topic        {layout.topics.queue_topic}  (largest message {layout.max_message_bytes} bytes)")
    typer.echo(f"  markers topic      {layout.topics.markers_topic}  (kept for {layout.retention_ms} ms)")
    typer.echo(
        f"  dead-letter topic  {layout.topics.dead_letter_topic}  ({layout.dead_letter_partition_count} partitions)"
    )
    made = f"{layout.redrive_partition_count} partitions" if layout.redrive_partition_count else "not made yet"
    typer.echo(f"  redrive topic      {layout.topics.redrive_topic}  ({made})")
