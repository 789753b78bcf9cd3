"""`kmq worker`: run a handler for the messages of a queue, under a supervisor that reads its exit code."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Annotated

import typer

from kmq_spark.cli.message import LogicalQueue
from kmq_spark.cli.shared.common import StopOnSignals, set_up_logs
from kmq_spark.cli.shared.options import Connection, QueueName
from kmq_spark.errors import ConfigError, KmqError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, TypeVar

    from kmq_spark.config import Settings
    from kmq_spark.consumer.consumer import QueueConsumer

    Handler = TypeVar("Handler", bound=Callable[[Any], Any])

logger = logging.getLogger(__name__)


def worker(
    handler: Annotated[str, typer.Argument(help="The handler, such as shop.orders:handle.", metavar="MODULE:HANDLER")],
    name: QueueName,
    connection: Connection,
    logical_queue: LogicalQueue = None,
    concurrency: Annotated[int | None, typer.Option(help="Handlers at once, in threads; default: 8.")] = None,
    processes: Annotated[
        int | None, typer.Option(help="Handler processes, in place of threads: for handlers that compute.")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Call the handler with batches of so many messages.")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Serve Prometheus metrics there; default: no.")] = None,
    health_port: Annotated[int | None, typer.Option(help="Serve /health there; default: no.")] = None,
    is_reloading: Annotated[
        bool, typer.Option("--reload", help="Start again when a Python file below this folder changes.")
    ] = False,
) -> None:
    """
    Call a function or a coroutine function for each message of a queue, until SIGTERM or Ctrl+C.

    It is imported from the current folder or from what is installed. A stop waits 20 s for running handlers and gives
    the rest back. Exit code 0: stopped; 1: the run failed; 2: the handler or a setting is wrong.
    """
    set_up_logs(queue=name)
    settings = connection.settings(
        metrics={"port": metrics_port},
        worker={"concurrency": concurrency, "processes": processes, "batch": batch, "health_port": health_port},
    )
    if concurrency is not None and processes is not None:
        raise ConfigError(
            f"--concurrency and --processes exclude each other: got {concurrency} and {processes}; a process handles "
            "one message at a time; leave one out"
        )
    signals = StopOnSignals()
    if is_reloading:
        raise typer.Exit(_run_reloading(signals))
    # As `python -m` has it: the handler lies where the command is run. Handler processes get the same path.
    if not {"", os.getcwd()} & set(sys.path):  # noqa: PTH109  # as the path has it
        sys.path.insert(0, os.getcwd())  # noqa: PTH109  # as above
    try:
        if settings.worker.processes is None:
            _run_in_threads(handler, name, logical_queue, settings, signals)
        else:
            _run_in_processes(handler, name, logical_queue, settings, signals)
    except SystemExit as end:
        # Its code may be 0, which would tell the supervisor that all is well.
        raise KmqError(f"a handler ended the run: got SystemExit({end.code!r}); raise another exception") from end


def _run_in_threads(
    handler: str, name: str, logical_queue: str | None, settings: Settings, signals: StopOnSignals
) -> None:
    from kmq_spark.worker.handler import load_handler

    consumers: list[QueueConsumer] = []

    def health() -> str:
        return consumers[0].problem if consumers else "the worker is starting"

    with _serving(settings, health):
        signals.attach(_Leave())
        function = load_handler(handler)
        with _consumer_of(name, logical_queue, settings, settings.worker.concurrency) as consumer:
            consumers.append(consumer)
            signals.attach(consumer)
            _run(consumer, _measured(function, settings), settings.worker.concurrency, settings)


def _run_in_processes(
    handler: str, name: str, logical_queue: str | None, settings: Settings, signals: StopOnSignals
) -> None:
    from kmq_spark.worker.child import Start
    from kmq_spark.worker.processes import HandlerProcesses

    count = settings.worker.processes or 1
    log = logging.getLogger()
    start = Start(handler, settings.worker.batch is not None, log.level, log.handlers[0].formatter)
    processes = HandlerProcesses(start, count, settings.worker.max_lease)
    processes.handle = _measured(processes.handle, settings)
    try:
        with _serving(settings, processes.health):
            processes.start()
            while not processes.wait_ready(0.2):
                if signals.is_asked:
                    return
            with _consumer_of(name, logical_queue, settings, count) as consumer:
                signals.attach(consumer)
                processes.attach(consumer)
                _run(consumer, processes, count, settings)
    finally:
        processes.close()
    if processes.error is not None:
        raise processes.error


def _consumer_of(name: str, logical_queue: str | None, settings: Settings, concurrency: int) -> QueueConsumer:
    from kmq_spark.consumer.consumer import QueueConsumer
    from kmq_spark.kafka.queue_topics import QueueTopics

    topics = QueueTopics.parse(name)
    return QueueConsumer(
        topics.queue,
        subscription=topics.subscription,
        logical_queue=logical_queue or "",
        lease=settings.worker.lease,
        max_lease=settings.worker.max_lease,
        max_in_flight=max(1_000, concurrency * (settings.worker.batch or 1)),
        **settings.kafka.reach(),
    )


def _measured(handler: Handler, settings: Settings) -> Handler:
    if not settings.metrics.port:
        return handler
    from kmq_spark.contrib.prometheus import measured

    return measured(handler)


def _run(consumer: QueueConsumer, function: Callable[..., object], concurrency: int, settings: Settings) -> None:
    logger.info("the worker runs, %d handler(s) at once", concurrency, extra={"action": "worker_started"})
    drain = settings.worker.drain_timeout
    if settings.worker.batch is None:
        consumer.run(function, concurrency=concurrency, drain_timeout=drain)
    else:
        consumer.run(function, concurrency=concurrency, drain_timeout=drain, batch=settings.worker.batch)  # type: ignore[arg-type]  # a handler of batches


@contextlib.contextmanager
def _serving(settings: Settings, health: Callable[[], str]) -> Iterator[None]:
    """Serve metrics and health, each where its port is set; both at the same one if that is given twice."""
    from kmq_spark.metrics.exposition import MetricsServer

    with contextlib.ExitStack() as servers:
        host, port, health_port = settings.metrics.host, settings.metrics.port, settings.worker.health_port
        if port:
            servers.enter_context(MetricsServer(port, host, None, health=health))
        if health_port not in {0, port}:
            servers.enter_context(MetricsServer(health_port, host, list, health=health))
        yield


def _run_reloading(signals: StopOnSignals) -> int:
    """Run the same command without --reload in a process of its own, and start it again after each change."""
    from watchfiles import PythonFilter, watch

    command = [sys.executable, "-m", "kmq_spark.cli.main", *(each for each in sys.argv[1:] if each != "--reload")]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, start_new_session=True)  # Ctrl+C reaches it through us, once

    process = start()
    try:
        signals.attach(stopping := _Stopping())
        for changes in watch(".", watch_filter=PythonFilter(), stop_event=stopping, raise_interrupt=False):
            logger.info("%d file(s) changed: the worker starts again", len(changes), extra={"action": "reloaded"})
            process.terminate()
            process.wait()
            process = start()
    finally:
        process.terminate()
        code = process.wait()
    return code


class _Leave:
    """What a signal stops while the handler is imported, which may take long: nothing is received yet."""

    def stop(self) -> None:
        """End the process, as a clean stop."""
        os._exit(0)


class _Stopping(threading.Event):
    """What `StopOnSignals` stops."""

    stop = threading.Event.set
