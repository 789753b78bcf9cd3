"""`kmq message show`: show the history of one message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kmq_spark.cli.shared.common import EXIT_FAILED, command
from kmq_spark.cli.shared.looking import inspector_of, reading
from kmq_spark.cli.shared.options import Connection, QueueName
from kmq_spark.cli.shared.output import Output, OutputForm, json_bytes, print_rows, rendered, shown, table
from kmq_spark.core.markers import MessageId
from kmq_spark.errors import ConfigError
from kmq_spark.inspection.history import merge_renewals
from kmq_spark.inspection.spans import instant

if TYPE_CHECKING:
    from rich.table import Table

    from kmq_spark.inspection.history import Content, Event

app = typer.Typer(help="One message.", no_args_is_help=True)

SHOWN_BYTES = 1_000


@app.callback()
def _message() -> None:
    """One message."""


@command(app, "show")
def show(
    name: QueueName,
    message_id: Annotated[str, typer.Argument(help="Any copy of it, partition:offset.", metavar="P:O")],
    connection: Connection,
    output: Output = OutputForm.TABLE,
    max_bytes: Annotated[int, typer.Option(help="What is shown of key, value and headers.", min=1)] = SHOWN_BYTES,
) -> None:
    """Show a message's history from its first copy: sent, started, renewed, ended, redelivered, dead, redriven."""
    from kmq_spark.inspection.message_history import MessageHistory

    wanted = MessageId.parse(message_id)
    if wanted is None:
        message = f"message id is not allowed: got {message_id!r}, partition:offset as in 0:42; see `kmq queue peek`"
        raise ConfigError(message)
    settings = connection.settings()
    with inspector_of(name, settings) as inspector, reading(name) as on_progress:
        content, events = MessageHistory(inspector, settings.kafka.timeout, on_progress).read(wanted)
    if not events:
        typer.echo(f"kmq: message {message_id} not found in {name}: it never existed or retention deleted it", err=True)
        raise typer.Exit(EXIT_FAILED)
    rows = [dict(zip(("at_ms", "place", "what", "by"), event, strict=True)) for event in events]
    if output is OutputForm.TABLE:
        typer.echo(_head(message_id, content, max_bytes))
    print_rows(output, rows, lambda: _events(events))


def _head(message_id: str, content: Content | None, max_bytes: int) -> str:
    if content is None:
        return f"message  {message_id}, its payload is gone\n"
    value = content.value
    size = 0 if value is None else len(value)
    lines: list[tuple[str, str]] = [
        ("message", message_id),
        ("key", _cell(content.key, max_bytes)),
        ("value", f"{size} bytes: {_cell(value, max_bytes)}"),
        *((shown(header), _cell(each, max_bytes)) for header, each in content.headers),
    ]
    return rendered(table(("", ""), lines)).lstrip("\n") + "\n"


def _cell(value: Any, max_bytes: int) -> str:  # noqa: ANN401  # bytes, text or none, as the client has it
    found = json_bytes("it", value.encode() if isinstance(value, str) else value, max_bytes)
    cut = "…" if found.get("it_is_cut") else ""
    return (f"0x{found['it_hex']}" if "it_hex" in found else shown(found["it"])) + cut


def _events(events: list[Event]) -> Table:
    return table(
        ("AT", "WHAT", "BY", "WHERE"),
        [
            (instant(at_ms or None), shown(what), shown(by) or "-", shown(place))
            for at_ms, place, what, by in merge_renewals(events)
        ],
    )
