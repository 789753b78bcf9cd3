"""
Shared code for output: output forms, escaping, tables.

Rule 1: control characters in text from a message are escaped, never written to the terminal.
Rule 2: a table fits the width of the terminal; in a pipe it may have up to `PIPE_WIDTH` characters. JSON has no width
limit.
Rule 3: a closed pipe ends the command without an error, so this module writes only through `typer.echo`.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from rich.console import RenderableType

PIPE_WIDTH = 200
"""Width of a line in characters if stdout is not a terminal."""

NARROWEST = 40


class OutputForm(StrEnum):
    """The values of `-o`."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"


Output = Annotated[OutputForm, typer.Option("-o", "--output", help="Form of the output.")]


def width() -> int:
    """Return the width of an output line in characters."""
    return max(NARROWEST, shutil.get_terminal_size().columns) if sys.stdout.isatty() else PIPE_WIDTH


def rendered(*parts: RenderableType, columns: int | None = None) -> str:
    """Return tables and texts as text for `typer.echo`; *columns*: width, by default that of the output."""
    text = io.StringIO()
    console = Console(
        file=text, width=columns or width(), highlight=False, markup=False, emoji=False,
        force_terminal=sys.stdout.isatty(),
    )  # fmt: skip
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """
    Return a table without border lines. Text from outside must have been escaped with `shown`.

    `>` before the head marks a column of numbers. `…` after it marks a column that is truncated if there is no room;
    with a number, the column has at most that many characters. All other columns are wrapped.
    """
    made = Table(box=None, pad_edge=False, header_style="")
    for column in columns:
        name, is_cut, widest = column.partition("…")
        is_number = name.startswith(">")
        made.add_column(
            name.removeprefix(">"),
            max_width=int(widest) if widest else None,
            justify="right" if is_number else "left",
            no_wrap=is_number or bool(is_cut),
            overflow="ellipsis" if is_cut else "fold",
        )
    for row in rows:
        made.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return made


def print_rows(form: OutputForm, rows: Sequence[Mapping[str, Any]], as_table: Callable[[], RenderableType]) -> None:
    """Print rows as JSON values, or as the table that *as_table* makes."""
    if form is OutputForm.TABLE:
        typer.echo(rendered(as_table()))
    else:
        print_data(form, rows)


def print_object(form: OutputForm, value: Mapping[str, Any]) -> None:
    """Print one JSON object: indented, or on one line for `jsonl`."""
    typer.echo(json.dumps(value, indent=2 if form is OutputForm.JSON else None))


def print_data(form: OutputForm, rows: Iterable[Mapping[str, Any]]) -> int:
    """Print rows as one JSON document, or as one line each without waiting for the others; return their number."""
    if form is OutputForm.JSON:
        found = list(rows)
        typer.echo(json.dumps(found, indent=2))
        return len(found)
    count = 0
    for count, row in enumerate(rows, 1):  # noqa: B007  # the count is the result
        typer.echo(json.dumps(row))
    return count


def shown(value: bytes | str | None, max_bytes: int = 0) -> str:
    """
    Return bytes or text in a form that is safe for a terminal, at most *max_bytes* (0 = all).

    That is the text if it is UTF-8, with unprintable characters escaped, else hex; `-` for None.
    """
    if value is None:
        return "-"
    text, is_cut = _text_of(value.encode("utf-8", "replace") if isinstance(value, str) else value, max_bytes)
    return "".join(each if each.isprintable() else _escaped(each) for each in text) + ("…" if is_cut else "")


def json_bytes(name: str, value: bytes | None, max_bytes: int = 0) -> dict[str, Any]:
    """Return bytes as `name` if they are UTF-8, else as hex in `<name>_hex`; `<name>_is_cut` if they are truncated."""
    if value is None:
        return {name: None}
    text, is_cut = _text_of(value, max_bytes)
    cut: dict[str, Any] = {f"{name}_is_cut": True} if is_cut else {}
    is_hex = text.startswith("0x") and not value.startswith(b"0x")
    return {f"{name}_hex": text[2:], **cut} if is_hex else {name: text, **cut}


def _text_of(value: bytes, max_bytes: int) -> tuple[str, bool]:
    part = value[:max_bytes] if max_bytes else value
    is_cut = len(part) < len(value)
    for drop in range(4 if is_cut else 1):
        try:  # the cut may be inside a character
            return part[: len(part) - drop].decode("utf-8"), is_cut
        except UnicodeDecodeError:
            continue
    return f"0x{part.hex()}", is_cut


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
