"""
`kmq group`: coordination groups: their members, claims, tasks and positions.

Rule 1: the commands of this file only read, except `init`, which creates the topic. `group_control.py` has the others.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kmq_spark.cli.doctor import report
from kmq_spark.cli.shared.common import EXIT_FAILED, command
from kmq_spark.cli.shared.looking import counting, quiet_client
from kmq_spark.cli.shared.options import Connection
from kmq_spark.cli.shared.output import Output, OutputForm, json_bytes, print_object, print_rows, rendered, shown, table
from kmq_spark.errors import KafkaClientError
from kmq_spark.inspection.spans import counted, instant, span

if TYPE_CHECKING:
    from kmq_spark.inspection.findings import Finding
    from kmq_spark.inspection.groups import GroupState

app = typer.Typer(help="Coordination groups: members, claims, tasks, positions.", no_args_is_help=True)

Group = Annotated[str, typer.Argument(help="Name of the coordination group.", metavar="GROUP")]

MAX_PAYLOAD_SHOWN = 60
"""Bytes of a payload or of metadata in a table; JSON has all of it."""


@dataclass(frozen=True)
class GroupConnection(Connection):
    """Options for the broker and the coordination topic."""

    topic: Annotated[str, typer.Option("--topic", help="The coordination topic.")] = "kmq.coordination"


@command(app, "init")
def init(
    connection: GroupConnection,
    partitions: Annotated[int, typer.Option(help="Of a new topic; they cannot be changed later.")] = 8,
    replication_factor: Annotated[int, typer.Option(help="Copies; -1 = the broker's default.")] = -1,
    retention_ms: Annotated[
        int, typer.Option("--retention-ms", help="How long records are kept, at least 60000.", metavar="MS")
    ] = 3_600_000,
) -> None:
    """Create the coordination topic where it does not exist, and check it."""
    from kmq_spark.coordination.topic import create_coordination_topic

    quiet_client()
    create_coordination_topic(
        topic=connection.topic,
        partitions=partitions,
        replication_factor=replication_factor,
        retention_ms=retention_ms,
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
    """Show one group: its state and each resource with holder, epoch and position."""
    state = one(group, connection)
    row = _group_row(state, now_ms())
    resources = [
        {"resource": name, **resource}
        for name, resource in state.world.view()["resources"].items()
    ]  # fmt: skip
    if output is not OutputForm.TABLE:
        members, tasks = member_rows(state, now_ms()), task_rows(state)
        whole = {**row, "resources": resources, "member_rows": members, "task_rows": tasks}
        print_object(output, whole)
        return
    typer.echo(rendered(table(("", ""), _description(state, row))).lstrip("\n"))
    if resources:
        cells = [
            (shown(each["resource"]), shown(each["holder"] or "-"), _number(each["epoch"]), _number(each["position"]))
            for each in resources
        ]
        typer.echo("\n" + rendered(table(("RESOURCE", "HOLDER", ">EPOCH", ">POSITION"), cells)))


@command(app, "members")
def members(group: Group, connection: GroupConnection, output: Output = OutputForm.TABLE) -> None:
    """List the members of a group, with the age of the last heartbeat of each."""
    rows = member_rows(one(group, connection), now_ms())
    if not rows and output is OutputForm.TABLE:
        typer.echo(f"group {group} has no members", err=True)
        return
    print_rows(output, rows, lambda: table(_MEMBER_HEADS, [_member_cells(row) for row in rows]))


@command(app, "tasks")
def tasks(group: Group, connection: GroupConnection, output: Output = OutputForm.TABLE) -> None:
    """List the tasks of a group: to which member each is assigned, and which member runs it."""
    rows = task_rows(one(group, connection))
    if not rows and output is OutputForm.TABLE:
        typer.echo(f"group {group} has no tasks", err=True)
        return
    print_rows(output, rows, lambda: table(_TASK_HEADS, [_task_cells(row) for row in rows]))


@command(app, "doctor")
def doctor(group: Group, connection: GroupConnection, output: Output = OutputForm.TABLE) -> None:
    """Check a group and the coordination topic, and name each repair. Exit code 3: unhealthy."""
    report(_findings(group, connection), output)


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
        typer.echo(
            f"kmq: no group {group!r} in {connection.topic}; `kmq group list` shows the groups", err=True
        )  # fmt: skip
        raise typer.Exit(EXIT_FAILED)
    return found[0]


def _findings(group: str, connection: GroupConnection) -> list[Finding]:
    from kmq_spark.inspection.cluster import Cluster
    from kmq_spark.inspection.findings import broker_finding, is_unhealthy, unreachable_finding
    from kmq_spark.inspection.group_findings import check_group, check_topic

    quiet_client()
    try:
        cluster = Cluster(**connection.reach())
        (topic,) = cluster.topics([connection.topic]).values()
        brokers = cluster.facts()
        found = [broker_finding(brokers), *check_topic(topic, brokers.broker_count)]
        # No process can join such a topic, and the times of its records mean nothing.
        if is_unhealthy(found):
            return found
        # Before the log is read: a member must not be silent for as long as that takes.
        at_ms = now_ms()
        return found + check_group(one(group, connection), topic, at_ms)
    except KafkaClientError as error:
        return [unreachable_finding(error)]


def now_ms() -> int:
    """Return epoch milliseconds of this host's clock."""
    return int(time.time() * 1000)


def member_rows(state: GroupState, at_ms: int) -> list[dict[str, Any]]:
    """
    Return the members of a group as JSON values, by client id.

    Args:
        state: The group.
        at_ms: Epoch milliseconds, for the age of the last heartbeats.
    """
    world = state.world
    return [
        {
            "client_id": member.client_id,
            "instance": member.instance,
            "joined_at": member.joined_at,
            "is_leader": member.client_id == world.leader,
            "is_draining": member.is_draining,
            "is_stale": state.is_stale(member, at_ms),
            "silent_ms": state.silent_ms(member, at_ms),
            "held": sorted(member.held),
            "tasks": sorted(member.tasks),
            **json_bytes("metadata", member.metadata),
        }
        for _, member in sorted(world.members.items())
    ]


def task_rows(state: GroupState) -> list[dict[str, Any]]:
    """Return the tasks of a group as JSON values, by name: assigned member, holder of the claim, epoch, position."""
    world = state.world
    rows = []
    for name, task in sorted(world.tasks.items()):
        claim = world.resources.get(name)
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


def _description(state: GroupState, row: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [
        ("group", f"{row['group']}, partition {row['partition']}"),
        ("state", row["state"] + (f" until {instant(row['paused_until_ms'])}" if row["paused_until_ms"] else "")),
        ("members", counted(row["members"], "member") + (f", {row['stale']} stale" if row["stale"] else "")),
        ("leader", shown(row["leader"] or "-")),
        ("T", f"{span(row['heartbeat_ms'])}; a member is stale after {span(state.world.stale_after_ms)}"),
        ("generation", _number(row["generation"])),
        ("tasks", str(row["tasks"])),
        ("last record", instant(row["last_record_at_ms"])),
    ]
    if row["ignored"]:
        lines.append(("ignored", ", ".join(f"{count} {reason}" for reason, count in row["ignored"].items())))
    if row["fault"]:
        lines.append(("fault", shown(row["fault"])))
    if not row["is_complete"]:
        lines.append(("incomplete", "retention removed records and there is no snapshot behind them yet"))
    return lines


_MEMBER_HEADS = ("MEMBER", "STATE", ">LAST HEARTBEAT", ">HELD", ">TASKS", ">JOINED AT", "METADATA…")


def _member_cells(row: dict[str, Any]) -> tuple[str, ...]:
    words = [word for word, name in (("leader", "is_leader"), ("draining", "is_draining"), ("stale", "is_stale"))
             if row[name]]  # fmt: skip
    return (
        shown(row["client_id"]),
        ", ".join(words) or "member",
        span(row["silent_ms"]),
        str(len(row["held"])),
        str(len(row["tasks"])),
        str(row["joined_at"]),
        _bytes_cell(row, "metadata"),
    )


_TASK_HEADS = ("TASK", "ASSIGNED TO", "HELD BY", ">EPOCH", ">POSITION", "PAYLOAD…")


def _task_cells(row: dict[str, Any]) -> tuple[str, ...]:
    members = (shown(row[name] or "-") for name in ("assigned_to", "held_by"))
    return (
        shown(row["task"]), *members, _number(row["epoch"]), _number(row["position"]), _bytes_cell(row, "payload")
    )  # fmt: skip


def _bytes_cell(row: dict[str, Any], name: str) -> str:
    text = f"0x{row[f'{name}_hex']}" if f"{name}_hex" in row else shown(row[name]) or "-"
    return text if len(text) <= MAX_PAYLOAD_SHOWN else f"{text[:MAX_PAYLOAD_SHOWN]}…"


def _number(number: int | None) -> str:
    return "-" if number is None or number < 0 else str(number)
