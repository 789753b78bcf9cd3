"""`kmq top`: show queues live."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from kmq_spark.cli.shared.common import inspector_of, print_json
from kmq_spark.cli.shared.options import Connection, seconds
from kmq_spark.cli.shared.output import Output, OutputForm, rendered, shown, table, width
from kmq_spark.errors import ConfigError, KmqError
from kmq_spark.inspection.facts import Life
from kmq_spark.inspection.findings import is_tracker_down
from kmq_spark.inspection.spans import span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.table import Table

    from kmq_spark.inspection.facts import QueueView
    from kmq_spark.inspection.inspector import QueueInspector

NARROW = 100
"""Terminal width in characters below which less important figures are omitted."""

WIDE = (
    "QUEUE…", ">READY", ">IN FLIGHT", ">OLDEST", ">OVERDUE", ">DEFERRED", ">ACKED/S", ">REDELIVERED/S", ">DEAD",
    ">TRACKER",
)  # fmt: skip
SLIM = ("QUEUE…", ">READY", ">FLIGHT", ">OVERDUE", ">ACK/S", ">REDEL/S", ">DEAD", ">TRACKER")


@dataclass(frozen=True, slots=True)
class Frame:
    """
    One look at all queues: messages a second since the one before, by queue and counter, and an error of this look.

    A queue that could not be read has its earlier view.
    """

    views: dict[str, QueueView]
    rates: dict[str, dict[str, float]]
    trouble: str = ""


def top(
    queues: Annotated[list[str], typer.Argument(help="Queues, or queue@subscription.", metavar="QUEUE...")],
    connection: Connection,
    output: Output = OutputForm.TABLE,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame and end, after two looks for the rates.")
    ] = False,
    interval: Annotated[str, typer.Option(help="Time between two frames.", metavar="DURATION")] = "2s",
) -> None:
    """
    Show queues live: ready, in flight, oldest, rates, redeliveries, dead letters, tracker lag. Ctrl+C ends it.

    While the broker is not reachable, it reports that, keeps the last figures and tries again.
    """
    settings, interval_s = connection.settings(), seconds(interval, "--interval")
    if repeated := next((queue for queue in queues if queues.count(queue) > 1), ""):
        message = f"queue is given more than once: got {repeated!r}; name it once"
        raise ConfigError(message)
    inspectors = {queue: inspector_of(queue, settings) for queue in queues}
    frames = _frames(inspectors, interval_s)
    try:
        if sys.stdout.isatty() and not once and output is OutputForm.TABLE:
            _live(frames)
        else:
            # A rate needs two looks, so skip the first frame.
            _lines(islice(frames, 1, 2) if once else frames, output)
    except KeyboardInterrupt:
        pass  # Ctrl+C is the usual way to end the command
    finally:
        for inspector in inspectors.values():
            inspector.close()


def _frames(inspectors: dict[str, QueueInspector], interval_s: float) -> Iterator[Frame]:
    """Yield a frame for each look at the queues; only an error of the first one is raised."""
    frame = Frame({}, {})
    for number in count():
        began_s = time.monotonic()
        frame = _next(inspectors, frame, is_first=number == 0)
        yield frame
        time.sleep(max(0.05, interval_s - (time.monotonic() - began_s)))


def _next(inspectors: dict[str, QueueInspector], before: Frame, *, is_first: bool) -> Frame:
    found, rates, trouble = dict(before.views), {}, ""
    for queue, inspector in inspectors.items():
        try:
            view = found[queue] = inspector.look()
        except KmqError as error:
            if is_first:
                raise
            trouble = str(error)
            continue
        earlier = before.views.get(queue)
        if earlier is not None and view.now_ms > earlier.now_ms:
            passed_s, old = (view.now_ms - earlier.now_ms) / 1000, earlier.counted
            rates[queue] = {name: max(0, number - old[name]) / passed_s for name, number in view.counted.items()}
    return Frame(found, rates, trouble)


def _live(frames: Iterator[Frame]) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    with Live(console=console, auto_refresh=False, screen=False) as live:
        for frame in frames:
            live.update(_screen(frame), refresh=True)


def _lines(frames: Iterator[Frame], output: OutputForm) -> None:
    """Print frames one after another, for a pipe or `--once`."""
    for number, frame in enumerate(frames):
        if output is not OutputForm.TABLE:
            queues = [
                {**view.figures(), "per_second": frame.rates.get(queue, {})} for queue, view in frame.views.items()
            ]
            print_json({"queues": queues, "trouble": frame.trouble})
            continue
        if number:
            typer.echo("")
        typer.echo(rendered(_table(frame, width())))
        if frame.trouble:
            typer.echo(shown(frame.trouble))


def _screen(frame: Frame) -> Table:
    made = _table(frame, width())
    clock = time.strftime("%H:%M:%S")
    if frame.trouble:
        made.caption = Text(f"{clock} {shown(frame.trouble)}", style="bold red")
    else:
        made.caption = Text(f"{clock}  Ctrl+C ends it", style="dim")
    made.caption_justify = "left"
    return made


def _table(frame: Frame, columns: int) -> Table:
    rows = [_row(view, frame.rates.get(queue, {})) for queue, view in frame.views.items()]
    if columns >= NARROW:
        return table(WIDE, rows)
    return table(SLIM, [tuple(row[place] for place in (0, 1, 2, 4, 6, 7, 8, 9)) for row in rows])


def _row(view: QueueView, rates: dict[str, float]) -> Sequence[str]:
    figures = view.figures()
    age_ms = figures["oldest_in_flight_age_ms"]
    return (
        view.queue,
        ("" if view.ready.is_exact else "~") + str(figures["ready"]),
        str(figures["in_flight"]),
        "-" if age_ms is None else span(age_ms),
        str(figures["overdue"]),
        str(figures["deferred"]),
        _rate(rates, "acked"),
        _rate(rates, "redelivered"),
        str(figures["dead_letters"]),
        _tracker(view, figures["tracker_lag"]),
    )


def _tracker(view: QueueView, lag: int) -> str:
    """Return how far the tracker is behind, or that none runs."""
    at_ms = view.tracker.heartbeat_at_ms
    if view.life is Life.FAILING:
        return view.life.value
    if is_tracker_down(view):
        return "never ran" if at_ms is None else f"down {span(max(0, view.now_ms - at_ms))}"
    return f"{lag} behind" if lag else view.life.value


def _rate(rates: dict[str, float], name: str) -> str:
    return f"{rates[name]:.1f}" if name in rates else "-"
