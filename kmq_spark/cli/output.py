"""
What every command that shows something shares: forms of output, escaping, tables.

Rule 1: what came from a message is never given to the terminal as it is: control characters are escaped.
Rule 2: a table fits the terminal; into a pipe it is as wide as it needs to be. JSON has no width.
Rule 3: a pipe whose reader is gone ends the command quietly (`common.told_clearly`), so nothing here writes by itself.
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
"""Characters of a line where nobody's terminal says how wide it is."""

NARROWEST = 40


class OutputForm(StrEnum):
    """What `-o` takes."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"


Output = Annotated[OutputForm, typer.Option("-o", "--output", help="Form of the output.")]


def width() -> int:
    """Return how many characters a line of the output may have."""
    return max(NARROWEST, shutil.get_terminal_size().columns) if sys.stdout.isatty() else PIPE_WIDTH


def rendered(*parts: RenderableType, columns: int | None = None) -> str:
    """
    Return what rich makes of these, as text for `typer.echo`.

    Args:
        parts: Tables, texts.
        columns: Width; the terminal's where None.
    """
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
    Return a table without lines.

    Args:
        columns: Heads; one that begins with `>` is of numbers, one that ends with `…` is cut where there is no room,
            with a number behind it at that many characters in any case; all others are folded.
        rows: Cells; text that came from outside must have been through `shown`.
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
    """
    Print a list in the form that was asked for.

    Args:
        form: As given.
        rows: As JSON can hold them.
        as_table: Makes the table where that is wanted.
    """
    if form is OutputForm.TABLE:
        typer.echo(rendered(as_table()))
    else:
        print_data(form, rows)


def print_data(form: OutputForm, rows: Iterable[Mapping[str, Any]]) -> int:
    """Print rows as JSON: one document, or a line each as they come; return how many."""
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
    Return bytes or text as a terminal may have them.

    Args:
        value: As it came from the log.
        max_bytes: What is shown at most; 0 = all.

    Returns:
        The text where it is UTF-8, hex otherwise; `-` for nothing. Control and other unprintable characters are
        escaped, line breaks too.
    """
    if value is None:
        return "-"
    text, is_cut = _text_of(value.encode("utf-8", "replace") if isinstance(value, str) else value, max_bytes)
    return "".join(each if each.isprintable() else _escaped(each) for each in text) + ("…" if is_cut else "")


def json_bytes(name: str, value: bytes | None, max_bytes: int = 0) -> dict[str, Any]:
    """Return bytes under their name where they are UTF-8, as hex under `<name>_hex` otherwise; told where cut."""
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
        try:  # a cut may go through a character
            return part[: len(part) - drop].decode("utf-8"), is_cut
        except UnicodeDecodeError:
            continue
    return f"0x{part.hex()}", is_cut


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
