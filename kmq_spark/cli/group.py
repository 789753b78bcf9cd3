"""`kmq group`: coordination groups: show them, pause them, and set their positions."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kmq_spark.cli.doctor import print_findings
from kmq_spark.cli.shared.common import EXIT_FAILED, EXIT_UNHEALTHY, command, counting, quiet_client
from kmq_spark.cli.shared.options import Connection, seconds
from kmq_spark.cli.shared.output import (
    Output,
    OutputForm,
    json_bytes,
    print_data,
    print_object,
    print_rows,
    rendered,
    shown,
    table,
)
from kmq_spark.errors import ConfigError
from kmq_spark.inspection.spans import counted, instant, span

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kmq_spark.coordination import Coordinator, GroupView
    from kmq_spark.inspection.findings import Finding
    from kmq_spark.inspection.groups import GroupState

app = typer.Typer(help="Coordination groups: members, claims, tasks, positions.", no_args_is_help=True)

Group = Annotated[str, typer.Argument(help="Name of the coordination group.", metavar="GROUP")]

MAX_PAYLOAD_SHOWN = 60
"""Bytes of a payload or of metadata in a table; JSON has all of it."""

MOST_NAMED = 5
"""Held resources that a line names."""

KNOWN_S = 75.0
"""Longest time until the world of a group is known: where its leader is dead, longer than the longest T."""


@dataclass(frozen=True)
class GroupConnection(Connection):
    """Options for the broker and the coordination topic."""

    topic: Annotated[str, typer.Option("--topic", help="The coordination topic.")] = "kmq.coordination"


@command(app, "init")
def init(
    connection: GroupConnection,
    partitions: Annotated[int, typer.Option(help="Of a new topic; they cannot be changed later.")] = 8,
    replication_factor: Annotated[int, typer.Option(help="Copies; -1 = the broker's default.")] = -1,
    retention: Annotated[
        str, typer.Option(help="How long records are kept: 90s, 10m, 2h, 1d; at least 1m.", metavar="DURATION")
    ] = "1h",
) -> None:
    """Create the coordination topic where it does not exist, and check it."""
    from kmq_spark.coordination import create_coordination_topic

    quiet_client()
    create_coordination_topic(
        topic=connection.topic,
        partitions=partitions,
        replication_factor=replication_factor,
        retention=seconds(retention, "--retention"),
        **connection.reach(),
    )
    typer.echo(f"coordination topic {connection.topic} is set up correctly")


@command(app, "list")
def list_(connection: GroupConnection, output: Output = OutputForm.TABLE) -> None:
    """List the groups: members, what they hold, tasks, leader, and whether the group is paused."""
    found = read(connection)
    if not found and output is OutputForm.TABLE:
        typer.echo(f"no group has a record in {connection.topic}", err=True)
        return
    rows = [_group_row(state, now_ms()) for state in found]
    print_rows(output, rows, lambda: table(_GROUP_HEADS, [_group_cells(row) for row in rows]))


@command(app, "describe")
def describe(group: Group, connection: GroupConnection, output: Output = OutputForm.TABLE) -> None:
    """
    Show a group: its members, tasks and resources, what is wrong with it, and each repair.

    Exit code 3: an operator must act.
    """
    from kmq_spark.inspection.cluster import Cluster
    from kmq_spark.inspection.findings import is_unhealthy
    from kmq_spark.inspection.group_findings import check_group, check_topic

    quiet_client()
    cluster = Cluster(**connection.reach())
    (topic,) = cluster.topics([connection.topic]).values()
    found = check_topic(topic, cluster.facts().broker_count)
    if is_unhealthy(found):
        # No process can join such a topic, and the times of its records mean nothing.
        if output is OutputForm.TABLE:
            print_findings(found)
        else:
            print_data(output, [asdict(finding) for finding in found])
        raise typer.Exit(EXIT_UNHEALTHY)
    # Before the log is read: a member must not be silent for as long as that takes.
    at_ms = now_ms()
    state = one(group, connection)
    found += check_group(state, topic, at_ms)
    if output is OutputForm.TABLE:
        _print(state, found, at_ms)
    else:
        whole = {
            **_group_row(state, at_ms),
            "resources": [{"resource": name, **each._asdict()} for name, each in sorted(state.world.resources.items())],
            "member_rows": member_rows(state, at_ms),
            "task_rows": task_rows(state),
            "findings": [asdict(finding) for finding in found],
        }
        print_object(output, whole)
    if is_unhealthy(found):
        raise typer.Exit(EXIT_UNHEALTHY)


@command(app, "pause")
def pause(
    group: Group,
    connection: GroupConnection,
    duration: Annotated[
        str | None,
        typer.Option("--for", help="How long at most: 90s, 10m, 2h, 1d; at most 7d.", metavar="DURATION"),
    ] = None,
    end: Annotated[bool, typer.Option("--end", help="End the pause now.")] = False,
    output: Output = OutputForm.TABLE,
) -> None:
    """Pause a group: no claim is granted and none renewed. Holders stop; a pause ends by itself, or with --end."""
    if (duration is None) != end:
        message = f"give a duration or --end: got --for {duration} and end={end}; expected is one of the two"
        raise ConfigError(message)
    duration_s = seconds(duration or "0", "--for")
    with _operating(group, connection) as operator:
        if end:
            operator.resume()
        else:
            operator.pause(duration_s)
            # Members release when they read the pause; the claims of a member that does not react lapse after 2T.
            operator.wait_for(lambda view: not _held(view), 3 * operator.view().heartbeat)
        view = operator.view()
        until_ms, held = view.paused_until_ms or None, _held(view)
        if output is not OutputForm.TABLE:
            print_object(output, {"group": group, "paused_until_ms": until_ms, "held": held})
        elif end:
            typer.echo(f"group {group} is not paused any more")
        else:
            typer.echo(f"group {group} is paused until {instant(until_ms)}")
            typer.echo(f"{_named(held)} still held" if held else "nothing is held")


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
        message = f"give a position or --forget: got --to {to} and forget={forget}; expected is one of the two"
        raise ConfigError(message)
    with _operating(group, connection) as operator:
        before = operator.view().resources
        if execute:
            for resource in resources:
                operator.set_position(resource, to)
        view = operator.view()
        old = [before[name].position if name in before else None for name in resources]
        rows = [
            {"resource": name, "old": position, "new": to, "is_written": execute}
            for name, position in zip(resources, old, strict=True)
        ]
        cells = [(shown(name), _number(position), _number(to)) for name, position in zip(resources, old, strict=True)]
        print_rows(output, rows, lambda: table(("RESOURCE", ">OLD", ">NEW"), cells))
        if output is OutputForm.TABLE:
            typer.echo("\n" + _next_step(group, view, is_written=execute))


def read(connection: GroupConnection, group: str = "") -> list[GroupState]:
    """Return the groups in the topic, or only one."""
    from kmq_spark.inspection.groups import read_groups

    quiet_client()
    with counting(connection.topic, "records") as show:
        return read_groups(topic=connection.topic, group=group, on_progress=show, **connection.reach())


def one(group: str, connection: GroupConnection) -> GroupState:
    """Return a group; end the command with exit code 1 if the topic has no record of it."""
    found = read(connection, group)
    if not found:
        raise _unknown(group, connection)
    return found[0]


def now_ms() -> int:
    """Return epoch milliseconds of this host's clock."""
    return int(time.time() * 1000)


def member_rows(state: GroupState, at_ms: int) -> list[dict[str, Any]]:
    """Return the members of a group as JSON values, by client id; *at_ms* is for the age of the last heartbeats."""
    world = state.world
    return [
        {
            "client_id": name,
            "instance": member.instance,
            "joined_at": member.joined_at,
            "is_leader": name == world.leader,
            "is_draining": member.is_draining,
            "is_stale": state.is_stale(member, at_ms),
            "silent_ms": state.silent_ms(member, at_ms),
            "held": sorted(world.held.get(name, ())),
            "tasks": sorted(task for task, each in world.tasks.items() if each.client_id == name),
            **json_bytes("metadata", member.metadata),
        }
        for name, member in sorted(world.members.items())
    ]


def task_rows(state: GroupState) -> list[dict[str, Any]]:
    """Return the tasks of a group as JSON values, by name: assigned member, holder of the claim, epoch, position."""
    rows = []
    for name, task in sorted(state.world.tasks.items()):
        claim = state.world.resources.get(name)
        rows.append(
            {
                "task": name,
                "assigned_to": task.client_id or None,
                "held_by": (claim.holder or None) if claim else None,
                "epoch": claim.epoch if claim and claim.holder else None,
                "position": claim.position if claim else None,
                **json_bytes("payload", task.payload),
            }
        )
    return rows


@contextmanager
def following(group: str, topic: str, **client_arguments: Any) -> Iterator[Coordinator]:  # of any kind
    """Follow a group without being a member."""
    from kmq_spark.coordination import Coordinator

    quiet_client()
    observer = Coordinator(group, topic=topic, **client_arguments)
    try:
        observer.watch(KNOWN_S)
        yield observer
    finally:
        observer.close()


@contextmanager
def _operating(group: str, connection: GroupConnection) -> Iterator[Coordinator]:
    """Follow a group that exists; end the command with exit code 1 where the topic has no record of it."""
    with following(group, connection.topic, **connection.reach()) as operator:
        view = operator.view()
        if not (view.members or view.resources or view.tasks or view.paused_until_ms):
            raise _unknown(group, connection)
        yield operator


def _unknown(group: str, connection: GroupConnection) -> typer.Exit:
    typer.echo(f"kmq: no group {group!r} in {connection.topic}; `kmq group list` shows the groups", err=True)
    return typer.Exit(EXIT_FAILED)


_GROUP_HEADS = ("GROUP", "STATE", ">MEMBERS", ">STALE", ">HELD", ">TASKS", "LEADER", ">T", ">GENERATION")


def _group_row(state: GroupState, at_ms: int) -> dict[str, Any]:
    world = state.world
    stale = [member for member in world.members.values() if state.is_stale(member, at_ms)]
    # A pause whose end has passed is over with the next record of the partition.
    is_paused = world.paused_until_ms > at_ms
    return {
        "group": state.group,
        "state": "paused" if is_paused else "active" if len(world.members) > len(stale) else "empty",
        "members": len(world.members),
        "stale": len(stale),
        "held": sum(bool(resource.holder) for resource in world.resources.values()),
        "tasks": len(world.tasks),
        "leader": world.leader or None,
        "heartbeat_ms": world.heartbeat_ms,
        "generation": world.generation,
        "partition": state.partition,
        "paused_until_ms": world.paused_until_ms if is_paused else None,
        "last_record_at_ms": world.newest_append_ms,
        "is_complete": state.is_complete,
        "ignored": state.ignored,
        "fault": state.fault or None,
    }


def _group_cells(row: dict[str, Any]) -> tuple[str, ...]:
    counts = (str(row[name]) for name in ("members", "stale", "held", "tasks"))
    leader = shown(row["leader"] or "-")
    state = row["state"] if row["is_complete"] else f"{row['state']}?"
    return (row["group"], state, *counts, leader, span(row["heartbeat_ms"]), _number(row["generation"]))


_MEMBER_HEADS = ("MEMBER", "STATE", ">LAST HEARTBEAT", ">HELD", ">TASKS", ">JOINED AT", "METADATA…")
_TASK_HEADS = ("TASK", "ASSIGNED TO", "HELD BY", ">EPOCH", ">POSITION", "PAYLOAD…")
_RESOURCE_HEADS = ("RESOURCE", "HOLDER", ">EPOCH", ">POSITION")


def _print(state: GroupState, found: list[Finding], at_ms: int) -> None:
    """Print everything about a group; resources that are tasks among the tasks."""
    typer.echo(rendered(table(("", ""), _description(state, at_ms))).lstrip("\n"))
    members = [_member_cells(row) for row in member_rows(state, at_ms)]
    tasks = [_task_cells(row) for row in task_rows(state)]
    resources = [
        (shown(name), shown(each.holder or "-"), _number(each.epoch), _number(each.position))
        for name, each in sorted(state.world.resources.items())
        if name not in state.world.tasks
    ]
    for heads, cells in ((_MEMBER_HEADS, members), (_TASK_HEADS, tasks), (_RESOURCE_HEADS, resources)):
        if cells:
            typer.echo("\n" + rendered(table(heads, cells)))
    print_findings(found, "\n")


def _description(state: GroupState, at_ms: int) -> list[tuple[str, str]]:
    row = _group_row(state, at_ms)
    lines = [
        ("group", f"{row['group']}, partition {row['partition']}"),
        ("state", row["state"] + (f" until {instant(row['paused_until_ms'])}" if row["paused_until_ms"] else "")),
        ("T", f"{span(row['heartbeat_ms'])}; a member is stale after {span(state.world.stale_after_ms)}"),
        ("generation", _number(row["generation"])),
        ("last record", instant(row["last_record_at_ms"])),
    ]
    if row["ignored"]:
        lines.append(("ignored", ", ".join(f"{count} {reason}" for reason, count in row["ignored"].items())))
    return lines


def state_of(row: dict[str, Any]) -> list[str]:
    """Return what is to be said of a member, in words."""
    names = (("leader", "is_leader"), ("draining", "is_draining"), ("stale", "is_stale"))
    return [word for word, name in names if row[name]]


def _member_cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        shown(row["client_id"]),
        ", ".join(state_of(row)) or "member",
        span(row["silent_ms"]),
        str(len(row["held"])),
        str(len(row["tasks"])),
        str(row["joined_at"]),
        _bytes_cell(row, "metadata"),
    )


def _task_cells(row: dict[str, Any]) -> tuple[str, ...]:
    members = (shown(row[name] or "-") for name in ("assigned_to", "held_by"))
    numbers = (_number(row["epoch"]), _number(row["position"]))
    return (shown(row["task"]), *members, *numbers, _bytes_cell(row, "payload"))


def _bytes_cell(row: dict[str, Any], name: str) -> str:
    text = f"0x{row[f'{name}_hex']}" if f"{name}_hex" in row else shown(row[name]) or "-"
    return text if len(text) <= MAX_PAYLOAD_SHOWN else f"{text[:MAX_PAYLOAD_SHOWN]}…"


def _number(number: int | None) -> str:
    return "-" if number is None or number < 0 else str(number)


def _held(view: GroupView) -> list[str]:
    return [name for name, resource in view.resources.items() if resource.holder]


def _named(names: list[str]) -> str:
    more = ", …" if len(names) > MOST_NAMED else ""
    verb = "is" if len(names) == 1 else "are"
    return f"{counted(len(names), 'resource')} ({', '.join(map(shown, names[:MOST_NAMED]))}{more}) {verb}"


def _next_step(group: str, view: GroupView, *, is_written: bool) -> str:
    if is_written:
        return f"written; the group goes on with: kmq group pause {group} --end"
    said = "dry run, nothing was written"
    if not view.paused_until_ms:
        return f"{said}; pause the group first: kmq group pause {group} --for 10m"
    if held := _held(view):
        return f"{said}; {_named(held)} still held, wait until nothing is"
    return f"{said}; to write it: --execute"
