"""
What every command shares: exit codes, errors, logs.

Rule 1: exit 0 well, 1 failed, 2 usage, 3 unhealthy; an error is one line on stderr, never a traceback.
Rule 2: data goes to stdout, everything else to stderr.
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

from kmq_spark.cli.one_line import HELP_OPTIONS, OneLineCommand
from kmq_spark.cli.options import spread
from kmq_spark.errors import ConfigError, KmqError

if TYPE_CHECKING:
    from collections.abc import Callable

EXIT_FAILED, EXIT_USAGE, EXIT_UNHEALTHY = 1, 2, 3

R = TypeVar("R")


def told_clearly(function: Callable[..., R]) -> Callable[..., R]:
    """Make a command of a function: groups of options spread, our errors one line, a closed pipe a quiet end."""
    command = spread(function)

    @functools.wraps(command)
    def wrapped(**options: Any) -> R:  # noqa: ANN401  # of all types
        try:
            return command(**options)
        except KmqError as error:
            typer.echo(f"kmq: {error}", err=True)
            raise typer.Exit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED) from None
        except BrokenPipeError:
            # The reader of our output is gone: nothing is left to say, and the interpreter must not try again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None

    return wrapped


def run_alone(command: Callable[..., None]) -> None:
    """Run one command with the arguments of this process: for spark-submit and Databricks wheel tasks."""
    submitted = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings=HELP_OPTIONS)
    submitted.command(cls=OneLineCommand)(command)
    submitted()


def print_json(value: object) -> None:
    """Print one JSON object as one line, at once."""
    typer.echo(json.dumps(value, default=str))


def set_up_logs(level: str = "INFO") -> None:
    """Send the log to stderr, a line an event."""
    logging.basicConfig(
        level=level, stream=sys.stderr, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", force=True
    )
    # py4j logs every command that fails in a stopping JVM, whole stacks, some of them by the root logger's name.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda record: "py4j" not in Path(record.pathname).parts)
