"""`kmq tracker fleet`: show the processes of a fleet and which queue each tracks; take a queue out of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kmq_spark.cli.group import member_rows, now_ms, task_rows
from kmq_spark.cli.shared.common import EXIT_FAILED, EXIT_UNHEALTHY, command
from kmq_spark.cli.shared.looking import counting, quiet_client
from kmq_spark.cli.shared.options import Connection
from kmq_spark.cli.shared.output import Output, OutputForm, print_object, rendered, shown, table
from kmq_spark.cli.tracker import app
from kmq_spark.inspection.spans import instant, span

if TYPE_CHECKING:
    from kmq_spark.config import Settings
    from kmq_spark.inspection.groups import GroupState

LONGEST_KNOWN_S = 75.0
"""Longest time until the fleet's group is known: where its leader is dead, longer than the longest T."""


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
    quiet_client()
    settings = connection.settings()
    if remove is not None:
        _remove(name, remove, settings)
    state = _state(name, settings)
    if state is None:
        typer.echo(f"kmq: no fleet {name!r}; start it with `kmq tracker run --fleet {name} QUEUE`", err=True)
        raise typer.Exit(EXIT_FAILED)
    found = _found(name, state, now_ms())
    if output is OutputForm.TABLE:
        _print(found)
    else:
        print_object(output, found)
    if not found["is_healthy"]:
        raise typer.Exit(EXIT_UNHEALTHY)


def _state(name: str, settings: Settings) -> GroupState | None:
    from kmq_spark.core.coordination.fleet_names import fleet_group
    from kmq_spark.inspection.groups import read_groups

    topic = settings.tracker.coordination_topic
    with counting(topic, "records") as show:
        found = read_groups(topic=topic, group=fleet_group(name), on_progress=show, **settings.kafka.reach())
    return found[0] if found else None


def _remove(name: str, queue: str, settings: Settings) -> None:
    from kmq_spark.coordination import Coordinator
    from kmq_spark.core.coordination.fleet_names import fleet_group

    topic = settings.tracker.coordination_topic
    operator = Coordinator(fleet_group(name), topic=topic, **settings.kafka.reach())
    try:
        operator.watch(LONGEST_KNOWN_S)
        operator.remove_task(queue)
        # Its process stops the tracker and releases the claim.
        wait_s = 10 + 3 * operator.view()["heartbeat_ms"] / 1000
        operator.wait_for(lambda world: not (world["resources"].get(queue) or {}).get("holder"), wait_s)
    finally:
        operator.close()


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
            shown(row["queue"]),
            shown(row["tracked_by"] or "-"),
            instant(row["since_ms"]),
            shown(row["assigned_to"] or "-"),
            "-" if row["epoch"] is None else str(row["epoch"]),
        )
        for row in found["queues"]
    ]
    typer.echo(rendered(table(("QUEUE", "TRACKED BY", "SINCE", "ASSIGNED TO", ">EPOCH"), queues)))
    members = [
        (
            shown(row["client_id"]),
            _state_of(row),
            span(row["silent_ms"]),
            shown(", ".join(row["held"]) or "-"),
            shown(str(row["host"] or "-")),
            shown(str(row["pid"] or "-")),
            shown(str(row["version"] or "-")),
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


def _state_of(row: dict[str, Any]) -> str:
    words = [
        word
        for word, name in (("leader", "is_leader"), ("draining", "is_draining"), ("stale", "is_stale"))
        if row[name]
    ]
    if not row["held"] and not row["is_stale"]:
        words.append("standby")
    return ", ".join(words) or "tracks"
