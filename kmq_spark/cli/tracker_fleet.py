"""`kmq tracker fleet`: show the processes of a fleet and which queue each tracks; take a queue out of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kmq_spark.cli.group import following, member_rows, now_ms, state_of, task_rows
from kmq_spark.cli.shared.common import EXIT_FAILED, EXIT_UNHEALTHY, command, counting, quiet_client
from kmq_spark.cli.shared.options import Connection
from kmq_spark.cli.shared.output import Output, OutputForm, print_object, rendered, shown, table
from kmq_spark.cli.tracker import app
from kmq_spark.core.coordination.records import fleet_group
from kmq_spark.inspection.spans import instant, span

if TYPE_CHECKING:
    from kmq_spark.inspection.groups import GroupState


@command(app, "fleet")
def fleet(
    name: Annotated[str, typer.Argument(help="Name of the fleet.", metavar="FLEET")],
    connection: Connection,
    remove: Annotated[
        str | None, typer.Option("--remove", help="Take this queue out of the fleet.", metavar="QUEUE")
    ] = None,
    output: Output = OutputForm.TABLE,
) -> None:
    """
    Show the processes of a fleet, which queue each tracks, and since when.

    Exit code 3: a queue is tracked by no process. A queue that was removed is added again by the next process that
    names it.
    """
    from kmq_spark.inspection.groups import read_groups

    quiet_client()
    topic, group = connection.settings().tracker.coordination_topic, fleet_group(name)
    if remove is not None:
        with following(group, topic, **connection.reach()) as operator:
            operator.remove_task(remove)
            # Its process stops the tracker and releases the claim.
            operator.wait_for(lambda view: not view.holder(remove), 10 + 3 * operator.view().heartbeat)
    with counting(topic, "records") as show:
        states = read_groups(topic=topic, group=group, on_progress=show, **connection.reach())
    if not states:
        typer.echo(f"kmq: no fleet {name!r}; start it with `kmq tracker run --fleet {name} QUEUE`", err=True)
        raise typer.Exit(EXIT_FAILED)
    found = _found(name, states[0], now_ms())
    if output is OutputForm.TABLE:
        _print(found)
    else:
        print_object(output, found)
    if not found["is_healthy"]:
        raise typer.Exit(EXIT_UNHEALTHY)


def _found(name: str, state: GroupState, at_ms: int) -> dict[str, Any]:
    """Return everything that is shown, as JSON values."""
    members = [{**row, **_about(row.pop("metadata", None))} for row in member_rows(state, at_ms)]
    alive = {row["client_id"] for row in members if not row["is_stale"]}
    queues = [
        {
            "queue": row["task"],
            "tracked_by": row["held_by"],
            "since_ms": state.claimed_at_ms.get(row["task"]) if row["held_by"] else None,
            "assigned_to": row["assigned_to"],
            "epoch": row["epoch"],
            "is_tracked": row["held_by"] in alive,
        }
        for row in task_rows(state)
    ]
    return {
        "fleet": name,
        "leader": state.world.leader or None,
        "generation": state.world.generation,
        "heartbeat_ms": state.world.heartbeat_ms,
        "is_paused": state.world.paused_until_ms > at_ms,
        "queues": queues,
        "members": members,
        "is_healthy": all(row["is_tracked"] for row in queues),
    }


def _about(metadata: str | None) -> dict[str, Any]:
    """Return what a process says of itself; another program may have written anything."""
    try:
        about = json.loads(metadata or "{}")
    except ValueError:
        about = {}
    if not isinstance(about, dict):
        about = {}
    return {key: about.get(key) for key in ("host", "pid", "version", "started_at_ms")}


def _print(found: dict[str, Any]) -> None:
    queues = [
        (
            _cell(row["queue"]),
            _cell(row["tracked_by"]),
            instant(row["since_ms"]),
            *map(_cell, (row["assigned_to"], row["epoch"])),
        )
        for row in found["queues"]
    ]
    typer.echo(rendered(table(("QUEUE", "TRACKED BY", "SINCE", "ASSIGNED TO", ">EPOCH"), queues)))
    members = [
        (
            _cell(row["client_id"]),
            ", ".join(state_of(row) + ([] if row["held"] or row["is_stale"] else ["standby"])) or "tracks",
            span(row["silent_ms"]),
            *map(_cell, (", ".join(row["held"]), row["host"], row["pid"], row["version"])),
        )
        for row in found["members"]
    ]
    heads = ("MEMBER", "STATE", ">LAST HEARTBEAT", "TRACKS", "HOST", ">PID", "VERSION")
    typer.echo("\n" + rendered(table(heads, members)))
    untracked = [row["queue"] for row in found["queues"] if not row["is_tracked"]]
    said = f"tracked by no process: {', '.join(map(shown, untracked))}" if untracked else "every queue is tracked"
    paused = ", the fleet is paused" if found["is_paused"] else ""
    processes = "1 process" if len(found["members"]) == 1 else f"{len(found['members'])} processes"
    typer.echo(f"\n{processes}{paused}; {said}")


def _cell(value: object) -> str:
    return "-" if value in (None, "") else shown(str(value))
