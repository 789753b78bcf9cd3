"""
`kmq send` and `kmq receive`: use a queue in a shell pipe, one message a line; `kmq message show`: one message's story.

Rule 1: `receive` acknowledges a message after its line is written and flushed. If the reader has closed the pipe, the
message remains in the queue.
Rule 2: `send --json` reads the output of `receive -o jsonl`.
Rule 3: a value is written unchanged to a pipe or file. On a terminal it is escaped, because its sender is not trusted.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kmq_spark.cli.shared.common import StopOnSignals, command, counting, fail, inspector_of, quiet_client
from kmq_spark.cli.shared.options import Connection, QueueName, seconds
from kmq_spark.cli.shared.output import Output, OutputForm, json_bytes, print_rows, rendered, shown, table
from kmq_spark.core.markers import MessageId
from kmq_spark.errors import ConfigError
from kmq_spark.inspection.spans import counted, instant

if TYPE_CHECKING:
    from rich.table import Table

    from kmq_spark.consumer.message import Message
    from kmq_spark.inspection.story import Content, Event

app = typer.Typer(help="One message.", no_args_is_help=True)

LogicalQueue = Annotated[
    str | None, typer.Option("--logical-queue", help="The logical queue; by default the messages without one.")
]

RECEIVED_AT_ONCE = 500
POLL_S = 0.5
SHOWN_BYTES = 1_000

MAX_LISTED = 10


@app.callback()
def _message() -> None:
    """One message."""


@command(app, "show")
def show(
    name: QueueName,
    connection: Connection,
    message_id: Annotated[
        str | None, typer.Argument(help="Any copy of it, partition:offset.", metavar="P:O", show_default=False)
    ] = None,
    key: Annotated[str | None, typer.Option(help="The newest message with this key, in place of P:O.")] = None,
    output: Output = OutputForm.TABLE,
    max_bytes: Annotated[int, typer.Option(help="What is shown of key, value and headers.", min=1)] = SHOWN_BYTES,
) -> None:
    """Show a message's story from its first copy: sent, started, renewed, ended, redelivered, dead, redriven."""
    from kmq_spark.inspection.story import StoryReader, is_ready

    if (message_id is None) == (key is None):
        got = "neither" if key is None else "both"
        raise ConfigError(f"message show takes one message: got {got}; give P:O as in 0:42, or --key")
    wanted = None if message_id is None else MessageId.parse(message_id)
    if message_id is not None and wanted is None:
        message = (
            f"message id is not allowed: got {message_id!r}; expected partition:offset as in 0:42; see `kmq queue peek`"
        )
        raise ConfigError(message)
    settings = connection.settings()
    with inspector_of(name, settings) as inspector, counting(inspector.topics.queue, "records") as on_progress:
        reader = StoryReader(inspector, settings.kafka.timeout, on_progress)
        if key is not None:
            found = reader.sent_with(key.encode())
            wanted = found[-1] if found else None
            if older := found[:-1]:
                others = ", ".join(each.text for each in older[-MAX_LISTED:])
                typer.echo(f"{counted(len(older), 'older message')} with this key: {others}", err=True)
        content, events = (None, []) if wanted is None else reader.read(wanted)
    if wanted is None or not events:
        asked = f"with key {key!r}" if message_id is None else message_id
        raise fail(f"message {asked} not found in {name}: it never existed or retention deleted it")
    if output is OutputForm.TABLE:
        typer.echo(_head(wanted.text, content, max_bytes))
    print_rows(output, [event._asdict() for event in events], lambda: _events(events))
    if output is OutputForm.TABLE and is_ready(events, inspector.topics.queue_topic):
        typer.echo("\nready: no consumer has started it")


def send(
    name: QueueName,
    connection: Connection,
    logical_queue: LogicalQueue = None,
    as_json: Annotated[bool, typer.Option("--json", help="Lines are JSON objects: value, key, headers.")] = False,
    key_separator: Annotated[
        str | None, typer.Option(help="Text between key and value in a line; without it there is no key.")
    ] = None,
    delay: Annotated[
        str | None, typer.Option(help="Not handed out before this time: 30s, 15m, 2h.", metavar="DURATION")
    ] = None,
    ttl: Annotated[
        str | None, typer.Option(help="Not handed out after this time, as --delay.", metavar="DURATION")
    ] = None,
) -> None:
    """Send a message for each line of stdin, as it is or as a JSON object; ends when all are written."""
    from kmq_spark.producer.producer import QueueProducer

    quiet_client()
    delay_s = None if delay is None else seconds(delay, "--delay")
    ttl_s = None if ttl is None else seconds(ttl, "--ttl")
    count = 0
    with QueueProducer(name, **connection.reach()) as producer:
        for number, line in enumerate(sys.stdin.buffer, 1):
            text = line.removesuffix(b"\n").removesuffix(b"\r")
            value, options = _from_json(text, number) if as_json else _from_line(text, key_separator)
            producer.send(value, logical_queue=logical_queue, delay=delay_s, ttl=ttl_s, **options)
            count = number
    typer.echo(f"sent {counted(count, 'message')} to {name}", err=True)


def receive(
    name: QueueName,
    connection: Connection,
    output: Output = OutputForm.TABLE,
    logical_queue: LogicalQueue = None,
    limit: Annotated[int | None, typer.Option("-n", "--limit", help="Messages, then end.", min=1)] = None,
    wait: Annotated[
        str | None,
        typer.Option(help="End when nothing came for so long; without it, Ctrl+C ends it.", metavar="DURATION"),
    ] = None,
) -> None:
    """Write each message as a line, its value or a JSON object (-o jsonl), and acknowledge it once it is written."""
    from kmq_spark.consumer.consumer import QueueConsumer

    quiet_client()
    wait_s = None if wait is None else seconds(wait, "--wait")
    signals = StopOnSignals()
    left, heard_s = limit, time.monotonic()
    # Leaving the block releases messages that are not acknowledged. Deliveries of prefetched messages, which `receive`
    # has not returned yet, do not count.
    with QueueConsumer(name, logical_queue=logical_queue or "", **connection.reach()) as consumer:
        while not signals.is_asked and left != 0:
            messages = consumer.receive(min(RECEIVED_AT_ONCE, left or RECEIVED_AT_ONCE), timeout=POLL_S)
            if messages:
                heard_s = time.monotonic()
            elif wait_s is not None and time.monotonic() - heard_s > wait_s:
                break
            for message in messages:
                if signals.is_asked:
                    message._release_uncounted()  # noqa: SLF001  # private to the package: not for handlers
                    continue
                _write(message, output)
                message.ack()
            left = None if left is None else left - len(messages)


def _from_line(line: bytes, key_separator: str | None) -> tuple[bytes, dict[str, Any]]:
    if not key_separator:
        return line, {}
    key, found, value = line.partition(key_separator.encode())
    return (value, {"key": key}) if found else (line, {})


def _from_json(line: bytes, number: int) -> tuple[bytes | None, dict[str, Any]]:
    try:
        given = json.loads(line)
        if not isinstance(given, dict):
            raise TypeError(f"got {type(given).__name__}")  # noqa: TRY301  # as what follows
        options: dict[str, Any] = {}
        if (key := _bytes(given, "key")) is not None:
            options["key"] = key
        if given.get("headers"):
            options["headers"] = [(str(each["name"]), _bytes(each, "value")) for each in given["headers"]]
        return _bytes(given, "value"), options
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(
            f"line {number} of stdin is not a message: {type(error).__name__}: {error}; expected an object with value "
            f"or value_hex, and key, headers [{{name, value}}]; {number - 1} lines before it were sent"
        ) from None


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


def _head(message_id: str, content: Content | None, max_bytes: int) -> str:
    if content is None:
        return f"message  {message_id}, its payload is gone\n"
    value = content.value
    size = 0 if value is None else len(value)
    lines: list[tuple[str, str]] = [
        ("message", message_id),
        ("key", shown(content.key, max_bytes)),
        ("value", f"{size} bytes: {shown(value, max_bytes)}"),
        *((shown(header), shown(each, max_bytes)) for header, each in content.headers),
    ]
    return rendered(table(("", ""), lines)).lstrip("\n") + "\n"


def _events(events: list[Event]) -> Table:
    from kmq_spark.inspection.story import merge_renewals

    return table(
        ("AT", "WHAT", "BY", "WHERE"),
        [
            (instant(at_ms or None), shown(what), shown(by) or "-", shown(place))
            for at_ms, place, what, by in merge_renewals(events)
        ],
    )
