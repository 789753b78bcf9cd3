"""`kmq tracker status`: where the tracker of a queue stands."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import typer

from kmq_spark.cli.common import EXIT_UNHEALTHY, told_clearly
from kmq_spark.cli.looking import inspector_of, reading
from kmq_spark.cli.options import Connection
from kmq_spark.cli.output import Output, OutputForm, print_rows, shown, table
from kmq_spark.cli.queue import Name
from kmq_spark.cli.tracker import app
from kmq_spark.inspection.spans import span

if TYPE_CHECKING:
    from kmq_spark.inspection.facts import TrackerFacts


@app.command("status")
@told_clearly
def status(
    name: Name,
    connection: Connection,
    output: Output = OutputForm.TABLE,
) -> None:
    """Show what the tracker has read of each markers partition, and who it is. Exit code 3: it is late."""
    from kmq_spark.inspection.findings import TRACKER_LATE_MS  # noqa: PLC0415  # `kmq --help` must not wait for numpy

    settings = connection.settings()
    with inspector_of(name, settings) as inspector:
        with reading(name) as told:
            views = inspector.look(told)
        (markers,) = inspector.cluster.topics([inspector.topics.markers_topic]).values()
        tracker = inspector.tracker(markers)
    rows = [
        {
            "partition": partition,
            "next": tracker.positions.get(partition),
            "end": markers.end[partition],
            "needed": tracker.needed.get(partition),
            "in_flight": len(view.state.in_flight),
            "unreadable": view.state.counters.unreadable,
            "signed_by": tracker.signers.get(partition, ""),
        }
        for partition, view in views.items()
    ]
    print_rows(output, rows, lambda: table(_HEADS, [_cells(row) for row in rows]))
    late_ms = 0 if tracker.unread_since_ms is None else int(time.time() * 1000) - tracker.unread_since_ms
    is_late = late_ms > TRACKER_LATE_MS or not tracker.positions
    if output is OutputForm.TABLE:
        typer.echo(_summary(name, tracker, late_ms))
    if is_late:
        raise typer.Exit(EXIT_UNHEALTHY)


_HEADS = (">PARTITION", ">NEXT", ">END", ">NEEDED", ">IN FLIGHT", ">UNREADABLE", "SIGNED BY")


def _cells(row: dict[str, Any]) -> list[str]:
    return ["-" if value is None or value == "" else shown(str(value)) for value in row.values()]


def _summary(name: str, tracker: TrackerFacts, late_ms: int) -> str:
    if not tracker.positions:
        return f"no tracker of {name} has ever committed; run `kmq tracker run {name}`"
    if tracker.unread_since_ms is None:
        return "has read all markers"
    return f"{tracker.unread} markers not read, the oldest for {span(late_ms)}; `kmq doctor {name}` says more"
