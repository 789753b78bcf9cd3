"""
`kmq producer`: the producers of a queue that have an id.

Rule 1: `forget` only shows what it would do, unless `--execute` is given.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kmq_spark.cli.shared.common import EXIT_FAILED, EXIT_UNHEALTHY, command
from kmq_spark.cli.shared.looking import quiet_client, reading
from kmq_spark.cli.shared.options import Connection
from kmq_spark.cli.shared.output import Output, OutputForm, json_bytes, print_object, print_rows, rendered, shown, table
from kmq_spark.inspection.spans import counted, instant, span

if TYPE_CHECKING:
    from rich.table import Table

    from kmq_spark.producer.position_log import Found
    from kmq_spark.producer.registry import Verification

app = typer.Typer(help="Producers with an id: list, show, forget, verify.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Name of the queue.", metavar="QUEUE")]
ProducerId = Annotated[str, typer.Argument(help="The producer_id, as `list` shows it.", metavar="ID")]
Execute = Annotated[bool, typer.Option("--execute", help="Do it; without this option, only show what would be done.")]

SHOWN_CHARS = 60
"""Of a position in a table; `show` and JSON have all of it."""

MOST_NAMED = 5
"""Holes and repeated sequences that a line names."""


@command(app, "list")
def list_(name: Name, connection: Connection, output: Output = OutputForm.TABLE) -> None:
    """List the producer ids of a queue: what each has committed, when, and the position of its source."""
    from kmq_spark.producer.registry import list_producers

    quiet_client()
    settings = connection.settings()
    found = list_producers(name, **settings.kafka.reach())
    retention_ms = settings.for_queue(name).producer_retention_ms
    if not found and output is OutputForm.TABLE:
        typer.echo(f"no producer of {name} has an id", err=True)
        return
    now_ms = int(time.time() * 1000)
    rows = [_row(each, now_ms, retention_ms) for each in found]
    print_rows(output, rows, lambda: _table(rows, now_ms))


@command(app, "show")
def show(name: Name, producer_id: ProducerId, connection: Connection, output: Output = OutputForm.TABLE) -> None:
    """Show what one producer id has committed, its position as a whole."""
    from kmq_spark.producer.registry import list_producers

    quiet_client()
    settings = connection.settings()
    found = next((each for each in list_producers(name, **settings.kafka.reach()) if each.key == producer_id), None)
    if found is None:
        typer.echo(
            f"kmq: queue {name!r} has no producer {producer_id!r}; `kmq producer list {name}` shows what there is",
            err=True,
        )
        raise typer.Exit(EXIT_FAILED)
    row = _row(found, int(time.time() * 1000), settings.for_queue(name).producer_retention_ms)
    if output is not OutputForm.TABLE:
        print_object(output, row)
        return
    _print_one(row)


@command(app, "forget")
def forget(
    name: Name,
    producer_id: ProducerId,
    connection: Connection,
    execute: Execute = False,
    output: Output = OutputForm.TABLE,
) -> None:
    """Remove the position of a producer id: its next life begins at the beginning. A running producer is fenced."""
    from kmq_spark.producer.registry import forget_producer

    quiet_client()
    settings = connection.settings()
    found = forget_producer(name, producer_id, dry_run=not execute, **settings.kafka.reach())
    row = _row(found, int(time.time() * 1000), settings.for_queue(name).producer_retention_ms)
    if output is not OutputForm.TABLE:
        print_object(output, {**row, "is_forgotten": execute})  # fmt: skip
        return
    _print_one(row)
    typer.echo(
        f"\n{producer_id} is forgotten: its next life has no position and begins with sequence 1"
        if execute
        else "\ndry run, nothing was written; a life after it would send again whatever the source holds; to do it: "
        "--execute"
    )


@command(app, "verify")
def verify(name: Name, producer_id: ProducerId, connection: Connection, output: Output = OutputForm.TABLE) -> None:
    """Read the queue and check a producer's sequence: holes, repeats, order. Exit code 3 where something is wrong."""
    from kmq_spark.producer.registry import verify_producer

    quiet_client()
    with reading(name, "messages") as on_progress:
        found = verify_producer(name, producer_id, on_progress=on_progress, **connection.reach())
    if found.state is None and not found.report.messages:
        typer.echo(
            f"kmq: queue {name!r} has no producer {producer_id!r}, and no message of it; `kmq producer list {name}` "
            "shows what there is",
            err=True,
        )
        raise typer.Exit(EXIT_FAILED)
    if output is OutputForm.TABLE:
        _print_verification(name, producer_id, found)
    else:
        print_object(output, _verification(producer_id, found))
    if not found.is_exact:
        raise typer.Exit(EXIT_UNHEALTHY)


def _row(found: Found, now_ms: int, retention_ms: int) -> dict[str, Any]:
    state = found.state
    if state is None:
        return {"id": found.key, "problem": found.problem}
    position: Any = state.position
    return {
        "id": found.key,
        "generation": state.generation,
        "sequence": state.sequence,
        **(json_bytes("position", position) if isinstance(position, bytes) else {"position": position}),
        "committed_at_ms": state.at_ms,
        "by": state.by,
        "is_unused": now_ms - state.at_ms > retention_ms,
        "problem": None,
    }


def _table(rows: list[dict[str, Any]], now_ms: int) -> Table:
    cells = []
    for row in rows:
        if row["problem"]:
            cells.append((shown(row["id"]), "-", "-", "-", "-", shown(row["problem"])))
            continue
        age = span(now_ms - row["committed_at_ms"]) + (", unused" if row["is_unused"] else "")
        position = _position(row)
        position = f"{position[:SHOWN_CHARS]}…" if len(position) > SHOWN_CHARS else position
        cells.append(
            (shown(row["id"]), str(row["generation"]), str(row["sequence"]), age, shown(row["by"]), position)
        )  # fmt: skip
    return table(("ID", ">GENERATION", ">SEQUENCE", "LAST COMMIT", "BY", "POSITION"), cells)


def _position(row: dict[str, Any]) -> str:
    if "position_hex" in row:
        return f"0x{row['position_hex']}"
    if row["position"] is None:
        return "-"
    return shown(json.dumps(row["position"], ensure_ascii=False))


def _print_one(row: dict[str, Any]) -> None:
    if row["problem"]:
        lines = [("producer", shown(row["id"])), ("problem", shown(row["problem"]))]
    else:
        lines = [
            ("producer", shown(row["id"])),
            ("generation", str(row["generation"])),
            ("sequence", str(row["sequence"])),
            ("last commit", instant(row["committed_at_ms"]) + (", unused" if row["is_unused"] else "")),
            ("by", shown(row["by"])),
            ("position", _position(row)),
        ]
    typer.echo(rendered(table(("", ""), lines)).lstrip("\n"))


def _verification(producer_id: str, found: Verification) -> dict[str, Any]:
    report = found.report
    return {
        "id": producer_id,
        "is_exact": found.is_exact,
        "messages": report.messages,
        "first": report.first,
        "last": report.last,
        "committed": report.committed,
        "missing": report.missing,
        "holes": [list(hole) for hole in report.holes],
        "removed_by_retention": report.removed,
        "repeats": report.repeats,
        "repeated": list(report.repeated),
        "out_of_order": report.out_of_order,
        "beyond_position": found.beyond,
        "generations": [
            {
                "generation": life.generation,
                "first": life.first,
                "last": life.last,
                "messages": life.messages,
                "missing": life.missing,
                "repeats": life.repeats,
            }
            for life in report.generations
        ],
    }


def _print_verification(name: str, producer_id: str, found: Verification) -> None:
    report = found.report
    typer.echo(
        f"producer {producer_id} of {name}: {counted(report.messages, 'message')}, sequence {report.first} to "
        f"{report.last}"
    )
    rows = [
        (
            str(life.generation),
            str(life.first),
            str(life.last),
            str(life.messages),
            str(life.missing),
            str(life.repeats),
        )
        for life in report.generations
    ]
    typer.echo(rendered(table((">GENERATION", ">FIRST", ">LAST", ">MESSAGES", ">MISSING", ">REPEATS"), rows)))
    if found.state is None:
        typer.echo("the id was forgotten: there is no position record to compare with", err=True)
    if report.removed:
        typer.echo(f"{counted(report.removed, 'message')} missing that retention may have removed")
    if found.is_exact:
        typer.echo("no hole, no repeat, in order")
        return
    if report.missing:
        holes = [f"{first}" if first == last else f"{first} to {last}" for first, last in report.holes[:MOST_NAMED]]
        more = ", …" if len(report.holes) > MOST_NAMED else ""
        typer.echo(f"MISSING: {counted(report.missing, 'message')}: {', '.join(holes)}{more}")
    if report.repeats:
        more = ", …" if len(report.repeated) > MOST_NAMED else ""
        typer.echo(
            f"REPEATED: {counted(report.repeats, 'message')}: {', '.join(map(str, report.repeated[:MOST_NAMED]))}{more}"
        )
    if report.out_of_order:
        typer.echo(f"OUT OF ORDER: {counted(report.out_of_order, 'message')} behind a larger sequence of its partition")
    if found.beyond:
        typer.echo(
            f"NOT COMMITTED BY THE ID: {counted(found.beyond, 'message')} with a sequence beyond the position record; "
            "another program writes these headers, or the id was forgotten and used again"
        )
