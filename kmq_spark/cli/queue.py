"""`kmq queue`: create, alter and check a queue."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kmq_spark.cli.queue_rules import Execute, ExpectVersion, RuleOptions, alter_rules, as_table
from kmq_spark.cli.shared.common import command, counting, inspector_of
from kmq_spark.cli.shared.options import Connection
from kmq_spark.cli.shared.output import Output, OutputForm, print_object, print_rows, shown
from kmq_spark.inspection.spans import counted, span

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kmq_spark.inspection.facts import QueueView

app = typer.Typer(help="Queues: their topics.", no_args_is_help=True)

NEW_PARTITIONS = 4

Name = Annotated[str, typer.Argument(help="Name of the queue and its topic, or queue@subscription.", metavar="QUEUE")]


@command(app, "create")
def create(
    name: Name,
    connection: Connection,
    rules: RuleOptions,
    partitions: Annotated[
        int | None,
        typer.Option(
            help=f"Partitions of each topic; default: {NEW_PARTITIONS}, or those of the queue where it exists."
        ),
    ] = None,
    replication_factor: Annotated[int, typer.Option(help="Copies; -1 = the broker's default.")] = -1,
) -> None:
    """
    Make the queue, markers, dead-letter, redrive and producers topics where they do not exist, and check them.

    A new queue gets rules, which its tracker and consumers follow: those named here, else 12 deliveries and a backoff
    that grows from a second to ten minutes.
    """
    from kmq_spark.kafka.queue_rules import create_queue, read_rules

    settings = connection.settings()
    layout = create_queue(
        name,
        partitions=NEW_PARTITIONS if partitions is None else partitions,
        is_exact=partitions is not None,
        rules=rules.given(),
        replication_factor=replication_factor,
        **settings.kafka.reach(),
    )
    stored = read_rules(name, **settings.kafka.reach())
    topics = layout.topics
    own = () if topics.subscription else (topics.producers_topic,)
    names = ", ".join((*topics.all_topics, topics.redrive_topic, *own))
    typer.echo(f"queue {name}: {names}, {counted(layout.partition_count, 'partition')}")
    if stored is not None:
        typer.echo(f"rules {stored.text}")


@command(app, "alter")
def alter(
    name: Name,
    connection: Connection,
    rules: RuleOptions,
    execute: Execute = False,
    expect_version: ExpectVersion = None,
    output: Output = OutputForm.TABLE,
) -> None:
    """Change the rules of a queue; without --execute only show the change. A running tracker follows within seconds."""
    rows = alter_rules(name, rules, connection.settings(), execute=execute, expect_version=expect_version)
    print_rows(output, rows, lambda: as_table(rows))
    if output is OutputForm.TABLE:
        version = rows[0]["new"]
        typer.echo(
            f"\nversion {version} is written"
            if execute
            else f"\ndry run, nothing was written; to write it: --execute --expect-version {version - 1}"
        )


@command(app, "describe")
def describe(
    name: Name,
    connection: Connection,
    output: Output = OutputForm.TABLE,
) -> None:
    """Check the queue's topics, show its rules, and list its consumers with what they hold."""
    from kmq_spark.kafka.queue_rules import read_rules
    from kmq_spark.kafka.topics import check_queue

    layout = check_queue(name, **connection.reach())
    stored = read_rules(name, **connection.reach())
    with inspector_of(name, connection.settings()) as inspector, counting(layout.topics.markers_topic) as on_progress:
        view = inspector.look(on_progress, with_members=True)
    consumers = list(_consumers(view))
    if output is not OutputForm.TABLE:
        # One object, not a list, because there is one queue.
        rules = None if stored is None else stored.to_dict()
        print_object(output, {"queue": name, **asdict(layout), "rules": rules, "consumers": consumers})
        return
    typer.echo(f"queue {name}: {counted(layout.partition_count, 'partition')}, set up correctly")
    typer.echo(f"  queue topic        {layout.topics.queue_topic}  (largest message {layout.max_message_bytes} bytes)")
    typer.echo(f"  markers topic      {layout.topics.markers_topic}  (kept for {layout.retention_ms} ms)")
    letters = counted(layout.dead_letter_partition_count, "partition")
    typer.echo(f"  dead-letter topic  {layout.topics.dead_letter_topic}  ({letters})")
    made = counted(layout.redrive_partition_count, "partition") if layout.redrive_partition_count else "not made yet"
    typer.echo(f"  redrive topic      {layout.topics.redrive_topic}  ({made})")
    said = "none of its own: the defaults apply" if stored is None else stored.text
    typer.echo(f"  rules              {said}")
    typer.echo(f"  consumers          {len(consumers) or 'none'}")
    for each in consumers:
        of = f" of logical queue {shown(each['logical_queue'])}" if each["logical_queue"] else ""
        held = counted(each["held"], "message") + (f" for {span(each['held_ms'])}" if each["held"] else "")
        typer.echo(f"    {shown(each['id'])}{of}: {counted(each['partitions'], 'partition')}, holds {held}")


def _consumers(view: QueueView) -> Iterator[dict[str, Any]]:
    """Yield the consumers of a queue, one after the other, with what they hold."""
    holders = view.holders()
    for logical_queue, group in view.groups.items():
        for name, partitions in sorted(group.members.items()):
            held, since_ms = holders.get(name, (0, view.now_ms))
            yield {
                "id": name, "logical_queue": logical_queue, "partitions": len(partitions), "held": held,
                "held_ms": max(0, view.now_ms - since_ms),
            }  # fmt: skip
