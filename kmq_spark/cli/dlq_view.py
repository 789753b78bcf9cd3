"""
How dead letters are shown: a table, lines of text, JSON.

Rule 1: what came from a message is never given to the terminal as it is: control characters are escaped.
Rule 2: JSON names are those of `DeadLetter`; a key or value that is no UTF-8 stands as hex under a name of its own.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kmq_spark.kafka.redrive import RedriveSummary
    from kmq_spark.wire.dead_letter import DeadLetter

PIPE_WIDTH = 200
"""Characters of a line where nobody's terminal says how wide it is."""


class OutputForm(StrEnum):
    """What `-o` takes."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"


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


def instant(at_ms: int | None) -> str:
    """Return epoch milliseconds as people read them, in UTC."""
    if at_ms is None or not 0 <= at_ms < 253_402_300_800_000:  # noqa: PLR2004  # the year 10000
        return "-"
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(" ", "milliseconds").replace("+00:00", "Z")


def as_json(letter: DeadLetter, *, max_bytes: int, with_headers: bool) -> dict[str, Any]:
    """Return a dead letter as a JSON object."""
    found: dict[str, Any] = {
        "id": letter.id,
        "partition": letter.partition,
        "offset": letter.offset,
        "origin": ":".join(map(str, letter.origin)) if letter.origin is not None else None,
        "queue": letter.queue or None,
        "reason": letter.reason,
        "delivery_count": letter.delivery_count,
        "first_sent_ms": letter.first_sent_ms,
        "attempts_ms": list(letter.attempts_ms),
        "dead_at_ms": letter.dead_at_ms,
        "problem": letter.problem or None,
        **_bytes_json("key", letter.key, max_bytes),
        **_bytes_json("value", letter.value, max_bytes),
        "value_bytes": len(letter.value) if letter.value is not None else None,
    }
    if with_headers:
        found["headers"] = [{"name": name, **_bytes_json("value", value, max_bytes)} for name, value in letter.headers]
    return found


def _bytes_json(name: str, value: bytes | None, max_bytes: int) -> dict[str, str | None]:
    if value is None:
        return {name: None}
    text, is_cut = _text_of(value, max_bytes)
    cut: dict[str, Any] = {f"{name}_is_cut": True} if is_cut else {}
    return {f"{name}_hex": text[2:], **cut} if _is_hex(text, value) else {name: text, **cut}


def _is_hex(text: str, value: bytes) -> bool:
    return text.startswith("0x") and not value.startswith(b"0x")


def print_letters(letters: Iterable[DeadLetter], form: OutputForm, max_bytes: int) -> int:
    """Print dead letters as a list; return how many."""
    count = 0
    if form is OutputForm.JSONL:
        for count, letter in enumerate(letters, 1):  # noqa: B007  # the count is the result
            typer.echo(json.dumps(as_json(letter, max_bytes=max_bytes, with_headers=False)))
        return count
    found = list(letters)
    if form is OutputForm.JSON:
        typer.echo(json.dumps([as_json(each, max_bytes=max_bytes, with_headers=False) for each in found], indent=2))
    elif found:
        _console().print(_table(found))
    return len(found)


def _console() -> Console:
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(width=width, highlight=False, markup=False, emoji=False)


def _table(letters: list[DeadLetter]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("ID", no_wrap=True)
    table.add_column("DEAD AT", no_wrap=True)
    table.add_column("ORIGIN", no_wrap=True)
    table.add_column("DELIVERIES", justify="right")
    table.add_column("KEY", max_width=24, no_wrap=True, overflow="ellipsis")
    table.add_column("REASON", overflow="fold")
    for letter in letters:
        origin = ":".join(map(str, letter.origin)) if letter.origin is not None else "-"
        cells = (letter.id, instant(letter.dead_at_ms), origin, str(letter.delivery_count), shown(letter.key))
        table.add_row(*map(Text, cells), Text(shown(letter.reason or letter.problem)))
    return table


def print_whole(letter: DeadLetter, max_bytes: int) -> None:
    """Print everything that a dead letter tells, a fact a line."""
    origin = ":".join(map(str, letter.origin)) if letter.origin is not None else "-"
    typer.echo(f"dead letter    {letter.id}")
    typer.echo(f"reason         {shown(letter.reason)}")
    if letter.problem:
        typer.echo(f"cannot redrive {shown(letter.problem)}")
    typer.echo(f"origin         {origin}")
    if letter.queue:
        typer.echo(f"logical queue  {shown(letter.queue)}")
    typer.echo(f"deliveries     {letter.delivery_count}")
    typer.echo(f"first sent     {instant(letter.first_sent_ms)}")
    for number, at_ms in enumerate(letter.attempts_ms, 1):
        typer.echo(f"  sent         {instant(at_ms)}  ({number} of {len(letter.attempts_ms)})")
    typer.echo(f"dead since     {instant(letter.dead_at_ms)}")
    typer.echo(f"key            {shown(letter.key, max_bytes)}")
    size = len(letter.value) if letter.value is not None else 0
    typer.echo(f"value          {size} bytes: {shown(letter.value, max_bytes)}")
    typer.echo("headers")
    for name, value in letter.headers:
        typer.echo(f"  {shown(name)} = {shown(value, max_bytes)}")


def print_summary(summary: RedriveSummary, what: str, topics: str, form: OutputForm) -> None:
    """
    Print what a redrive or a purge did or would do.

    Args:
        summary: What.
        what: `redrive` or `purge`.
        topics: From where to where.
        form: As given.
    """
    if form is not OutputForm.TABLE:
        names = ("done", "by_reason", "done_before", "left", "left_because", "missing", "transactions", "is_dry_run")
        typer.echo(json.dumps({name: getattr(summary, name) for name in names}))
        return
    done = {"redrive": "redriven", "purge": "purged"}[what]
    said = f"would {what}" if summary.is_dry_run else done
    typer.echo(f"{said} {summary.done} dead letters, {topics}")
    for reason, count in sorted(summary.by_reason.items(), key=lambda pair: -pair[1]):
        typer.echo(f"  {count:>8}  {shown(reason) or '(no reason)'}")
    if summary.done_before:
        typer.echo(f"done before: {summary.done_before}")
    if summary.left:
        typer.echo(f"left, cannot be redriven: {summary.left}; `kmq dlq purge` can end them")
        for name, why in summary.left_because.items():
            typer.echo(f"  {name:>8}  {shown(why)}")
    if summary.is_dry_run:
        typer.echo("nothing was written; add --execute to do it")
