"""
`kmq dlq`: list, redrive and purge dead letters.

Rule 1: without `--execute`, `redrive` and `purge` only print what they would do.
Rule 2: control characters in text from a message are escaped, never written to the terminal.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kmq_spark.cli.shared.common import EXIT_FAILED, command
from kmq_spark.cli.shared.options import Connection, Execute, QueueName, seconds
from kmq_spark.cli.shared.output import Output as Form
from kmq_spark.cli.shared.output import OutputForm, json_bytes, print_data, rendered, shown, table
from kmq_spark.errors import ConfigError
from kmq_spark.inspection.spans import counted, instant

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kmq_spark.config import Reach
    from kmq_spark.dlq.redrive import RedriveSummary
    from kmq_spark.wire.dead_letter import DeadLetter

app = typer.Typer(help="Dead letters: list, redrive, purge.", no_args_is_help=True)

MAX_SHOWN_IDS = 10

Ids = Annotated[
    list[str] | None, typer.Option("--id", help="A dead letter, partition:offset; may be repeated.", metavar="P:O")
]
Limit = Annotated[int | None, typer.Option(help="Most dead letters, at least 1.", metavar="N")]


@dataclass(frozen=True)
class Wanted:
    """Options that select dead letters by id and by their content."""

    ids: Ids = None
    reason: Annotated[
        str | None, typer.Option(help="In the reason; with * or ? a pattern of all of it.", metavar="TEXT")
    ] = None
    key: Annotated[str | None, typer.Option(help="Equal to the message key.", metavar="TEXT")] = None
    origin: Annotated[str | None, typer.Option(help="Place of the first copy.", metavar="P:O")] = None
    logical_queue: Annotated[str | None, typer.Option(help="Equal to the logical queue.", metavar="NAME")] = None
    older_than: Annotated[
        str | None, typer.Option(help="Dead for longer: 90s, 15m, 2h, 7d, or before an ISO instant.", metavar="AGO")
    ] = None
    newer_than: Annotated[str | None, typer.Option(help="Dead for less, as --older-than.", metavar="AGO")] = None

    def chosen(self) -> dict[str, Any]:
        """Return `ids` and `where` for `list_dead_letters`."""
        from kmq_spark.dlq.filter import DeadLetterFilter

        fields = {
            "reason": self.reason,
            "key": self.key,
            "origin": self.origin,
            "logical_queue": self.logical_queue,
            "dead_before": _instant(self.older_than, "--older-than"),
            "dead_after": _instant(self.newer_than, "--newer-than"),
        }
        is_empty = all(value is None for value in fields.values())
        return {"ids": self.ids or (), "where": None if is_empty else DeadLetterFilter(**fields)}  # type: ignore[arg-type]  # of its field


@dataclass(frozen=True)
class Selection(Wanted):
    """Options that select dead letters to change; selecting all of them needs `--all`."""

    is_all: Annotated[bool, typer.Option("--all", help="All open dead letters.")] = False
    limit: Limit = None


@command(app, "list")
def list_(
    name: QueueName,
    connection: Connection,
    wanted: Wanted,
    limit: Limit = 100,
    form: Form = OutputForm.TABLE,
    max_bytes: Annotated[
        int | None, typer.Option(min=1, help="What is shown of a key, a value or a header.", metavar="N")
    ] = None,
) -> None:
    """
    List the dead letters that are neither redriven nor purged, a partition after the other, oldest first.

    The table ends with the number of all of them, by reason, whatever --limit is. Those named with --id are shown
    whole: reason, attempts, key, value, headers.
    """
    from kmq_spark.dlq.dead_letters import list_dead_letters

    chosen = wanted.chosen()
    is_table = form is OutputForm.TABLE
    # A table ends with the counts of all; rows for programs end at the limit. A limit below 1 is refused there.
    read = None if is_table and limit and limit > 0 else limit
    letters = list_dead_letters(name, **chosen, limit=read, **connection.reach())
    if wanted.ids:
        found = list(letters)
        _print_whole(found, form, max_bytes or 4096)
        _fail_if_missing([each for each in dict.fromkeys(wanted.ids) if each not in {one.id for one in found}], name)
        return
    if is_table:
        _print_letters(letters, name, limit, is_filtered=any(chosen.values()))
    elif print_data(form, (as_json(each, max_bytes or 256) for each in letters)) == limit:
        typer.echo(f"stopped at {limit}; --limit shows more", err=True)


@command(app, "redrive")
def redrive_(
    name: QueueName,
    connection: Connection,
    selection: Selection,
    to: Annotated[str | None, typer.Option(help="Another queue, or queue@subscription.", metavar="QUEUE")] = None,
    execute: Execute = False,
    form: Form = OutputForm.TABLE,
) -> None:
    """Send dead letters back to their queue, each exactly once; run it again where it was cut short."""
    from kmq_spark.dlq.dead_letters import redrive
    from kmq_spark.kafka.queue_topics import QueueTopics

    chosen, reach = selection.chosen(), connection.reach()
    topics = f"{_topic(name)} to {QueueTopics.parse(to or name)}"
    if execute:
        summary = redrive(name, **chosen, all=selection.is_all, limit=selection.limit, to=to, **reach)
    else:
        summary = _preview(name, selection, chosen, reach, is_purge=False)
    said = "redriven" if execute else "would redrive"
    _print_summary(summary, said, topics, form, is_done=execute)
    _fail_if_missing(summary.missing, name)


@command(app, "purge")
def purge_(
    name: QueueName,
    connection: Connection,
    selection: Selection,
    execute: Execute = False,
    form: Form = OutputForm.TABLE,
) -> None:
    """End dead letters for good; the broker removes what lies below the lowest open one."""
    from kmq_spark.dlq.dead_letters import purge

    chosen, reach = selection.chosen(), connection.reach()
    if execute:
        summary = purge(name, **chosen, all=selection.is_all, limit=selection.limit, **reach)
    else:
        summary = _preview(name, selection, chosen, reach, is_purge=True)
    said = "purged" if execute else "would purge"
    _print_summary(summary, said, f"from {_topic(name)}", form, is_done=execute)
    _fail_if_missing(summary.missing, name)


def _preview(
    name: str, selection: Selection, chosen: dict[str, Any], reach: Reach, *, is_purge: bool
) -> RedriveSummary:
    """Return what a redrive or a purge would do; ids that are not open count as missing."""
    from kmq_spark.dlq.dead_letters import list_dead_letters, select
    from kmq_spark.dlq.redrive import RedriveSummary

    select(**chosen, limit=selection.limit, is_all=selection.is_all)
    summary = RedriveSummary()
    found = set()
    for letter in list_dead_letters(name, **chosen, **reach):
        found.add(letter.id)
        if letter.problem and not is_purge:
            summary.leave(letter, letter.problem)
        else:
            summary.count(letter)
        if summary.done == selection.limit:
            break
    else:
        summary.missing = [each for each in dict.fromkeys(chosen["ids"]) if each not in found]
    return summary


def _topic(name: str) -> str:
    from kmq_spark.kafka.queue_topics import QueueTopics

    return QueueTopics.parse(name).dead_letter_topic


def _instant(text: str | None, option: str) -> datetime | None:
    """Parse `2h` (ago, on this machine's clock) or an ISO instant (UTC if it has no zone)."""
    if text is None:
        return None
    with contextlib.suppress(ConfigError):
        return datetime.fromtimestamp(time.time(), UTC) - timedelta(seconds=seconds(text, option))
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        message = f"{option} is not allowed: got {text!r}; expected 90s, 15m, 2h, 7d or 2026-11-21T04:00; correct it"
        raise ConfigError(message) from None
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


def _fail_if_missing(missing: list[str], name: str) -> None:
    if missing:
        some = ", ".join(missing[:MAX_SHOWN_IDS]) + ("…" if len(missing) > MAX_SHOWN_IDS else "")
        typer.echo(
            f"kmq: no open dead letter of {name}: got {some}; `kmq dlq list {name}` shows what there is", err=True
        )
        raise typer.Exit(EXIT_FAILED)


def as_json(letter: DeadLetter, max_bytes: int) -> dict[str, Any]:
    """Return a dead letter as a JSON object; a key or value that is not UTF-8 is hex under another name."""
    return {
        "id": letter.id,
        "partition": letter.partition,
        "offset": letter.offset,
        "origin": _origin(letter),
        "logical_queue": letter.logical_queue or None,
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


def _print_letters(letters: Iterator[DeadLetter], name: str, limit: int | None, *, is_filtered: bool) -> None:
    """Print dead letters as a table up to the limit, then the number of all of them by reason."""
    from kmq_spark.dlq.redrive import RedriveSummary

    summary = RedriveSummary()
    rows = []
    for letter in islice(letters, limit):
        summary.count(letter)
        cells = (letter.id, instant(letter.dead_at_ms), _origin(letter) or "-", str(letter.delivery_count))
        rows.append((*cells, shown(letter.key), shown(letter.reason or letter.problem)))
    if not rows:
        typer.echo(f"no open dead letters of {name}" + (" that match" if is_filtered else ""), err=True)
        return
    typer.echo(rendered(table(("ID…", "DEAD AT…", "ORIGIN…", ">DELIVERIES", "KEY…24", "REASON"), rows)))
    for letter in letters:
        summary.count(letter)
    cut = f", {len(rows)} are shown; --limit shows more" if summary.done > len(rows) else ""
    typer.echo(f"\n{counted(summary.done, 'dead letter')}{cut}")
    _print_reasons(summary)


def _origin(letter: DeadLetter) -> str | None:
    return None if letter.origin is None else letter.origin.text


def _print_whole(letters: list[DeadLetter], form: OutputForm, max_bytes: int) -> None:
    if form is not OutputForm.TABLE:
        with_headers = (
            as_json(letter, max_bytes)
            | {"headers": [{"name": name, **json_bytes("value", value, max_bytes)} for name, value in letter.headers]}
            for letter in letters
        )
        print_data(form, with_headers)
        return
    for letter in letters:
        size = len(letter.value) if letter.value is not None else 0
        facts = [
            ("dead letter", letter.id),
            ("reason", shown(letter.reason)),
            ("cannot redrive", shown(letter.problem)),
            ("origin", _origin(letter) or "-"),
            ("logical queue", shown(letter.logical_queue)),
            ("deliveries", str(letter.delivery_count)),
            ("first sent", instant(letter.first_sent_ms)),
            *(("  sent", instant(at_ms)) for at_ms in letter.attempts_ms),
            ("dead since", instant(letter.dead_at_ms)),
            ("key", shown(letter.key, max_bytes)),
            ("value", f"{size} bytes: {shown(letter.value, max_bytes)}"),
            *((f"{shown(name)} =", shown(value, max_bytes)) for name, value in letter.headers),
        ]
        typer.echo("\n".join(f"{name:<14} {value}" for name, value in facts if value) + "\n")


def _print_summary(summary: RedriveSummary, said: str, topics: str, form: OutputForm, *, is_done: bool) -> None:
    if form is not OutputForm.TABLE:
        names = ("done", "by_reason", "done_before", "left", "left_because", "missing")
        typer.echo(json.dumps({**{name: getattr(summary, name) for name in names}, "is_executed": is_done}))
        return
    typer.echo(f"{said} {counted(summary.done, 'dead letter')}, {topics}")
    _print_reasons(summary)
    if summary.done_before:
        typer.echo(f"done before: {summary.done_before}")
    if summary.left:
        typer.echo(f"left, cannot be redriven: {summary.left}; `kmq dlq purge` can end them")
        for name, why in summary.left_because.items():
            typer.echo(f"  {name:>8}  {shown(why)}")
    if not is_done:
        typer.echo("nothing was written; add --execute to do it")


def _print_reasons(summary: RedriveSummary) -> None:
    for reason, count in sorted(summary.by_reason.items(), key=lambda pair: -pair[1]):
        typer.echo(f"  {count:>8}  {shown(reason) or '(no reason)'}")
