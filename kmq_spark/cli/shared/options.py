"""
The options that commands share, and the settings that they give.

Rule 1: The options of the connection belong to `kmq`. They may stand anywhere on the line: Kafka's own tools have them
behind the command. A command gets them as a parameter of type `Connection`.
Rule 2: A group of options is a frozen dataclass whose fields have typer annotations. If a command has a parameter of
this type, `spread` replaces the parameter by the options of the group.
"""

from __future__ import annotations

import functools
import inspect
import re
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperGroup

from kmq_spark.client_properties import read_properties, to_java, to_librdkafka
from kmq_spark.config import Reach, Settings, load_settings
from kmq_spark.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

R = TypeVar("R")

SECRET = re.compile(r"password|secret|token|credential|jaas|\.key(\.|$)|\.pem$", re.IGNORECASE)
"""Keys whose value should not be visible in `ps`."""

_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)(ms|s|m|h|d|)")
_UNIT_S = {"ms": 0.001, "s": 1, "": 1, "m": 60, "h": 3_600, "d": 86_400}

_SHARED = frozenset({"--bootstrap-server", "--config", "--command-config", "-X", "--log-level", "--log-format"})

QueueName = Annotated[str, typer.Argument(help="Name of the queue, or queue@subscription.", metavar="QUEUE")]
Events = Annotated[bool, typer.Option("--events", help="Print a JSON line when ready and when ended.")]
Master = Annotated[str, typer.Option(help="Spark master; under spark-submit the submitted one.")]
DriverMemory = Annotated[str, typer.Option(help="Heap of the Spark driver.")]
Execute = Annotated[bool, typer.Option("--execute", help="Do it; without this option, only show what would be done.")]


class LogLevel(StrEnum):
    """Levels of our own log."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"


class LogFormat(StrEnum):
    """Forms of our own log: a line of text, or a JSON object with the `action` and the queue of the event."""

    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True)
class Given:
    """What was given on the command line of the connection, the settings and the log."""

    bootstrap_server: Annotated[
        str | None, typer.Option("--bootstrap-server", help="Broker, host:port, comma-separated.", metavar="HOST:PORT")
    ] = None
    config: Annotated[
        Path | None, typer.Option("--config", help="Settings file (TOML); see conf/local.toml.", metavar="FILE")
    ] = None
    command_config: Annotated[
        Path | None,
        typer.Option(
            "--command-config", help="Client properties, key=value lines, as Kafka's tools take.", metavar="FILE"
        ),
    ] = None
    client_settings: Annotated[
        list[str] | None,
        typer.Option("-X", help="One librdkafka setting, key=value; may be repeated.", metavar="KEY=VALUE"),
    ] = None
    log_level: Annotated[
        LogLevel | None, typer.Option("--log-level", help="Level of our own log.", case_sensitive=False)
    ] = None
    log_format: Annotated[
        LogFormat, typer.Option("--log-format", help="Form of our own log; JSON lines have the action and the queue.")
    ] = LogFormat.TEXT


class Kmq(TyperGroup):
    """`kmq`, whose own options may stand anywhere on the line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401  # the parser's own class
        """Parse the line with the shared options in front."""
        shared: list[str] = []
        others: list[str] = []
        words = iter(args)
        for word in words:
            if word == "--":
                others += [word, *words]
            elif word in _SHARED:
                shared += [word, *([value] if (value := next(words, None)) is not None else [])]
            elif word.partition("=")[0] in _SHARED or word.startswith("-X"):
                shared.append(word)
            else:
                others.append(word)
        return super().parse_args(ctx, shared + others)


given = Given()
"""Set by `kmq` before a command runs."""


def note(found: Given) -> None:
    """Keep what was given, for the command that runs now."""
    global given  # noqa: PLW0603  # one command line a process
    given = found


@dataclass(frozen=True)
class Connection:
    """The connection and the settings that the options of `kmq`, the environment and the files name."""

    def settings(self, **flags: Mapping[str, Any]) -> Settings:
        """
        Return the settings; *flags* are values by section, before all others.

        Client settings may have the names of the Java client or of librdkafka; they are translated for each client.
        """
        pairs = dict(_pair(text, "-X") for text in given.client_settings or [])
        _warn_of_secrets(pairs)
        properties = {**(read_properties(given.command_config) if given.command_config else {}), **pairs}
        # As in Kafka's own tools, the file may contain the address; the flag takes precedence.
        in_file = properties.pop("bootstrap.servers", None)
        kafka: dict[str, Any] = {
            "bootstrap_servers": given.bootstrap_server or in_file,
            "extra": to_librdkafka(properties) or None,
            "spark_extra": to_java(properties) or None,
        }
        return load_settings(given.config, {"kafka": kafka, **flags})

    def reach(self) -> Reach:
        """Return the connection arguments for a client."""
        return self.settings().kafka.reach()


def seconds(text: str, option: str) -> float:
    """Return a duration in seconds: `30s`, `5m`, `2h`, `7d`, or a plain number of seconds."""
    if (found := _DURATION.fullmatch(text)) is None:
        message = f"{option} is not a duration: got {text!r}; expected 30s, 5m, 2h or a number of seconds"
        raise ConfigError(message)
    return float(found[1]) * _UNIT_S[found[2]]


def spread(command: Callable[..., R]) -> Callable[..., R]:
    """Return a command with single options in place of its option groups, which typer does not support."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    taken: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            taken.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name]))
            continue
        own = get_type_hints(groups[name], include_extras=True)
        taken += [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=own[field.name]
            )
            for field in fields(groups[name])
        ]

    @functools.wraps(command)
    def spreading(**options: Any) -> R:
        gathered = {
            name: group(**{field.name: options.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        return command(**gathered, **options)

    spreading.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]  # PEP 362
    spreading.__annotations__ = {parameter.name: parameter.annotation for parameter in taken}
    return spreading


def _warn_of_secrets(pairs: Mapping[str, str]) -> None:
    for key in pairs:
        if SECRET.search(key):
            typer.echo(
                f"kmq: warning: -X {key}=… is visible to every user in `ps`; put it into a file of mode 0600 "
                "(--command-config) or into KMQ_KAFKA__EXTRA",
                err=True,
            )


def _pair(text: str, source: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        # The text is not shown: it may be a password without its key.
        message = f"a client setting in {source} has no key or no '=': allowed is key=value; correct it"
        raise ConfigError(message)
    return key.strip(), value.strip()
