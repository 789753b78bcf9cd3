"""`kmq demo`: run all parts on this machine, print each step, and check the result."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import Annotated

import typer

from kmq_spark.cli.shared.common import EXIT_FAILED, one_line_errors, print_json, set_up_logs
from kmq_spark.cli.shared.options import BootstrapServer


@one_line_errors
def demo(
    bootstrap_server: BootstrapServer = None,
    workers: Annotated[int, typer.Option(min=1, max=16, help="Worker processes.")] = 2,
    kills: Annotated[int, typer.Option(min=0, max=20, help="How many workers are killed at work.")] = 3,
    lease_ms: Annotated[int, typer.Option(min=1_000, max=60_000, help="How long a worker holds a message.")] = 4_000,
) -> None:
    """
    Index the Python standard library through a queue, kill workers at work, and count what came out.

    Without --bootstrap-server it starts an embedded broker. The last line is a JSON object; exit code 1 if anything is
    lost or redelivered too early.
    """
    from kmq_spark.demo.narrator import Demo

    set_up_logs("WARNING")
    # Hide logs of broker and clients about connections that open and close.
    for name in ("kmq_spark.kafka.client", "kmq_spark.local"):
        logging.getLogger(name).setLevel(logging.ERROR)
    folder = Path(mkdtemp(prefix="kmq-demo-"))
    outcome = Demo(folder, workers=workers, kills=kills, lease_ms=lease_ms).run(bootstrap_server)
    print_json(outcome.summary())
    if outcome.is_right:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        typer.echo(f"kmq: the outcome is not what it should be; logs and results are in {folder}", err=True)
        raise typer.Exit(EXIT_FAILED)
