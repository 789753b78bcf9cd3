"""
`kmq dlq`: look at dead letters, send them back, end them.

Rule 1: `redrive` and `purge` only tell what they would do, unless `--execute` is given.
Rule 2: what is meant is said: `--id`, filters, or `--all`.
"""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kmq_spark.cli.common import (
    EXIT_FAILED,
    BootstrapServer,
    ClientSetting,
    CommandConfig,
    ConfigFile,
    settings_from,
    told_clearly,
)
from kmq_spark.cli.dlq_view import print_letters, print_summary, print_whole
from kmq_spark.cli.output import Output as Form
from kmq_spark.cli.output import OutputForm
from kmq_spark.config import plain
from kmq_spark.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from kmq_spark.kafka.redrive import RedriveSummary

app = typer.Typer(help="Dead letters: list, show, redrive, purge.", no_args_is_help=True)

LIST_LIMIT = 100
"""What `list` shows unless told otherwise: a screenful or two."""

_AGO = re.compile(r"([0-9]{1,9})(ms|s|m|h|d)")
_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

Name = Annotated[str, typer.Argument(help="Name of the queue, or queue@group.", metavar="QUEUE")]
Ids = Annotated[
    list[str] | None, typer.Option("--id", help="A dead letter, partition:offset; may be repeated.", metavar="P:O")
]
Reason = Annotated[str | None, typer.Option(help="In the reason; with * or ? a pattern of all of it.", metavar="TEXT")]
Key = Annotated[str | None, typer.Option(help="Equal to the message key.", metavar="TEXT")]
Origin = Annotated[str | None, typer.Option(help="Place of the first copy.", metavar="P:O")]
LogicalQueue = Annotated[str | None, typer.Option(help="Equal to the logical queue.", metavar="NAME")]
OlderThan = Annotated[
    str | None, typer.Option(help="Dead for longer: 90s, 15m, 2h, 7d, or before an ISO instant.", metavar="AGO")
]
NewerThan = Annotated[str | None, typer.Option(help="Dead for less, as --older-than.", metavar="AGO")]
Everything = Annotated[bool, typer.Option("--all", help="All open dead letters.")]
Limit = Annotated[int | None, typer.Option(help="Most dead letters, at least 1.", metavar="N")]
Execute = Annotated[bool, typer.Option("--execute", help="Do it; without, only tell what would be done.")]
MaxBytes = Annotated[int, typer.Option(min=1, help="What is shown of a key, a value or a header.", metavar="N")]


@app.command("list")
@told_clearly
def list_(
    name: Name,
    bootstrap_server: BootstrapServer = None,
    config: ConfigFile = None,
    command_config: CommandConfig = None,
    client_settings: ClientSetting = None,
    ids: Ids = None,
    reason: Reason = None,
    key: Key = None,
    origin: Origin = None,
    logical_queue: LogicalQueue = None,
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    limit: Limit = LIST_LIMIT,
    form: Form = OutputForm.TABLE,
    max_bytes: MaxBytes = 256,
) -> None:
    """List the dead letters that are neither redriven nor purged, a partition after the other, oldest first."""
    from kmq_spark.kafka.dead_letters import list_dead_letters  # noqa: PLC0415  # `kmq --help` must not load the client

    where = _filter(reason, key, origin, logical_queue, older_than, newer_than)
    chosen: dict[str, Any] = {"ids": ids or (), "where": where, "limit": limit}
    letters = list_dead_letters(name, **chosen, **_broker(config, bootstrap_server, command_config, client_settings))
    count = print_letters(letters, form, max_bytes)
    if not count and form is OutputForm.TABLE:
        typer.echo(f"no open dead letters of {name}" + (" that fit" if where or ids else ""), err=True)
    if count == limit:
        typer.echo(f"stopped at {limit}; --limit shows more", err=True)


@app.command("show")
@told_clearly
def show(
    name: Name,
    places: Annotated[list[str] | None, typer.Argument(help="Ids, as `list` shows them.", metavar="[P:O]...")] = None,
    bootstrap_server: BootstrapServer = None,
    config: ConfigFile = None,
    command_config: CommandConfig = None,
    client_settings: ClientSetting = None,
    ids: Ids = None,
    form: Form = OutputForm.TABLE,
    max_bytes: MaxBytes = 4096,
) -> None:
    """Show all of a dead letter: reason, attempts, key, value, headers."""
    import json  # noqa: PLC0415  # only here

    from kmq_spark.cli.dlq_view import as_json  # noqa: PLC0415  # only here
    from kmq_spark.kafka.dead_letters import list_dead_letters  # noqa: PLC0415  # `kmq --help` must not load the client

    wanted = [*(places or ()), *(ids or ())]
    if not wanted:
        message = "no dead letter is named: got none, at least one partition:offset; `kmq dlq list` shows the ids"
        raise ConfigError(message)
    broker = _broker(config, bootstrap_server, command_config, client_settings)
    letters = list(list_dead_letters(name, ids=wanted, **broker))
    if form is OutputForm.TABLE:
        for number, letter in enumerate(letters):
            if number:
                typer.echo()
            print_whole(letter, max_bytes)
    else:
        found = [as_json(letter, max_bytes=max_bytes, with_headers=True) for letter in letters]
        lines = [json.dumps(found, indent=2)] if form is OutputForm.JSON else map(json.dumps, found)
        for line in lines:
            typer.echo(line)
    _tell_missing([each for each in dict.fromkeys(wanted) if each not in {letter.id for letter in letters}], name)


@app.command("redrive")
@told_clearly
def redrive_(
    name: Name,
    bootstrap_server: BootstrapServer = None,
    config: ConfigFile = None,
    command_config: CommandConfig = None,
    client_settings: ClientSetting = None,
    ids: Ids = None,
    reason: Reason = None,
    key: Key = None,
    origin: Origin = None,
    logical_queue: LogicalQueue = None,
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    everything: Everything = False,
    limit: Limit = None,
    to: Annotated[str | None, typer.Option(help="Another queue, or queue@group.", metavar="QUEUE")] = None,
    execute: Execute = False,
    form: Form = OutputForm.TABLE,
) -> None:
    """Send dead letters back to their queue, each exactly once; run it again where it was cut short."""
    from kmq_spark.kafka.dead_letters import redrive  # noqa: PLC0415  # `kmq --help` must not load the client
    from kmq_spark.kafka.topics import QueueTopics  # noqa: PLC0415  # as above

    where = _filter(reason, key, origin, logical_queue, older_than, newer_than)
    chosen: dict[str, Any] = {"ids": ids or (), "where": where, "everything": everything, "limit": limit}
    broker = _broker(config, bootstrap_server, command_config, client_settings)
    summary = redrive(name, **chosen, to=to, dry_run=not execute, **broker)
    print_summary(summary, "redrive", f"{QueueTopics.parse(name).dead_letter_topic} to {to or name}", form)
    _tell_missing(summary.missing, name)


@app.command("purge")
@told_clearly
def purge_(
    name: Name,
    bootstrap_server: BootstrapServer = None,
    config: ConfigFile = None,
    command_config: CommandConfig = None,
    client_settings: ClientSetting = None,
    ids: Ids = None,
    reason: Reason = None,
    key: Key = None,
    origin: Origin = None,
    logical_queue: LogicalQueue = None,
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    everything: Everything = False,
    limit: Limit = None,
    execute: Execute = False,
    form: Form = OutputForm.TABLE,
) -> None:
    """End dead letters for good; the broker removes what lies below the lowest open one."""
    from kmq_spark.kafka.dead_letters import purge  # noqa: PLC0415  # `kmq --help` must not load the client
    from kmq_spark.kafka.topics import QueueTopics  # noqa: PLC0415  # as above

    where = _filter(reason, key, origin, logical_queue, older_than, newer_than)
    chosen: dict[str, Any] = {"ids": ids or (), "where": where, "everything": everything, "limit": limit}
    broker = _broker(config, bootstrap_server, command_config, client_settings)
    summary: RedriveSummary = purge(name, **chosen, dry_run=not execute, **broker)
    print_summary(summary, "purge", f"from {QueueTopics.parse(name).dead_letter_topic}", form)
    _tell_missing(summary.missing, name)


def _broker(
    config: Path | None,
    bootstrap_server: str | None,
    command_config: Path | None,
    client_settings: list[str] | None,
) -> dict[str, Any]:
    kafka = settings_from(config, bootstrap_server, command_config, client_settings).kafka
    return {
        "bootstrap_servers": kafka.bootstrap_servers,
        "timeout_ms": kafka.timeout_ms,
        "extra": plain(kafka.extra),
    }


def _filter(
    reason: str | None,
    key: str | None,
    origin: str | None,
    logical_queue: str | None,
    older_than: str | None,
    newer_than: str | None,
) -> dict[str, object] | None:
    """Return the parts that are given, None where none is."""
    parts = {
        "reason": reason,
        "key": key,
        "origin": origin,
        "queue": logical_queue,
        "dead_before": _instant_ms(older_than, "--older-than"),
        "dead_after": _instant_ms(newer_than, "--newer-than"),
    }
    return {name: value for name, value in parts.items() if value is not None} or None


def _instant_ms(text: str | None, option: str) -> int | None:
    """Read `2h` (ago, by this machine's clock) or an ISO instant (UTC where it names no zone) as epoch milliseconds."""
    if text is None:
        return None
    if (ago := _AGO.fullmatch(text)) is not None:
        return max(0, int(time.time() * 1000) - int(ago[1]) * _UNIT_MS[ago[2]])
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        message = f"{option} is not allowed: got {text!r}, 90s, 15m, 2h, 7d or 2026-11-21T04:00; correct it"
        raise ConfigError(message) from None
    return int((at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp() * 1000)


def _tell_missing(missing: list[str], name: str) -> None:
    if missing:
        some = ", ".join(missing[:10]) + ("…" if len(missing) > 10 else "")  # noqa: PLR2004  # a line's worth
        typer.echo(
            f"kmq: no open dead letter of {name}: got {some}; `kmq dlq list {name}` shows what there is", err=True
        )
        raise typer.Exit(EXIT_FAILED)
