"""
What all commands share: exit codes, errors, logs, progress.

Rule 1: exit codes: 0 = success, 1 = failure, 2 = usage error, 3 = unhealthy. An error is one line on stderr, never a
traceback.
Rule 2: data is written to stdout, everything else to stderr.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import sys
import threading
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import typer

from kmq_spark.cli.shared import options
from kmq_spark.cli.shared.options import LogFormat, spread
from kmq_spark.errors import ConfigError, KmqError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kmq_spark.config import Settings
    from kmq_spark.inspection.inspector import QueueInspector

EXIT_FAILED, EXIT_USAGE, EXIT_UNHEALTHY = 1, 2, 3

R = TypeVar("R")


def command(app: typer.Typer, name: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """
    Return a decorator that adds a function to *app* as the command *name*.

    A `KmqError` is printed as one line. A closed output pipe ends the command without an error.
    """

    def add(function: Callable[..., R]) -> Callable[..., R]:
        spreading = spread(function)

        @functools.wraps(spreading)
        def wrapped(**options: Any) -> R:
            try:
                return spreading(**options)
            except KmqError as error:
                typer.echo(_error_line(str(error)), err=True)
                raise typer.Exit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED) from None
            except BrokenPipeError:
                # The reader of stdout has closed it. Redirect it, so that the interpreter's flush at exit works.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise typer.Exit(0) from None

        app.command(name)(wrapped)
        return function

    return add


def fail(text: str) -> typer.Exit:
    """Print one line on stderr; return what ends the command with exit code 1."""
    typer.echo(_error_line(text), err=True)
    return typer.Exit(EXIT_FAILED)


def print_json(value: object) -> None:
    """Print a JSON object on one line and flush."""
    typer.echo(json.dumps(value, default=str))


class JsonLines(logging.Formatter):
    """A JSON object a line, with what the event says beside its text: `action`, `queue` and more."""

    _ours = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}

    def __init__(self, queue: str = "") -> None:
        """*queue*: that of each event, in a process of one queue."""
        super().__init__()
        self._more = {"queue": queue} if queue else {}

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= self._more | {name: value for name, value in vars(record).items() if name not in self._ours}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _error_line(error: str) -> str:
    if options.given.log_format is LogFormat.TEXT:
        return f"kmq: {error}"
    line = {"name": "kmq", "levelname": "ERROR", "msg": error, "action": "failed"}
    return JsonLines().format(logging.makeLogRecord(line))


def set_up_logs(level: str = "INFO", queue: str = "") -> None:
    """Write logs to stderr, one line an event; `--log-level` goes before *level*; *queue*: the only one."""
    logging.basicConfig(
        level=options.given.log_level or level,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
        force=True,
    )
    # While a JVM stops, py4j logs failed commands with full stack traces, some of them with the root logger.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    for handler in logging.getLogger().handlers:
        if options.given.log_format is LogFormat.JSON:
            handler.setFormatter(JsonLines(queue))
        handler.addFilter(lambda record: "py4j" not in Path(record.pathname).parts)


def quiet_client() -> None:
    """Hide the Kafka client's log lines; the relevant information is in the error line of the command."""
    client = logging.getLogger("kmq_spark.kafka.client")
    # The level is not changed, because the reason of a failed connection is taken from these log lines.
    client.propagate = False
    if not client.handlers:
        client.addHandler(logging.NullHandler())


def inspector_of(queue: str, settings: Settings) -> QueueInspector:
    """Return an inspector of a queue; the caller must close it."""
    from kmq_spark.inspection.inspector import QueueInspector

    quiet_client()
    return QueueInspector(queue, **settings.kafka.reach())


@contextmanager
def counting(topic: str, what: str = "markers") -> Iterator[Callable[[int], None]]:
    """Show the number of records read of a topic on stderr, on a terminal only; the line is erased at the end."""
    if not sys.stderr.isatty():
        yield lambda _count: None
        return

    def show(count: int) -> None:
        sys.stderr.write(f"\r\033[Kreading {topic}: {count:,} {what}")
        sys.stderr.flush()

    try:
        yield show
    finally:
        sys.stderr.write("\r\033[K")
        sys.stderr.flush()


class Stoppable(Protocol):
    """A service that a signal can stop."""

    def stop(self) -> None:
        """Request a stop; safe in a signal handler."""


class StopOnSignals:
    """Handle SIGTERM and Ctrl+C from the start of the command, and stop the service once it is attached."""

    def __init__(self) -> None:
        self._service: Stoppable | None = None
        self.is_asked = False
        self._take_over()

    def attach(self, service: Stoppable) -> None:
        """Stop this service when a signal arrives; at once if a signal has already arrived."""
        self._service = service
        if self.is_asked:
            service.stop()
        else:
            # Install the handlers again: a new Spark session makes Ctrl+C cancel its jobs and raise KeyboardInterrupt.
            self._take_over()

    @contextmanager
    def ends_quietly(self) -> Iterator[None]:
        """End the command if its block fails after a signal, which has ended the JVM too where it went to the group."""
        try:
            yield
        except Exception:
            if self.is_asked:
                raise typer.Exit from None
            raise

    def _take_over(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows handlers only in the main thread; a cluster ends its notebooks and wheel tasks
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._hear)

    def _hear(self, number: int, _frame: object) -> None:
        self.is_asked = True
        # A second signal ends the process at once, which cannot lose a message.
        signal.signal(number, signal.SIG_DFL)
        if self._service is not None:
            self._service.stop()
