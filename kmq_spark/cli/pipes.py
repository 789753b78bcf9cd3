"""
`kmq send` and `kmq receive`: use a queue in a shell pipe, one message a line.

Rule 1: `receive` acknowledges a message after its line is written and flushed. If the reader has closed the pipe, the
message remains in the queue.
Rule 2: `send --json` reads the output of `receive -o jsonl`.
Rule 3: a value is written unchanged to a pipe or file. On a terminal it is escaped, because its sender is not trusted.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kmq_spark.cli.queue import Name
from kmq_spark.cli.shared.common import one_line_errors
from kmq_spark.cli.shared.looking import quiet_client
from kmq_spark.cli.shared.options import Connection
from kmq_spark.cli.shared.output import Output, OutputForm, json_bytes, shown
from kmq_spark.errors import ConfigError
from kmq_spark.inspection.spans import counted

if TYPE_CHECKING:
    from kmq_spark.consumer.message import Message

RECEIVED_AT_ONCE = 500
POLL_S = 0.5


@one_line_errors
def send(
    name: Name,
    connection: Connection,
    as_json: Annotated[bool, typer.Option("--json", help="Lines are JSON objects: value, key, headers.")] = False,
    key_separator: Annotated[
        str | None, typer.Option(help="Text between key and value in a line; without it there is no key.")
    ] = None,
) -> None:
    """Send a message for each line of stdin, as it is or as a JSON object; ends when all are written."""
    from kmq_spark.configured import producer_from

    quiet_client()
    settings = connection.settings()
    count = 0
    with producer_from(settings, name) as producer:
        for number, line in enumerate(sys.stdin.buffer, 1):
            text = line.removesuffix(b"\n").removesuffix(b"\r")
            value, options = _from_json(text, number) if as_json else _from_line(text, key_separator)
            producer.send(value, **options)
            count = number
    typer.echo(f"sent {counted(count, 'message')} to {name}", err=True)


@one_line_errors
def receive(
    name: Name,
    connection: Connection,
    output: Output = OutputForm.TABLE,
    limit: Annotated[int | None, typer.Option("-n", "--limit", help="Messages, then end.", min=1)] = None,
    wait_ms: Annotated[
        int | None, typer.Option(help="End when nothing came for this long; without it, Ctrl+C ends it.", min=0)
    ] = None,
) -> None:
    """Write each message as a line, its value or a JSON object (-o jsonl), and acknowledge it once it is written."""
    from kmq_spark.configured import consumer_from

    quiet_client()
    settings = connection.settings()
    stopping = _Stopping()
    left, heard_s = limit, time.monotonic()
    # Leaving the block releases messages that are not acknowledged. Deliveries of prefetched messages, which `receive`
    # has not returned yet, do not count.
    with consumer_from(settings, name) as consumer:
        while not stopping.is_asked and left != 0:
            messages = consumer.receive(min(RECEIVED_AT_ONCE, left or RECEIVED_AT_ONCE), timeout=POLL_S)
            if messages:
                heard_s = time.monotonic()
            elif wait_ms is not None and time.monotonic() - heard_s > wait_ms / 1000:
                break
            for message in messages:
                if stopping.is_asked:
                    message._release_unseen()  # noqa: SLF001  # private to the package: not for handlers
                    continue
                _write(message, output)
                message.ack()
            left = None if left is None else left - len(messages)


class _Stopping:
    """Handle SIGTERM and Ctrl+C; a second signal ends the process."""

    def __init__(self) -> None:
        """Install the signal handlers."""
        self.is_asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._hear)

    def _hear(self, number: int, _frame: object) -> None:
        self.is_asked = True
        signal.signal(number, signal.SIG_DFL)


def _from_line(line: bytes, key_separator: str | None) -> tuple[bytes, dict[str, Any]]:
    if not key_separator:
        return line, {}
    key, found, value = line.partition(key_separator.encode())
    return (value, {"key": key}) if found else (line, {})


def _from_json(line: bytes, number: int) -> tuple[bytes | None, dict[str, Any]]:
    try:
        given = json.loads(line)
    except ValueError as error:
        raise _wrong(number, f"it is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise _wrong(number, f"got {type(given).__name__}")
    try:
        options: dict[str, Any] = {}
        if (key := _bytes(given, "key")) is not None:
            options["key"] = key
        if given.get("headers"):
            options["headers"] = [(str(each["name"]), _bytes(each, "value")) for each in given["headers"]]
        return _bytes(given, "value"), options
    except (TypeError, ValueError, KeyError) as error:
        raise _wrong(number, f"{type(error).__name__}: {error}") from None


def _wrong(number: int, why: str) -> ConfigError:
    return ConfigError(
        f"line {number} of stdin is not a message: {why}; allowed is an object with value or value_hex, and key, "
        f"headers [{{name, value}}]; {number - 1} lines before it were sent"
    )


def _bytes(given: dict[str, Any], name: str) -> bytes | None:
    if given.get(f"{name}_hex") is not None:
        return bytes.fromhex(given[f"{name}_hex"])
    value = given.get(name)
    if value is None:
        return None
    return value.encode() if isinstance(value, str) else json.dumps(value).encode()


def _write(message: Message, output: OutputForm) -> None:
    if output is OutputForm.TABLE:
        value = message.value or b""
        sys.stdout.buffer.write((shown(value).encode() if sys.stdout.isatty() else value) + b"\n")
    else:
        row = {
            "id": message.id.text,
            "delivery_count": message.delivery_count,
            **json_bytes("key", message.key),
            **json_bytes("value", message.value),
            "headers": [{"name": name, **json_bytes("value", value)} for name, value in message.headers],
        }
        sys.stdout.buffer.write(json.dumps(row).encode() + b"\n")
    sys.stdout.buffer.flush()
