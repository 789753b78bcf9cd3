"""`kmq tracker run`: run the redelivery tracker in this process, with local Spark or in the driver of a cluster."""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from kmq_spark import __version__
from kmq_spark.cli.shared.common import command, print_json, run_alone, set_up_logs
from kmq_spark.cli.shared.options import Address, DriverMemory, Events, LogLevel, Master, Timeout, settings_from
from kmq_spark.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kmq_spark.config import Settings
    from kmq_spark.metrics.samples import Sample
    from kmq_spark.tracker.service import TrackerService

logger = logging.getLogger(__name__)

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

SUBMITTED_MARKS = frozenset({"PYSPARK_GATEWAY_PORT", "DATABRICKS_RUNTIME_VERSION"})
"""Environment variables that show that Spark started this driver and provides JVM, master and jars."""

app = typer.Typer(help="The redelivery tracker.", no_args_is_help=True)

Queues = Annotated[
    list[str] | None, typer.Argument(help="Queues, or queue@subscription; default: [tracker] queues.", metavar="QUEUE")
]
MaxDeliveries = Annotated[int | None, typer.Option(help="Last allowed delivery; 0 = no limit.")]


@app.callback()
def _tracker() -> None:
    """The redelivery tracker."""


@command(app, "run")
def run(
    address: Address,
    queues: Queues = None,
    checkpoint_dir: Annotated[str | None, typer.Option(help="Where Spark keeps offsets and state.")] = None,
    trigger: Annotated[str | None, typer.Option(help="processing-time or available-now.")] = None,
    max_deliveries: MaxDeliveries = None,
    master: Master = "local[2]",
    driver_memory: DriverMemory = "2g",
    metrics_port: Annotated[int | None, typer.Option(help="Serve Prometheus metrics there; default: no.")] = None,
    fleet: Annotated[
        str | None, typer.Option(help="Share the queues with the other processes of this fleet.", metavar="NAME")
    ] = None,
    fleet_member: Annotated[
        str | None, typer.Option(help="Name of this process in its fleet; default: random.", metavar="NAME")
    ] = None,
    timeout: Timeout = None,
    events: Events = False,
    log_level: LogLevel = "INFO",
) -> None:
    """
    Run the redelivery tracker of one or more queues until SIGTERM or Ctrl+C, or once (available-now).

    With --fleet, processes on several machines share the queues: each queue is tracked by one of them, and the others
    take it over when that one ends or fails.
    """
    set_up_logs(log_level_of(log_level))
    settings = settings_from(
        address,
        timeout,
        metrics={"port": metrics_port},
        tracker={
            "checkpoint_dir": checkpoint_dir,
            "trigger": trigger,
            "queues": tuple(queues) if queues else None,
            "fleet": fleet,
            "fleet_member": fleet_member,
        },
        queue={"max_deliveries": max_deliveries},
    )
    check_queues(settings)
    signals = StopOnSignals()
    spark = _session(master, driver_memory)
    try:
        if settings.tracker.fleet:
            _run_fleet(spark, settings, signals, events=events)
        else:
            _run_trackers(spark, settings, signals, events=events)
    finally:
        stop_session(spark)


def log_level_of(text: str) -> str:
    """Return the name of a log level; raise a `ConfigError` if it does not exist."""
    if text.upper() not in LOG_LEVELS:
        message = f"log level is not allowed: got {text!r}, one of {', '.join(LOG_LEVELS)}; correct --log-level"
        raise ConfigError(message)
    return text.upper()


def check_queues(settings: Settings) -> None:
    """Check names, broker and topics before the JVM, which takes seconds to start and stop."""
    from kmq_spark.kafka.topics import check_queue

    if settings.tracker.fleet and settings.tracker.trigger == "available-now":
        message = "trigger is not allowed in a fleet: got 'available-now', allowed is 'processing-time'; leave one out"
        raise ConfigError(message)
    # A process of a fleet may bring no queue along and stand by for those of the others.
    if not settings.tracker.queues and not settings.tracker.fleet:
        message = "name at least one queue: got none; name it as an argument or in [tracker] queues"
        raise ConfigError(message)
    for queue in (queues := settings.tracker.queues):
        if queues.count(queue) > 1:
            message = f"queue is given more than once: got {queue!r} {queues.count(queue)} times; name it once"
            raise ConfigError(message)
        check_queue(queue, **settings.kafka.reach())


class Stoppable(Protocol):
    """A service that a signal can stop."""

    def stop(self) -> None:
        """Request a stop; safe in a signal handler."""


class StopOnSignals:
    """Handle SIGTERM and Ctrl+C from the start of the command, and stop the service once it is attached."""

    def __init__(self) -> None:
        """Install the signal handlers."""
        self._service: Stoppable | None = None
        self._is_asked = False
        self._take_over()

    def attach(self, service: Stoppable) -> None:
        """Stop this service when a signal arrives; at once if a signal has already arrived."""
        self._service = service
        if self._is_asked:
            service.stop()
        else:
            # Install the handlers again: a new Spark session makes Ctrl+C cancel its jobs and raise KeyboardInterrupt.
            self._take_over()

    def _take_over(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows handlers only in the main thread; a cluster ends its notebooks and wheel tasks
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._hear)

    def _hear(self, number: int, _frame: object) -> None:
        self._is_asked = True
        # A second signal ends the process at once, which cannot lose a message.
        signal.signal(number, signal.SIG_DFL)
        if self._service is not None:
            self._service.stop()


def _session(master: str, driver_memory: str) -> SparkSession:
    # Imported here, so that the other commands do not load Spark.
    from kmq_spark.local.jars import jar_paths
    from kmq_spark.spark.session import build_session, session_settings

    if SUBMITTED_MARKS & os.environ.keys():
        return build_session("kmq-tracker")
    return build_session("kmq-tracker", master=master, settings=session_settings(jar_paths("spark"), driver_memory))


def stop_session(spark: SparkSession) -> None:
    """Stop Spark; ignore errors, because the JVM may have ended already."""
    try:
        spark.stop()
    except Exception:  # py4j errors have no common base class
        logger.debug("Spark did not stop", exc_info=True)


def _run_trackers(spark: SparkSession, settings: Settings, signals: StopOnSignals, *, events: bool) -> None:
    from kmq_spark.tracker.service import TrackerService

    service = TrackerService(spark, settings.tracker.queues, settings)
    signals.attach(service)
    if events:
        _announce(service)
    service.run()
    if events:
        print_json({"event": "ended", **_counts(service)})
    logger.info("tracker of %s ended", ", ".join(settings.tracker.queues), extra={"action": "ended"})


def _run_fleet(spark: SparkSession, settings: Settings, signals: StopOnSignals, *, events: bool) -> None:
    from kmq_spark.tracker.fleet import TrackerFleet
    from kmq_spark.tracker.metrics import fleet_samples, serving_metrics
    from kmq_spark.tracker.queue_tracker import QueueTracker
    from kmq_spark.tracker.standby import check_jvm, warm_up

    def make_tracker(queue: str) -> QueueTracker:
        tracker = QueueTracker(spark, queue, settings)
        if metrics is not None:
            metrics.add(tracker)
        return tracker

    def tell(event: str, queue: str) -> None:
        if event == "stopped" and metrics is not None:
            metrics.remove(queue)
        if events:
            print_json({"event": event, "member": service.member, **({"queue": queue} if queue else {})})

    def group_samples() -> list[Sample]:
        try:
            return fleet_samples(service.name, service.view())
        except UsageError:
            # It has not joined yet, or has left.
            return []

    service = TrackerFleet(
        settings.tracker.fleet,
        settings,
        make_tracker,
        check_engine=lambda: check_jvm(spark),
        version=__version__,
        on_event=tell,
    )
    signals.attach(service)
    # Before it joins: the fleet gives no queue to a process that is not ready.
    any(warm_up(spark, queue, settings) for queue in settings.tracker.queues)
    with serving_metrics([], settings, group_samples) as metrics:
        service.run()
    if events:
        print_json({"event": "ended", "member": service.member})
    logger.info("member %s of fleet %s ended", service.member, service.name, extra={"action": "ended"})


def _announce(service: TrackerService) -> None:
    from threading import Thread

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
                "expired": tracker.stats.expired,
                "restarts": tracker.stats.restarts,
                "partitions": {
                    partition: status.to_dict() for partition, status in sorted(tracker.stats.statuses.items())
                },
            }
            for tracker in service.trackers
        }
    }


def run_submitted() -> None:
    """Run with the arguments of `kmq tracker run`, for `jobs/redelivery_tracker.py` and Databricks wheel tasks."""
    run_alone(run)
