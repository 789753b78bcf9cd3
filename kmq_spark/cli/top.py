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

from kmq_spark.cli.shared.common import one_line_errors, print_json
from kmq_spark.cli.shared.looking import inspector_of
from kmq_spark.cli.shared.options import Connection
from kmq_spark.cli.shared.output import Output, OutputForm, rendered, shown, table, width
from kmq_spark.errors import ConfigError, KmqError
from kmq_spark.inspection.spans import span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.table import Table

    from kmq_spark.inspection.figures import Figures
    from kmq_spark.inspection.inspector import QueueInspector

NARROW = 100
"""Terminal width in characters below which less important figures are omitted."""

WIDE = (
    "QUEUE…", ">READY", ">IN FLIGHT", ">OLDEST", ">OVERDUE", ">DEFERRED", ">ACKED/S", ">REDELIVERED/S", ">DEAD",
    ">TRACKER LAG",
)  # fmt: skip
SLIM = ("QUEUE…", ">READY", ">FLIGHT", ">OLDEST", ">ACK/S", ">DEAD", ">LAG")


@dataclass(frozen=True, slots=True)
class Frame:
    """
    The result of one check of all queues.

    Attributes:
        figures: Figures by queue; those of an earlier check if this one failed.
        rates: Messages a second since the previous check, by queue and counter; empty at first.
        trouble: Error text of a failed check, one line; empty if all succeeded.
    """

    figures: dict[str, Figures]
    rates: dict[str, dict[str, float]]
    trouble: str = ""


@one_line_errors
def top(
    queues: Annotated[list[str], typer.Argument(help="Queues, or queue@subscription.", metavar="QUEUE...")],
    connection: Connection,
    output: Output = OutputForm.TABLE,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame and end, after two looks for the rates.")
    ] = False,
    interval: Annotated[float, typer.Option(help="Seconds between two frames.", min=0.2, max=3600)] = 2.0,
) -> None:
    """
    Show queues live: ready, in flight, oldest, rates, redeliveries, dead letters, tracker lag. Ctrl+C ends it.

    While the broker is not reachable, it reports that, keeps the last figures and tries again.
    """
    settings = connection.settings()
    if repeated := next((queue for queue in queues if queues.count(queue) > 1), ""):
        message = f"queue is given more than once: got {repeated!r}; name it once"
        raise ConfigError(message)
    inspectors = {queue: inspector_of(queue, settings) for queue in queues}
    try:
        if sys.stdout.isatty() and not once and output is OutputForm.TABLE:
            _live(_frames(inspectors, interval))
        else:
            frames = _frames(inspectors, interval)
            if once:
                # A rate needs two checks, so skip the first frame.
                next(frames)
                frames = islice(frames, 1)
            _lines(frames, output)
    except KeyboardInterrupt:
        pass  # Ctrl+C is the usual way to end the command
    finally:
        for inspector in inspectors.values():
            inspector.close()


def _frames(inspectors: dict[str, QueueInspector], interval_s: float) -> Iterator[Frame]:
    """Yield a frame for each check of the queues; only an error of the first check is raised."""
    frame = Frame({}, {})
    for number in count():
        began_s = time.monotonic()
        frame = _next(inspectors, frame, is_first=number == 0)
        yield frame
        time.sleep(max(0.05, interval_s - (time.monotonic() - began_s)))


def _next(inspectors: dict[str, QueueInspector], before: Frame, *, is_first: bool) -> Frame:
    found, rates, trouble = dict(before.figures), {}, ""
    for queue, inspector in inspectors.items():
        try:
            found[queue] = inspector.figures()
        except KmqError as error:
            if is_first:
                raise
            trouble = str(error)
            continue
        earlier = before.figures.get(queue)
        if earlier is not None and found[queue].at_ms > earlier.at_ms:
            seconds = (found[queue].at_ms - earlier.at_ms) / 1000
            rates[queue] = {
                name: max(0, number - earlier.counted[name]) / seconds for name, number in found[queue].counted.items()
            }
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
            print_json({
                "queues": [
                    {**figures.to_dict(), "per_second": frame.rates.get(queue, {})}
                    for queue, figures in frame.figures.items()
                ],
                "trouble": frame.trouble,
            })  # fmt: skip
            continue
        if number:
            typer.echo("")
        typer.echo(rendered(_table(frame, width())))
        if frame.trouble:
            typer.echo(shown(frame.trouble))


def _screen(frame: Frame) -> Table:
    made = _table(frame, width())
    if frame.trouble:
        made.caption = Text(f"{time.strftime('%H:%M:%S')} {shown(frame.trouble)}", style="bold red")
    else:
        made.caption = Text(f"{time.strftime('%H:%M:%S')}  Ctrl+C ends it", style="dim")
    made.caption_justify = "left"
    return made


def _table(frame: Frame, columns: int) -> Table:
    rows = [_row(figures, frame.rates.get(queue, {})) for queue, figures in frame.figures.items()]
    if columns >= NARROW:
        return table(WIDE, rows)
    return table(SLIM, [tuple(row[place] for place in (0, 1, 2, 3, 6, 8, 9)) for row in rows])


def _row(figures: Figures, rates: dict[str, float]) -> Sequence[str]:
    age = "-" if figures.oldest_in_flight_at_ms is None else span(figures.at_ms - figures.oldest_in_flight_at_ms)
    return (
        figures.queue,
        ("" if figures.is_ready_exact else "~") + str(figures.ready),
        str(figures.in_flight),
        age,
        str(figures.overdue),
        str(figures.deferred),
        _rate(rates, "acked"),
        _rate(rates, "redelivered"),
        str(figures.dead_letters),
        str(figures.tracker_lag),
    )


def _rate(rates: dict[str, float], name: str) -> str:
    return f"{rates[name]:.1f}" if name in rates else "-"
