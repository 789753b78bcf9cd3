"""
What every command shares: connection options, exit codes, logs.

Rule 1: exit 0 well, 1 failed, 2 usage, 3 unhealthy; an error is one line on stderr, never a traceback.
Rule 2: data goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer

from kmq_spark.client_properties import parse_properties, to_java, to_librdkafka
from kmq_spark.config import Settings, load_settings
from kmq_spark.errors import ConfigError, KmqError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

EXIT_FAILED, EXIT_USAGE, EXIT_UNHEALTHY = 1, 2, 3

SECRET = re.compile(r"password|secret|token|credential|jaas|\.key\.|\.pem$", re.IGNORECASE)
"""Keys whose value `ps` should not show."""

P = ParamSpec("P")
R = TypeVar("R")

BootstrapServer = Annotated[
    str | None, typer.Option("--bootstrap-server", help="Broker, host:port, comma-separated.", metavar="HOST:PORT")
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="Settings file (TOML); see conf/local.toml.", metavar="FILE")
]
CommandConfig = Annotated[
    Path | None,
    typer.Option("--command-config", help="Client properties, key=value lines, as Kafka's tools take.", metavar="FILE"),
]
ClientSetting = Annotated[
    list[str] | None,
    typer.Option("-X", help="One librdkafka setting, key=value; may be repeated.", metavar="KEY=VALUE"),
]
TimeoutMs = Annotated[
    int | None, typer.Option("--timeout-ms", help="Longest wait for an answer of the broker.", metavar="MS")
]


def settings_from(
    config: Path | None,
    bootstrap_server: str | None,
    command_config: Path | None,
    client_settings: list[str] | None,
    timeout_ms: int | None = None,
    **flags: Mapping[str, Any],
) -> Settings:
    """
    Put the settings together from a command's options.

    Client settings may go by the Java client's names or by librdkafka's: both clients get them by their own.

    Raises:
        ConfigError: A source cannot be read or a value is not allowed.
    """
    pairs = dict(_pair(text, "-X") for text in client_settings or [])
    _warn_of_secrets(pairs)
    given = {**_properties(command_config), **pairs}
    # Kafka's own tools take the address from the file too, where no flag gives it.
    address = given.pop("bootstrap.servers", None)
    kafka: dict[str, Any] = {
        "bootstrap_servers": bootstrap_server or address,
        "extra": to_librdkafka(given) or None,
        "spark_extra": to_java(given) or None,
        "timeout_ms": timeout_ms,
    }
    return load_settings(config, {"kafka": kafka, **flags})


def _warn_of_secrets(pairs: Mapping[str, str]) -> None:
    for key in pairs:
        if SECRET.search(key):
            typer.echo(
                f"kmq: warning: -X {key}=… is shown to everybody by `ps`; put it into a file of mode 0600 "
                "(--command-config) or into KMQ_KAFKA__EXTRA",
                err=True,
            )


def _properties(file: Path | None) -> dict[str, str]:
    if file is None:
        return {}
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        message = f"cannot read the client properties: got {str(file)!r}: {why}; give an existing file"
        raise ConfigError(message) from error
    return parse_properties(text, str(file))


def _pair(text: str, source: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        # The text is not shown: it may be a password with its key left out.
        message = f"a client setting in {source} has no key or no '=': allowed is key=value; correct it"
        raise ConfigError(message)
    return key.strip(), value.strip()


def told_clearly(command: Callable[P, R]) -> Callable[P, R]:
    """Turn our errors into one line and an exit code, and a closed pipe into a quiet end."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except KmqError as error:
            typer.echo(f"kmq: {error}", err=True)
            raise typer.Exit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED) from None
        except BrokenPipeError:
            # The reader of our output is gone: nothing is left to say, and the interpreter must not try again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None

    return wrapped


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
