"""
`kmq group watch | pause | resume | seek`: follow a group, and change it as its operator.

Rule 1: `seek` only shows what it would do, unless `--execute` is given.
Rule 2: the log decides: a command returns when its record was read back, and fails where it changed nothing.
"""

from __future__ import annotations

import queue
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kmq_spark.cli.group import Group, GroupConnection, app, now_ms
from kmq_spark.cli.shared.common import EXIT_FAILED, command, print_json
from kmq_spark.cli.shared.looking import quiet_client
from kmq_spark.cli.shared.options import span_ms
from kmq_spark.cli.shared.output import Output, OutputForm, print_object, print_rows, shown, table
from kmq_spark.errors import ConfigError
from kmq_spark.inspection.spans import counted, instant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kmq_spark.coordination import Coordinator
    from kmq_spark.core.coordination.effects import Effect


MIN_KNOWN_S = 75.0
"""Longest time until the world of a group is known: where its leader is dead, longer than the longest T."""

MOST_NAMED = 5
"""Held resources that a line names."""

_LOOK_S = 0.5


@command(app, "pause")
def pause(
    group: Group,
    connection: GroupConnection,
    duration: Annotated[
        str, typer.Option("--for", help="How long at most: 90s, 10m, 2h, 1d; at most 7d.", metavar="DURATION")
    ],
    output: Output = OutputForm.TABLE,
) -> None:
    """Pause a group: no claim is granted and none renewed. Holders stop; a pause ends by itself."""
    with _operating(group, connection) as operator:
        operator.pause(duration_ms(duration))
        paused_until_ms = operator.view()["paused_until_ms"]
        # Members release when they read the pause; the claims of a member that does not react lapse after 2T.
        operator.wait_for(lambda world: not _held(world), 3 * operator.view()["heartbeat_ms"] / 1000)
        held = _held(operator.view())
        if output is not OutputForm.TABLE:
            print_object(output, {"group": group, "paused_until_ms": paused_until_ms, "held": held})
            return
        typer.echo(f"group {group} is paused until {instant(paused_until_ms)}")
        typer.echo(f"{_named(held)} still held" if held else "nothing is held")


@command(app, "resume")
def resume(group: Group, connection: GroupConnection, output: Output = OutputForm.TABLE) -> None:
    """End the pause of a group."""
    with _operating(group, connection) as operator:
        operator.resume()
        if output is OutputForm.TABLE:
            typer.echo(f"group {group} is not paused any more")
        else:
            print_object(output, {"group": group, "paused_until_ms": None})


@command(app, "seek")
def seek(
    group: Group,
    resources: Annotated[list[str], typer.Argument(help="Resources, such as clicks/3.", metavar="RESOURCE...")],
    connection: GroupConnection,
    to: Annotated[int | None, typer.Option("--to", help="New position: the next one to process.", min=0)] = None,
    forget: Annotated[bool, typer.Option("--forget", help="Remove the position instead.")] = False,
    execute: Annotated[
        bool, typer.Option("--execute", help="Write it; without this option, only show what would change.")
    ] = False,
    output: Output = OutputForm.TABLE,
) -> None:
    """Set the positions of resources, also back. The group must be paused, and nothing of it held."""
    if (to is None) != forget:
        message = f"give a position or --forget: got --to {to} and forget={forget}, allowed is one of the two"
        raise ConfigError(message)
    with _operating(group, connection) as operator:
        before = operator.view()["resources"]
        if execute:
            for resource in resources:
                operator.set_position(resource, to)
        view = operator.view()
        rows = [
            {"resource": name, "old": before.get(name, {}).get("position"), "new": to, "is_written": execute}
            for name in resources
        ]
        print_rows(output, rows, lambda: table(("RESOURCE", ">OLD", ">NEW"), [_cells(row) for row in rows]))
        if output is OutputForm.TABLE:
            typer.echo("\n" + _said(group, view, is_written=execute))


@command(app, "watch")
def watch(group: Group, connection: GroupConnection, output: Output = OutputForm.TABLE) -> None:
    """Print each change of a group as it is read from the log, until Ctrl+C. The group may have no records yet."""
    effects: queue.SimpleQueue[Effect] = queue.SimpleQueue()

    def note(found: Sequence[Effect]) -> None:
        for effect in found:
            effects.put(effect)

    with _following(group, connection, note) as observer:
        typer.echo(f"watching group {group}; Ctrl+C ends it", err=True)
        try:
            while observer.failure is None:
                try:
                    _print_effect(effects.get(timeout=_LOOK_S), output)
                except queue.Empty:
                    continue
        except KeyboardInterrupt:
            return  # Ctrl+C is the usual way to end the command
        raise observer.failure


def duration_ms(text: str) -> int:
    """
    Return a duration in milliseconds.

    Args:
        text: A whole number and a unit: ms, s, m, h or d.

    Raises:
        ConfigError: It is no such duration, or zero.
    """
    if not (duration := span_ms(text.strip())):
        message = f"duration is not allowed: got {text!r}, allowed is a number with ms, s, m, h or d; write 10m"
        raise ConfigError(message)
    return duration


@contextmanager
def _following(
    group: str, connection: GroupConnection, on_change: Callable[[Sequence[Effect]], None] | None = None
) -> Iterator[Coordinator]:
    """Follow a group without being a member."""
    from kmq_spark.coordination import Coordinator

    quiet_client()
    observer = Coordinator(group, topic=connection.topic, on_change=on_change, **connection.reach())
    try:
        observer.watch(MIN_KNOWN_S)
        yield observer
    finally:
        observer.close()


@contextmanager
def _operating(group: str, connection: GroupConnection) -> Iterator[Coordinator]:
    """Follow a group that exists; end the command with exit code 1 where the topic has no record of it."""
    with _following(group, connection) as operator:
        view = operator.view()
        if not any(view[name] for name in ("members", "resources", "tasks")) and not view["paused_until_ms"]:
            typer.echo(
                f"kmq: no group {group!r} in {connection.topic}; `kmq group list` shows the groups", err=True
            )  # fmt: skip
            raise typer.Exit(EXIT_FAILED)
        yield operator


def _held(view: dict[str, Any]) -> list[str]:
    return [name for name, resource in view["resources"].items() if resource["holder"]]


def _named(names: list[str]) -> str:
    more = ", …" if len(names) > MOST_NAMED else ""
    verb = "is" if len(names) == 1 else "are"
    return f"{counted(len(names), 'resource')} ({', '.join(map(shown, names[:MOST_NAMED]))}{more}) {verb}"


def _cells(row: dict[str, Any]) -> tuple[str, str, str]:
    old, new = ("-" if row[name] is None else str(row[name]) for name in ("old", "new"))
    return (shown(row["resource"]), old, new)


def _said(group: str, view: dict[str, Any], *, is_written: bool) -> str:
    if is_written:
        return f"written; the group goes on with: kmq group resume {group}"
    said = "dry run, nothing was written"
    if not view["paused_until_ms"]:
        return f"{said}; pause the group first: kmq group pause {group} --for 10m"
    if held := _held(view):
        return f"{said}; {_named(held)} still held, wait until nothing is"
    return f"{said}; to write it: --execute"


def _print_effect(effect: Effect, output: OutputForm) -> None:
    if output is not OutputForm.TABLE:
        print_json(
            {
                "read_at_ms": now_ms(),
                "change": effect.change.value,
                "client_id": effect.client_id or None,
                "resource": effect.resource or None,
                "epoch": effect.epoch if effect.epoch >= 0 else None,
            }
        )
        return
    words = [time.strftime("%H:%M:%S"), f"{effect.change.value:<16}"]
    words += [shown(word) for word in (effect.client_id, effect.resource) if word]
    if effect.epoch >= 0:
        words.append(f"epoch {effect.epoch}")
    typer.echo(" ".join(words))
