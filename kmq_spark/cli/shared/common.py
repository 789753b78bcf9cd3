"""
Shared code of all commands: exit codes, errors, logs.

Rule 1: exit codes: 0 = success, 1 = failure, 2 = usage error, 3 = unhealthy. An error is one line on stderr, never a
traceback.
Rule 2: data is written to stdout, everything else to stderr.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from kmq_spark.cli.shared.one_line import HELP_OPTIONS, OneLineCommand
from kmq_spark.cli.shared.options import spread
from kmq_spark.errors import ConfigError, KmqError

if TYPE_CHECKING:
    from collections.abc import Callable

EXIT_FAILED, EXIT_USAGE, EXIT_UNHEALTHY = 1, 2, 3

R = TypeVar("R")


def one_line_errors(function: Callable[..., R]) -> Callable[..., R]:
    """
    Wrap a function as a command.

    Groups of options become single options. A `KmqError` is printed as one line. A closed output pipe ends the command
    without an error.
    """
    spreading = spread(function)

    @functools.wraps(spreading)
    def wrapped(**options: Any) -> R:
        try:
            return spreading(**options)
        except KmqError as error:
            typer.echo(f"kmq: {error}", err=True)
            raise typer.Exit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED) from None
        except BrokenPipeError:
            # The reader of stdout has closed it. Redirect it, so that the interpreter's flush at exit does not fail.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None

    return wrapped


def command(app: typer.Typer, name: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Return a decorator that adds a function to *app* as the command *name*; see `one_line_errors`."""
    return lambda function: app.command(name)(one_line_errors(function))


def run_alone(command: Callable[..., None]) -> None:
    """Run a single command with the arguments of this process, for spark-submit and Databricks wheel tasks."""
    submitted = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings=HELP_OPTIONS)
    submitted.command(cls=OneLineCommand)(command)
    submitted()


def print_json(value: object) -> None:
    """Print a JSON object on one line and flush."""
    typer.echo(json.dumps(value, default=str))


def set_up_logs(level: str = "INFO") -> None:
    """Write logs to stderr, one line an event."""
    logging.basicConfig(
        level=level, stream=sys.stderr, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", force=True
    )
    # While a JVM stops, py4j logs failed commands with full stack traces, some of them with the root logger.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda record: "py4j" not in Path(record.pathname).parts)
