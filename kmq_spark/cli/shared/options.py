"""
Shared options of commands for the broker and the settings, and groups of options as one parameter.

Rule 1: a group of options is a frozen dataclass whose fields have typer annotations. If a command has a parameter of
this type, `spread` replaces the parameter by the options of the group.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer
from rich.markup import escape

from kmq_spark.client_properties import parse_properties, to_java, to_librdkafka
from kmq_spark.config import Reach, Settings, load_settings
from kmq_spark.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

R = TypeVar("R")

SECRET = re.compile(r"password|secret|token|credential|jaas|\.key(\.|$)|\.pem$", re.IGNORECASE)
"""Keys whose value should not be visible in `ps`."""

_SPAN = re.compile(r"([0-9]{1,9})(ms|s|m|h|d)")
_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

QueueName = Annotated[str, typer.Argument(help="Name of the queue, or queue@subscription.", metavar="QUEUE")]
BootstrapServer = Annotated[
    str | None, typer.Option("--bootstrap-server", help="Broker, host:port, comma-separated.", metavar="HOST:PORT")
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="Settings file (TOML); see conf/local.toml.", metavar="FILE")
]
Timeout = Annotated[
    str | None, typer.Option("--timeout", help="Longest wait for an answer of the broker: 15s, 1m.", metavar="TIME")
]
Events = Annotated[bool, typer.Option("--events", help="Print a JSON line when ready and when ended.")]
Master = Annotated[str, typer.Option(help="Spark master; under spark-submit the submitted one.")]
DriverMemory = Annotated[str, typer.Option(help="Heap of the Spark driver.")]
LogLevel = Annotated[str, typer.Option(help="Level of our own log.")]


@dataclass(frozen=True)
class Address:
    """Options for the address of the broker and the client settings, including credentials."""

    bootstrap_server: BootstrapServer = None
    config: ConfigFile = None
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


@dataclass(frozen=True)
class Connection(Address):
    """Options for the address and the timeout."""

    timeout: Timeout = None

    def settings(self, **flags: Mapping[str, Any]) -> Settings:
        """Return the settings; see `settings_from`."""
        return settings_from(self, self.timeout, **flags)

    def reach(self) -> Reach:
        """Return the connection arguments for a client."""
        return self.settings().kafka.reach()


def span_ms(text: str) -> int | None:
    """Return a duration such as `90s`, `15m`, `2h` or `7d` in milliseconds; None if the text is no duration."""
    found = _SPAN.fullmatch(text)
    return None if found is None else int(found[1]) * _UNIT_MS[found[2]]


def seconds(text: str, option: str) -> float:
    """
    Return a duration in seconds: `30s`, `5m`, `2h`, or a plain number of seconds.

    Raises:
        ConfigError: The text is no duration.
    """
    if (found_ms := span_ms(text)) is not None:
        return found_ms / 1000
    try:
        return float(text)
    except ValueError:
        message = f"{option} is not a duration: got {text!r}; expected 30s, 5m, 2h or a number of seconds"
        raise ConfigError(message) from None


def settings_from(address: Address, timeout: str | None = None, **flags: Mapping[str, Any]) -> Settings:
    """
    Build the settings from the options of a command.

    Client settings may have the names of the Java client or of librdkafka; they are translated for each client.

    Raises:
        ConfigError: A source cannot be read or a value is not allowed.
    """
    pairs = dict(_pair(text, "-X") for text in address.client_settings or [])
    _warn_of_secrets(pairs)
    given = {**_properties(address.command_config), **pairs}
    # As in Kafka's own tools, the file may contain the address; the flag takes precedence.
    in_file = given.pop("bootstrap.servers", None)
    kafka: dict[str, Any] = {
        "bootstrap_servers": address.bootstrap_server or in_file,
        "extra": to_librdkafka(given) or None,
        "spark_extra": to_java(given) or None,
        "timeout": None if timeout is None else seconds(timeout, "--timeout"),
    }
    return load_settings(address.config, {"kafka": kafka, **flags})


def spread(command: Callable[..., R]) -> Callable[..., R]:
    """
    Return a command with single options in place of its option groups, which typer does not support.

    Args:
        command: The command; its annotations are evaluated now.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    taken: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        own = get_type_hints(groups[name], include_extras=True) if name in groups else {}
        for field in fields(groups[name]) if name in groups else ():
            taken[field.name] = inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=_literal(own[field.name])
            )
        if name not in groups:
            taken[name] = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=_literal(hints[name]))

    @functools.wraps(command)
    def spreading(**options: Any) -> R:
        gathered = {
            name: group(**{field.name: options.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        return command(**gathered, **options)

    spreading.__signature__ = inspect.Signature(list(taken.values()))  # type: ignore[attr-defined]  # PEP 362
    spreading.__annotations__ = {name: parameter.annotation for name, parameter in taken.items()}
    return spreading


def _literal(annotation: Any) -> Any:  # noqa: ANN401  # any type hint
    """Escape the help text of an annotation: typer would interpret `[tracker]` as markup and omit it."""
    if not hasattr(annotation, "__metadata__"):
        return annotation
    metadata = []
    for each in annotation.__metadata__:
        shown = copy.copy(each)
        if isinstance(getattr(shown, "help", None), str):
            shown.help = escape(shown.help)
        metadata.append(shown)
    return Annotated.__class_getitem__((annotation.__origin__, *metadata))  # type: ignore[attr-defined]  # at run time


def _warn_of_secrets(pairs: Mapping[str, str]) -> None:
    for key in pairs:
        if SECRET.search(key):
            typer.echo(
                f"kmq: warning: -X {key}=… is visible to every user in `ps`; put it into a file of mode 0600 "
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
        # The text is not shown: it may be a password without its key.
        message = f"a client setting in {source} has no key or no '=': allowed is key=value; correct it"
        raise ConfigError(message)
    return key.strip(), value.strip()
