"""
Print rows of the ledger as a table, as one line a column if a row is too wide for the terminal, or as JSON.

Rule 1: control characters in text from a message are escaped, never written to the terminal.
Rule 2: columns that are empty in every row are omitted from a table, but not from JSON.
"""

from __future__ import annotations

import shutil
import sys
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any

import typer

from kmq_spark.cli.shared.output import OutputForm, print_data, shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def print_rows(rows: Sequence[Mapping[str, Any]], form: OutputForm) -> None:
    """
    Print rows to stdout.

    Args:
        rows: Values by column. Instants have a time zone, or are in local time without one, as Spark returns them.
        form: Output form.
    """
    if form is not OutputForm.TABLE:
        print_data(form, map(_plain, rows))
    elif rows:
        typer.echo(_table(rows))
    else:
        typer.echo("no rows")


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _json_value(value) for name, value in row.items()}


def _json_value(value: object) -> object:
    if isinstance(value, datetime):
        return _instant(value)
    if isinstance(value, bytes | bytearray | date):
        return _text(value)
    return [_json_value(each) for each in value] if isinstance(value, list) else value


def _instant(value: datetime) -> str:
    """Format an instant in UTC; an instant without a zone is local time, as Spark returns it."""
    return value.astimezone(UTC).isoformat(" ", "milliseconds").replace("+00:00", "Z")


def _text(value: object) -> str:
    if isinstance(value, datetime):
        return _instant(value)
    if isinstance(value, list):
        return ", ".join(_text(each) for each in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, bytes | bytearray):
        return shown(bytes(value))
    return shown(None if value is None else str(value))


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    names = [name for name in rows[0] if any(row[name] not in (None, "") for row in rows)]
    cells = [[_text(row[name]) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[index]) for line in cells)) for index, name in enumerate(names)]
    is_number = [all(isinstance(row[name], int | float | None) for row in rows) for name in names]
    if sys.stdout.isatty() and sum(widths) + 2 * len(widths) > shutil.get_terminal_size().columns:
        return _upright(names, cells)
    lines = [names, *cells]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in lines
    )


def _upright(names: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Return each row as a block with one line a column."""
    width = max(map(len, names))
    blocks = [
        "\n".join(f"{name.rjust(width)}  {cell}" for name, cell in zip(names, line, strict=True)) for line in cells
    ]
    return "\n\n".join(blocks)
