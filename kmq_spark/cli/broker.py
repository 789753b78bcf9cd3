"""`kmq up`: run an embedded broker for experiments."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from kmq_spark.cli.shared.common import one_line_errors


@one_line_errors
def up(
    port: Annotated[int | None, typer.Option(help="Port on 127.0.0.1; default: a free one.")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Keep the data here; default: a folder that is removed at the end.")
    ] = None,
) -> None:
    """Run an embedded Kafka broker on loopback until Ctrl+C. Not for production."""
    from kmq_spark.local.broker import EmbeddedBroker

    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: ended.set())
    with EmbeddedBroker(data_dir=data_dir, port=port) as broker:
        typer.echo(
            f"broker ready: --bootstrap-server {broker.bootstrap_servers}   (Ctrl+C stops it; not for production)"
        )
        while not ended.wait(0.5):
            if not broker.is_running:
                typer.echo(f"kmq: the broker ended by itself; see its log in {broker.save_logs()}", err=True)
                raise typer.Exit(1)
