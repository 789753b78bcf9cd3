"""
`kmq dlq`: list, show, redrive and purge dead letters.

Rule 1: without `--execute`, `redrive` and `purge` only print what they would do.
Rule 2: the selection must be explicit: `--id`, filters, or `--all`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from kmq_spark.cli.shared.common import EXIT_FAILED, command
from kmq_spark.cli.shared.options import Connection, QueueName, span_ms
from kmq_spark.cli.shared.output import Output as Form
from kmq_spark.cli.shared.output import OutputForm, print_data
from kmq_spark.cli.views.dlq import as_json, print_letters, print_summary, print_whole
from kmq_spark.errors import ConfigError

app = typer.Typer(help="Dead letters: list, show, redrive, purge.", no_args_is_help=True)

LIST_LIMIT = 100
"""Default limit of `list`: one or two screens."""


Ids = Annotated[
    list[str] | None, typer.Option("--id", help="A dead letter, partition:offset; may be repeated.", metavar="P:O")
]
Limit = Annotated[int | None, typer.Option(help="Most dead letters, at least 1.", metavar="N")]
Execute = Annotated[bool, typer.Option("--execute", help="Do it; without this option, only show what would be done.")]
MaxBytes = Annotated[int, typer.Option(min=1, help="What is shown of a key, a value or a header.", metavar="N")]


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
        """Return arguments for `list_dead_letters`; `where` contains the given filters, None if there are none."""
        parts = {
            "reason": self.reason,
            "key": self.key,
            "origin": self.origin,
            "queue": self.logical_queue,
            "dead_before": _instant_ms(self.older_than, "--older-than"),
            "dead_after": _instant_ms(self.newer_than, "--newer-than"),
        }
        where = {name: value for name, value in parts.items() if value is not None} or None
        return {"ids": self.ids or (), "where": where}


@dataclass(frozen=True)
class Selection(Wanted):
    """Options that select dead letters to change; selecting all of them needs `--all`."""

    everything: Annotated[bool, typer.Option("--all", help="All open dead letters.")] = False
    limit: Limit = None

    def chosen(self) -> dict[str, Any]:
        """Return arguments for `redrive` and `purge`."""
        return {**super().chosen(), "everything": self.everything, "limit": self.limit}


@command(app, "list")
def list_(
    name: QueueName,
    connection: Connection,
    wanted: Wanted,
    limit: Limit = LIST_LIMIT,
    form: Form = OutputForm.TABLE,
    max_bytes: MaxBytes = 256,
) -> None:
    """List the dead letters that are neither redriven nor purged, a partition after the other, oldest first."""
    from kmq_spark.dlq.dead_letters import list_dead_letters

    chosen = wanted.chosen()
    letters = list_dead_letters(name, **chosen, limit=limit, **connection.reach())
    count = print_letters(letters, form, max_bytes)
    if not count and form is OutputForm.TABLE:
        typer.echo(f"no open dead letters of {name}" + (" that match" if any(chosen.values()) else ""), err=True)
    if count == limit:
        typer.echo(f"stopped at {limit}; --limit shows more", err=True)


@command(app, "show")
def show(
    name: QueueName,
    connection: Connection,
    places: Annotated[list[str] | None, typer.Argument(help="Ids, as `list` shows them.", metavar="[P:O]...")] = None,
    ids: Ids = None,
    form: Form = OutputForm.TABLE,
    max_bytes: MaxBytes = 4096,
) -> None:
    """Show all of a dead letter: reason, attempts, key, value, headers."""
    from kmq_spark.dlq.dead_letters import list_dead_letters

    wanted = [*(places or ()), *(ids or ())]
    if not wanted:
        message = "name at least one dead letter: got none; give its partition:offset, as `kmq dlq list` shows it"
        raise ConfigError(message)
    letters = list(list_dead_letters(name, ids=wanted, **connection.reach()))
    if form is OutputForm.TABLE:
        for number, letter in enumerate(letters):
            if number:
                typer.echo()
            print_whole(letter, max_bytes)
    else:
        print_data(form, [as_json(letter, max_bytes=max_bytes, with_headers=True) for letter in letters])
    _fail_if_missing([each for each in dict.fromkeys(wanted) if each not in {letter.id for letter in letters}], name)


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

    summary = redrive(name, **selection.chosen(), to=to, dry_run=not execute, **connection.reach())
    print_summary(summary, "redrive", f"{_topic(name)} to {to or name}", form)
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

    summary = purge(name, **selection.chosen(), dry_run=not execute, **connection.reach())
    print_summary(summary, "purge", f"from {_topic(name)}", form)
    _fail_if_missing(summary.missing, name)


def _topic(name: str) -> str:
    from kmq_spark.kafka.queue_topics import QueueTopics

    return QueueTopics.parse(name).dead_letter_topic


def _instant_ms(text: str | None, option: str) -> int | None:
    """Parse `2h` (ago, on this machine's clock) or an ISO instant (UTC if it has no zone) to epoch milliseconds."""
    if text is None:
        return None
    if (ago_ms := span_ms(text)) is not None:
        return max(0, int(time.time() * 1000) - ago_ms)
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        message = f"{option} is not allowed: got {text!r}, allowed are 90s, 15m, 2h, 7d or 2026-11-21T04:00; correct it"
        raise ConfigError(message) from None
    return int((at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp() * 1000)


def _fail_if_missing(missing: list[str], name: str) -> None:
    if missing:
        some = ", ".join(missing[:10]) + ("…" if len(missing) > 10 else "")  # noqa: PLR2004  # a line's worth
        typer.echo(
            f"kmq: no open dead letter of {name}: got {some}; `kmq dlq list {name}` shows what there is", err=True
        )
        raise typer.Exit(EXIT_FAILED)
