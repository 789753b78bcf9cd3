"""
Print dead letters as a table, as lines of text or as JSON.

Rule 1: control characters in text from a message are escaped, never written to the terminal.
Rule 2: JSON names are those of `DeadLetter`. A key or value that is not UTF-8 is written as hex under another name.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

from kmq_spark.cli.shared.output import OutputForm, json_bytes, print_data, rendered, shown, table
from kmq_spark.inspection.spans import counted, instant

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kmq_spark.dlq.redrive import RedriveSummary
    from kmq_spark.wire.dead_letter import DeadLetter


def as_json(letter: DeadLetter, *, max_bytes: int, with_headers: bool) -> dict[str, Any]:
    """Return a dead letter as a JSON object."""
    found: dict[str, Any] = {
        "id": letter.id,
        "partition": letter.partition,
        "offset": letter.offset,
        "origin": _origin(letter),
        "queue": letter.queue or None,
        "reason": letter.reason,
        "delivery_count": letter.delivery_count,
        "first_sent_ms": letter.first_sent_ms,
        "attempts_ms": list(letter.attempts_ms),
        "dead_at_ms": letter.dead_at_ms,
        "problem": letter.problem or None,
        **json_bytes("key", letter.key, max_bytes),
        **json_bytes("value", letter.value, max_bytes),
        "value_bytes": len(letter.value) if letter.value is not None else None,
    }
    if with_headers:
        found["headers"] = [{"name": name, **json_bytes("value", value, max_bytes)} for name, value in letter.headers]
    return found


def print_letters(letters: Iterable[DeadLetter], form: OutputForm, max_bytes: int) -> int:
    """Print a list of dead letters; return their number."""
    if form is not OutputForm.TABLE:
        return print_data(form, (as_json(each, max_bytes=max_bytes, with_headers=False) for each in letters))
    if found := [_cells(each) for each in letters]:
        typer.echo(rendered(table(("ID…", "DEAD AT…", "ORIGIN…", ">DELIVERIES", "KEY…24", "REASON"), found)))
    return len(found)


def _cells(letter: DeadLetter) -> tuple[str, ...]:
    return (
        letter.id,
        instant(letter.dead_at_ms),
        _origin(letter) or "-",
        str(letter.delivery_count),
        shown(letter.key),
        shown(letter.reason or letter.problem),
    )


def _origin(letter: DeadLetter) -> str | None:
    return None if letter.origin is None else letter.origin.text


def print_whole(letter: DeadLetter, max_bytes: int) -> None:
    """Print all information of a dead letter, one fact a line."""
    typer.echo(f"dead letter    {letter.id}")
    typer.echo(f"reason         {shown(letter.reason)}")
    if letter.problem:
        typer.echo(f"cannot redrive {shown(letter.problem)}")
    typer.echo(f"origin         {_origin(letter) or '-'}")
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
    Print what a redrive or purge did or would do.

    Args:
        summary: Result of the redrive or purge.
        what: `redrive` or `purge`.
        topics: Text that names source and target.
        form: Output form.
    """
    if form is not OutputForm.TABLE:
        names = ("done", "by_reason", "done_before", "left", "left_because", "missing", "transactions", "is_dry_run")
        typer.echo(json.dumps({name: getattr(summary, name) for name in names}))
        return
    done = {"redrive": "redriven", "purge": "purged"}[what]
    said = f"would {what}" if summary.is_dry_run else done
    typer.echo(f"{said} {counted(summary.done, 'dead letter')}, {topics}")
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
