"""
`kmq producer`: the resuming producers of a queue.

Rule 1: `forget` only shows what it would do, unless `--execute` is given.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kmq_spark.cli.shared.common import command, quiet_client
from kmq_spark.cli.shared.options import Connection
from kmq_spark.cli.shared.output import Output, OutputForm, json_bytes, print_object, print_rows, shown, table
from kmq_spark.inspection.spans import span

if TYPE_CHECKING:
    from rich.table import Table

    from kmq_spark.producer.position_log import Found

app = typer.Typer(help="Resuming producers: list, forget.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Name of the queue.", metavar="QUEUE")]

SHOWN_CHARS = 60
"""Of a position in a table; JSON has all of it."""


@command(app, "list")
def list_(name: Name, connection: Connection, output: Output = OutputForm.TABLE) -> None:
    """List the producer ids of a queue: what each has committed, when, and the position of its source."""
    from kmq_spark.producer.registry import list_producers

    quiet_client()
    found = list_producers(name, **connection.reach())
    if not found and output is OutputForm.TABLE:
        typer.echo(f"no producer of {name} has an id", err=True)
        return
    rows = [_row(each) for each in found]
    print_rows(output, rows, lambda: _table(rows))


@command(app, "forget")
def forget(
    name: Name,
    producer_id: Annotated[str, typer.Argument(help="The producer id, as `list` shows it.", metavar="ID")],
    connection: Connection,
    execute: Annotated[
        bool, typer.Option("--execute", help="Do it; without this option, only show what would be done.")
    ] = False,
    output: Output = OutputForm.TABLE,
) -> None:
    """Remove the position of a producer id: its next life begins at the beginning. A running producer is fenced."""
    from kmq_spark.producer.registry import find, forget_producer, list_producers

    quiet_client()
    reach = connection.reach()
    if execute:
        found = forget_producer(name, producer_id, **reach)
    else:
        found = find(list_producers(name, **reach), name, producer_id)
    row = _row(found)
    if output is not OutputForm.TABLE:
        print_object(output, {**row, "is_forgotten": execute})
        return
    print_rows(output, [row], lambda: _table([row]))
    typer.echo(
        f"\n{producer_id} is forgotten: its next life has no position and begins with sequence 1"
        if execute
        else "\nnothing was written; a life after it would send again whatever the source holds; add --execute to do it"
    )


def _row(found: Found) -> dict[str, Any]:
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
        "problem": None,
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    now_ms = int(time.time() * 1000)
    cells = []
    for row in rows:
        if row["problem"]:
            cells.append((shown(row["id"]), "-", "-", "-", "-", shown(row["problem"])))
            continue
        age = span(now_ms - row["committed_at_ms"])
        text = f"0x{row['position_hex']}" if "position_hex" in row else _json(row["position"])
        text = f"{text[:SHOWN_CHARS]}…" if len(text) > SHOWN_CHARS else text
        cells.append((shown(row["id"]), str(row["generation"]), str(row["sequence"]), age, shown(row["by"]), text))
    return table(("ID", ">GENERATION", ">SEQUENCE", "LAST COMMIT", "BY", "POSITION"), cells)


def _json(position: Any) -> str:  # noqa: ANN401  # any JSON
    return "-" if position is None else shown(json.dumps(position, ensure_ascii=False))
