"""`kmq tracker`: run the redelivery tracker, in this process or a cluster's driver, and show whether it runs."""

from __future__ import annotations

import logging
import os
import time
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kmq_spark import __version__
from kmq_spark.cli.shared.common import (
    EXIT_UNHEALTHY,
    StopOnSignals,
    command,
    counting,
    inspector_of,
    print_json,
    set_up_logs,
)
from kmq_spark.cli.shared.options import Connection, DriverMemory, Events, Master, QueueName
from kmq_spark.cli.shared.output import Output, OutputForm, print_rows, shown, table
from kmq_spark.errors import ConfigError, TopicError, UsageError
from kmq_spark.inspection.spans import counted, span
from kmq_spark.spark.session import stop_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kmq_spark.config import Settings
    from kmq_spark.inspection.facts import QueueView
    from kmq_spark.metrics.samples import Sample
    from kmq_spark.tracker.service import TrackerService

logger = logging.getLogger(__name__)

SUBMITTED_MARKS = frozenset({"PYSPARK_GATEWAY_PORT", "DATABRICKS_RUNTIME_VERSION"})
"""Environment variables that show that Spark started this driver and provides JVM, master and jars."""

app = typer.Typer(help="The redelivery tracker.", no_args_is_help=True)

Queues = Annotated[
    list[str] | None, typer.Argument(help="Queues, or queue@subscription; default: [tracker] queues.", metavar="QUEUE")
]


@app.callback()
def _tracker() -> None:
    """The redelivery tracker."""


@command(app, "run")
def run(
    connection: Connection,
    queues: Queues = None,
    checkpoint_dir: Annotated[str | None, typer.Option(help="Where Spark keeps offsets and state.")] = None,
    fleet: Annotated[
        str | None, typer.Option(help="Share the queues with the other processes of this fleet.", metavar="NAME")
    ] = None,
    fleet_member: Annotated[
        str | None, typer.Option(help="Name of this process in its fleet; default: random.", metavar="NAME")
    ] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Serve Prometheus metrics there; default: no.")] = None,
    master: Master = "local[2]",
    driver_memory: DriverMemory = "2g",
    events: Events = False,
) -> None:
    """
    Run the redelivery tracker of one or more queues until SIGTERM or Ctrl+C.

    With --fleet, processes on several machines share the queues: each queue is tracked by one of them, and the others
    take it over when that one ends or fails.
    """
    set_up_logs()
    settings = connection.settings(
        metrics={"port": metrics_port},
        tracker={
            "queues": tuple(queues) if queues else None,
            "checkpoint_dir": checkpoint_dir,
            "fleet": fleet,
            "fleet_member": fleet_member,
        },
    )
    check_queues(settings, is_each_for_itself=True)
    signals = StopOnSignals()
    with signals.ends_quietly():
        spark = _session(master, driver_memory)
    try:
        if settings.tracker.fleet:
            _run_fleet(spark, settings, signals, events=events)
        else:
            _run_trackers(spark, settings, signals, events=events)
    finally:
        stop_session(spark)


@command(app, "once")
def once(
    connection: Connection,
    queues: Queues = None,
    events: Annotated[bool, typer.Option("--events", help="Print a JSON line when ended.")] = False,
) -> None:
    """Redeliver what is overdue and end; no Spark, no checkpoint: for serverless jobs and cron."""
    set_up_logs()
    settings = connection.settings(tracker={"queues": tuple(queues) if queues else None})
    check_queues(settings)
    from kmq_spark.tracker.once import track_once

    for queue in settings.tracker.queues:
        stats = track_once(queue, settings)
        counts = {name: getattr(stats, name) for name in ("redelivered", "dead_lettered", "expired")}
        if events:
            print_json({"event": "ended", "queue": queue, **counts})
        logger.info(
            "%s: %s", queue, ", ".join(f"{count} {name}" for name, count in counts.items()),
            extra={"action": "ended", "queue": queue},
        )  # fmt: skip


@command(app, "status")
def status(name: QueueName, connection: Connection, output: Output = OutputForm.TABLE) -> None:
    """
    Show whether the tracker runs, and what it has read of each markers partition.

    Exit code 3: it does not run (unless it was stopped and nothing is overdue), or it is late.
    """
    from kmq_spark.inspection.findings import TRACKER_LATE_MS, is_tracker_down

    with (
        inspector_of(name, connection.settings()) as inspector,
        counting(inspector.topics.markers_topic) as on_progress,
    ):
        view = inspector.look(on_progress)
    tracker = view.tracker
    rows = [
        {
            "partition": partition,
            "next": tracker.positions.get(partition),
            "end": view.markers_topic.end[partition],
            "needed": tracker.needed.get(partition),
            "in_flight": each.in_flight + each.deferred,
            "unreadable": each.unreadable,
            "tracker": tracker.last_committers.get(partition, ""),
            "state": view.life.value,
            "heartbeat_at_ms": tracker.heartbeat_at_ms,
            "overdue": each.overdue(view.now_ms),
        }
        for partition, each in view.partitions.items()
    ]
    print_rows(output, rows, lambda: table(_HEADS, [_cells(row) for row in rows]))
    if output is OutputForm.TABLE:
        typer.echo(_summary(view))
    if view.tracker_late_ms > TRACKER_LATE_MS or is_tracker_down(view):
        raise typer.Exit(EXIT_UNHEALTHY)


_HEADS = (">PARTITION", ">NEXT", ">END", ">NEEDED", ">IN FLIGHT", ">UNREADABLE", "TRACKER")


def _cells(row: dict[str, Any]) -> list[str]:
    shown_columns = ("partition", "next", "end", "needed", "in_flight", "unreadable", "tracker")
    return ["-" if row[name] is None or row[name] == "" else shown(str(row[name])) for name in shown_columns]


def _summary(view: QueueView) -> str:
    from kmq_spark.inspection.findings import tracker_state

    if not view.tracker.positions:
        return f"no tracker of {view.queue} has ever committed; run `kmq tracker run {view.queue}`"
    unread = "has read all markers"
    if view.tracker.unread.oldest_at_ms is not None:
        markers = counted(view.tracker.unread.count, "marker")
        unread = f"{markers} not read, the oldest for {span(view.tracker_late_ms)}; `kmq doctor {view.queue}` says more"
    return "; ".join(filter(None, (tracker_state(view), unread)))


def check_queues(settings: Settings, *, is_each_for_itself: bool = False) -> None:
    """Check names, broker and topics before the JVM, which takes seconds to start and stop."""
    from kmq_spark.kafka.topics import check_queue

    # A process of a fleet may bring no queue along and stand by for those of the others.
    if not settings.tracker.queues and not settings.tracker.fleet:
        message = "name at least one queue: got none; name it as an argument or in [tracker] queues"
        raise ConfigError(message)
    for queue in (queues := settings.tracker.queues):
        if queues.count(queue) > 1:
            message = f"queue is given more than once: got {queue!r} {queues.count(queue)} times; name it once"
            raise ConfigError(message)
    broken: list[TopicError] = []
    for queue in queues:
        try:
            check_queue(queue, **settings.kafka.reach())
        except TopicError as error:
            broken.append(error)
    # One of several is named when its tracker ends; the others are tracked.
    if broken and (len(broken) == len(queues) or not is_each_for_itself):
        raise broken[0]


def _session(master: str, driver_memory: str) -> SparkSession:
    # Imported here, so that the other commands do not load Spark.
    from kmq_spark.local.jars import jar_paths
    from kmq_spark.spark.session import build_session, session_settings

    if SUBMITTED_MARKS & os.environ.keys():
        return build_session("kmq-tracker")
    return build_session("kmq-tracker", master=master, settings=session_settings(jar_paths("spark"), driver_memory))


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
    def wait() -> None:
        give_up_s, waiting = time.monotonic() + 600, service.trackers
        while waiting and time.monotonic() < give_up_s:
            waiting = [each for each in waiting if not each.wait_ready(0.1) and not each.has_ended]
        if not waiting and (ready := [each.queue for each in service.trackers if not each.has_ended]):
            print_json({"event": "ready", "queues": ready})

    Thread(target=wait, name="kmq-ready", daemon=True).start()


def _counts(service: TrackerService) -> dict[str, Any]:
    return {
        "queues": {
            tracker.queue: {
                "batches": tracker.stats.batches,
                "redelivered": tracker.stats.redelivered,
                "dead_lettered": tracker.stats.dead_lettered,
                "expired": tracker.stats.expired,
                "restarts": tracker.restarts,
                "partitions": {
                    partition: status.to_dict() for partition, status in sorted(tracker.stats.statuses.items())
                },
            }
            for tracker in service.trackers
        }
    }
