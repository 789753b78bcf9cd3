"""`kmq tracker status`: show whether the tracker of a queue runs, and its progress."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import typer

from kmq_spark.cli.queue import Name
from kmq_spark.cli.shared.common import EXIT_UNHEALTHY, command
from kmq_spark.cli.shared.looking import inspector_of, reading
from kmq_spark.cli.shared.options import Connection
from kmq_spark.cli.shared.output import Output, OutputForm, print_rows, shown, table
from kmq_spark.cli.tracker import app
from kmq_spark.inspection.spans import counted, span

if TYPE_CHECKING:
    from kmq_spark.inspection.facts import TrackerFacts


@command(app, "status")
def status(
    name: Name,
    connection: Connection,
    output: Output = OutputForm.TABLE,
) -> None:
    """
    Show whether the tracker runs, and what it has read of each markers partition.

    Exit code 3: it does not run (unless it was stopped and nothing is overdue), or it is late.
    """
    from kmq_spark.inspection.findings import TRACKER_LATE_MS
    from kmq_spark.inspection.liveness import Life, life_of

    settings = connection.settings()
    with inspector_of(name, settings) as inspector:
        with reading(name) as on_progress:
            views = inspector.refresh(on_progress)
        (markers,) = inspector.cluster.topics([inspector.topics.markers_topic]).values()
        tracker = inspector.tracker(markers)
    now_ms = int(time.time() * 1000)
    overdue = sum(view.overdue(now_ms) for view in views.values())
    life = life_of(tracker, now_ms)
    rows = [
        {
            "partition": partition,
            "next": tracker.positions.get(partition),
            "end": markers.end[partition],
            "needed": tracker.needed.get(partition),
            "in_flight": view.state.in_flight.message_count,
            "unreadable": view.state.counters.unreadable,
            "signed_by": tracker.last_committers.get(partition, ""),
            "state": life.value,
            "heartbeat_at_ms": tracker.heartbeat_at_ms,
            "overdue": view.overdue(now_ms),
        }
        for partition, view in views.items()
    ]
    print_rows(output, rows, lambda: table(_HEADS, [_cells(row) for row in rows]))
    late_ms = 0 if tracker.unread_since_ms is None else now_ms - tracker.unread_since_ms
    is_down = life in {Life.NEVER, Life.LOST} or (life is Life.STOPPED and overdue > 0)
    is_late = late_ms > TRACKER_LATE_MS or is_down
    if output is OutputForm.TABLE:
        typer.echo(_summary(name, tracker, overdue, late_ms, now_ms))
    if is_late:
        raise typer.Exit(EXIT_UNHEALTHY)


_HEADS = (">PARTITION", ">NEXT", ">END", ">NEEDED", ">IN FLIGHT", ">UNREADABLE", "SIGNED BY")


def _cells(row: dict[str, Any]) -> list[str]:
    shown_columns = ("partition", "next", "end", "needed", "in_flight", "unreadable", "signed_by")
    return ["-" if row[name] is None or row[name] == "" else shown(str(row[name])) for name in shown_columns]


def _summary(name: str, tracker: TrackerFacts, overdue: int, late_ms: int, now_ms: int) -> str:
    from kmq_spark.inspection.liveness import describe

    if not tracker.positions:
        return f"no tracker of {name} has ever committed; run `kmq tracker run {name}`"
    state = describe(tracker, overdue, now_ms)
    if tracker.unread_since_ms is None:
        return f"{state}; has read all markers" if state else "has read all markers"
    markers = counted(tracker.unread, "marker")
    unread = f"{markers} not read, the oldest for {span(late_ms)}; `kmq doctor {name}` says more"
    return f"{state}; {unread}" if state else unread
