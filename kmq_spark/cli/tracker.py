"""`kmq tracker run`: the redelivery tracker in this process, with a Spark of its own or in a cluster's driver."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kmq_spark.cli.common import (
    BootstrapServer,
    ClientSetting,
    CommandConfig,
    ConfigFile,
    print_json,
    set_up_logs,
    settings_from,
    told_clearly,
)
from kmq_spark.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kmq_spark.config import Settings
    from kmq_spark.service import TrackerService

SUBMITTED_MARKS = frozenset({"PYSPARK_GATEWAY_PORT", "DATABRICKS_RUNTIME_VERSION"})
"""Environment variables of a driver that was started for us, with its JVM, its master and its jars."""

app = typer.Typer(help="The redelivery tracker.", no_args_is_help=True)


@app.callback()
def _tracker() -> None:
    """The redelivery tracker."""


@app.command("run")
@told_clearly
def run(
    queues: Annotated[
        list[str] | None, typer.Argument(help="Queues; default: [tracker] queues.", metavar="QUEUE")
    ] = None,
    bootstrap_server: BootstrapServer = None,
    config: ConfigFile = None,
    command_config: CommandConfig = None,
    client_settings: ClientSetting = None,
    checkpoint_dir: Annotated[str | None, typer.Option(help="Where Spark keeps offsets and state.")] = None,
    trigger: Annotated[str | None, typer.Option(help="processing-time or available-now.")] = None,
    max_deliveries: Annotated[int | None, typer.Option(help="Last allowed delivery; 0 = no limit.")] = None,
    master: Annotated[str, typer.Option(help="Spark master; under spark-submit the submitted one.")] = "local[2]",
    driver_memory: Annotated[str, typer.Option(help="Heap of the Spark driver.")] = "2g",
    events: Annotated[bool, typer.Option("--events", help="Print a JSON line when ready and when ended.")] = False,
    log_level: Annotated[str, typer.Option(help="Level of our own log.")] = "INFO",
) -> None:
    """Run the redelivery tracker of one or more queues until SIGTERM or Ctrl+C, or once (available-now)."""
    set_up_logs(log_level.upper())
    settings = settings_from(
        config,
        bootstrap_server,
        command_config,
        client_settings,
        tracker={"checkpoint_dir": checkpoint_dir, "trigger": trigger, "queues": tuple(queues) if queues else None},
        queue={"max_deliveries": max_deliveries},
    )
    spark = _session(master, driver_memory)
    try:
        _run_trackers(spark, settings, events=events)
    finally:
        spark.stop()


def _session(master: str, driver_memory: str) -> SparkSession:
    # Loaded here: the other commands must not wait for Spark to load.
    from kmq_spark.local.jars import jar_paths  # noqa: PLC0415
    from kmq_spark.spark.session import build_session, session_settings  # noqa: PLC0415

    if SUBMITTED_MARKS & os.environ.keys():
        return build_session("kmq-tracker")
    return build_session("kmq-tracker", master=master, settings=session_settings(jar_paths("spark"), driver_memory))


def _run_trackers(spark: SparkSession, settings: Settings, *, events: bool) -> None:
    from kmq_spark.service import TrackerService  # noqa: PLC0415  # as above

    names = settings.tracker.queues
    if not names:
        message = "no queue is named: got none, at least one; name it as an argument or in [tracker] queues"
        raise ConfigError(message)
    service = TrackerService(spark, names, settings)
    _stop_on_signals(service)
    if events:
        _announce(service)
    service.run()
    if events:
        print_json({"event": "ended", **_counts(service)})


def _stop_on_signals(service: TrackerService) -> None:
    def stop(_number: int, _frame: object) -> None:
        service.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)


def _announce(service: TrackerService) -> None:
    from threading import Thread  # noqa: PLC0415  # only with --events

    def wait() -> None:
        if all(tracker.wait_ready(600) for tracker in service.trackers):
            print_json({"event": "ready", "queues": [tracker.queue for tracker in service.trackers]})

    Thread(target=wait, name="kmq-ready", daemon=True).start()


def _counts(service: TrackerService) -> dict[str, Any]:
    return {
        "queues": {
            tracker.queue: {
                "batches": tracker.stats.batches,
                "redelivered": tracker.stats.redelivered,
                "dead_lettered": tracker.stats.dead_lettered,
                "set_aside": tracker.stats.set_aside,
                "restarts": tracker.stats.restarts,
            }
            for tracker in service.trackers
        }
    }


def run_submitted() -> None:
    """Run with the arguments of `kmq tracker run`: for `jobs/redelivery_tracker.py` and Databricks wheel tasks."""
    typer.run(run)
