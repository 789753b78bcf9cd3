"""`kmq up` and `kmq demo`: an embedded broker for experiments, and everything at work on one."""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Annotated

import typer

from kmq_spark.cli.shared import options
from kmq_spark.cli.shared.common import StopOnSignals, fail, print_json, set_up_logs
from kmq_spark.cli.shared.options import seconds


def up(
    port: Annotated[
        int | None, typer.Option(help="Port on 127.0.0.1 of the first broker; default: a free one.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Keep the data here; default: a folder that is removed at the end.")
    ] = None,
    brokers: Annotated[int, typer.Option(min=1, max=5, help="Brokers; of 3, one may be dead.")] = 1,
    secure: Annotated[
        bool,
        typer.Option(
            "--secure",
            help="TLS, a user for each part of `kmq acls` (in files beside the operator's), deny by default.",
        ),
    ] = False,
) -> None:
    """Run embedded Kafka brokers on loopback until Ctrl+C. Not for production."""
    from kmq_spark.cli.acls import PARTS
    from kmq_spark.local.broker import EmbeddedBroker
    from kmq_spark.local.cluster import EmbeddedCluster

    signals = StopOnSignals()
    is_one = brokers == 1 and not secure
    users = [f"kmq-{part}" for part in PARTS] if secure else []  # as `kmq acls` names them
    cluster = None if is_one else EmbeddedCluster(brokers, data_dir, port, users=users)
    with cluster or EmbeddedBroker(data_dir=data_dir, port=port) as broker:
        file = f" --command-config {cluster.properties()}" if cluster and secure else ""
        typer.echo(
            f"broker ready: --bootstrap-server {broker.bootstrap_servers}{file}   (Ctrl+C stops it; not for production)"
        )
        while not signals.is_asked:
            time.sleep(0.2)
            if not broker.is_running:
                raise fail(f"the broker ended by itself; see its log in {broker.save_logs()}")


def demo(
    workers: Annotated[int, typer.Option(min=1, max=16, help="Worker processes.")] = 2,
    kills: Annotated[int, typer.Option(min=0, max=20, help="How many workers are killed at work.")] = 3,
    lease: Annotated[str, typer.Option(help="How long a worker holds a message.", metavar="DURATION")] = "4s",
) -> None:
    """
    Index the Python standard library through a queue, kill workers at work, and count what came out.

    Without --bootstrap-server it starts an embedded broker. The last line is a JSON object; exit code 1 if anything is
    lost or redelivered too early.
    """
    import kmq_spark.spark.queries  # noqa: F401  # without Spark, end here: the tracker would say it only in its log
    from kmq_spark.demo.narrator import Demo

    set_up_logs("WARNING")
    # Hide logs of broker and clients about connections that open and close.
    for name in ("kmq_spark.kafka.client", "kmq_spark.local"):
        logging.getLogger(name).setLevel(logging.ERROR)
    folder = Path(mkdtemp(prefix="kmq-demo-"))
    lease_ms = round(1000 * seconds(lease, "--lease"))
    outcome = Demo(folder, workers=workers, kills=kills, lease_ms=lease_ms).run(options.given.bootstrap_server)
    print_json(outcome.summary())
    if not outcome.is_right:
        raise fail(f"the outcome is not what it should be; logs and results are in {folder}")
    shutil.rmtree(folder, ignore_errors=True)
