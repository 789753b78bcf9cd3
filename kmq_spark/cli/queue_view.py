"""`kmq queue list` and `kmq queue peek`: list the queues of a cluster, and show messages of one queue."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from kmq_spark.cli.queue import Name, app
from kmq_spark.cli.shared.common import command, counting, inspector_of, quiet_client
from kmq_spark.cli.shared.options import Connection
from kmq_spark.cli.shared.output import Output, OutputForm, json_bytes, print_rows, shown, table
from kmq_spark.inspection.spans import span
from kmq_spark.wire.headers import (
    DELAY_MS,
    LOGICAL_QUEUE,
    NOT_BEFORE_MS,
    by_name,
    delivery_count_of,
    read_number,
    text_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.table import Table

    from kmq_spark.config import Settings
    from kmq_spark.inspection.inspector import QueueInspector
    from kmq_spark.inspection.markers_fold import HeldMessage
    from kmq_spark.wire.headers import Headers

SHOWN_BYTES = 200


@command(app, "list")
def list_queues(
    connection: Connection,
    output: Output = OutputForm.TABLE,
) -> None:
    """List queues and subscriptions (queue@subscription): what is ready, dead, how far the tracker is behind."""
    from kmq_spark.inspection.cluster import Cluster, queues_of

    settings = connection.settings()
    quiet_client()
    cluster = Cluster(**settings.kafka.reach())
    rows = [_row(queue, settings) for queue in queues_of(cluster.metadata().topics)]
    print_rows(output, rows, lambda: _queues(rows))


@command(app, "peek")
def peek(
    name: Name,
    connection: Connection,
    output: Output = OutputForm.TABLE,
    in_flight: Annotated[bool, typer.Option("--in-flight", help="Only messages that a consumer holds.")] = False,
    ready: Annotated[bool, typer.Option("--ready", help="Only messages that no consumer has started.")] = False,
    limit: Annotated[int, typer.Option("-n", "--limit", help="Most messages shown.", min=1, max=100_000)] = 10,
) -> None:
    """Show messages in flight and messages ready, the oldest first, without taking any."""
    settings = connection.settings()
    rows: list[dict[str, Any]] = []
    with inspector_of(name, settings) as inspector:
        inspector.queue_partitions()
        if in_flight or not ready:
            with counting(inspector.topics.markers_topic) as on_progress:
                inspector.refresh(on_progress)
            rows += _held(inspector, settings, limit)
        if (ready or not in_flight) and len(rows) < limit:
            rows += _ready(inspector, limit - len(rows))
    print_rows(output, rows, lambda: _messages(rows))


def _row(queue: str, settings: Settings) -> dict[str, Any]:
    from kmq_spark.kafka.queue_rules import read_rules

    stored = read_rules(queue, **settings.kafka.reach())
    with inspector_of(queue, settings) as inspector:
        view = inspector.look(with_markers=False, with_members=True)
    return {
        "queue": queue,
        "partitions": view.queue_topic.partition_count,
        "ready": view.ready.count,
        "consumers": sum(
            len(group.members)
            for group in (view.consumers, *(each.group for each in view.logical.values()))
            if group is not None
        ),
        "dead_letters": view.dead_letters.count,
        "tracker_lag": view.tracker.unread.count if view.tracker.positions else None,
        "rules_version": stored.version if stored is not None else None,
    }


def _queues(rows: list[dict[str, Any]]) -> Table:
    heads = ("QUEUE", ">PARTITIONS", ">READY", ">CONSUMERS", ">DEAD LETTERS", ">TRACKER LAG", "RULES")
    rules = ["default" if row["rules_version"] is None else f"version {row['rules_version']}" for row in rows]
    return table(
        heads,
        [
            [*["never ran" if cell is None else str(cell) for cell in row.values()][:-1], text]
            for row, text in zip(rows, rules, strict=True)
        ],
    )


def _held(inspector: QueueInspector, settings: Settings, limit: int) -> Iterator[dict[str, Any]]:
    """Yield the messages in flight, in the order of their STARTs."""
    from kmq_spark.kafka.payloads import PayloadReader

    now_ms = int(time.time() * 1000)
    held = sorted(
        (each for fold in inspector.folds.values() for each in fold.messages()),
        key=lambda each: (each.started_at_ms or 0, each.queue_partition, each.message_offset),
    )[:limit]
    wanted: dict[int, list[int]] = {}
    for each in sorted(held):
        wanted.setdefault(each.queue_partition, []).append(each.message_offset)
    reader = PayloadReader(inspector.reader_config, inspector.topics.queue_topic, settings.kafka.timeout)
    try:
        payloads = {(each.partition, each.offset): each.message for each in reader.read(wanted)}
    finally:
        reader.close()
    for each in held:
        record = payloads.get((each.queue_partition, each.message_offset))
        yield {
            "id": f"{each.queue_partition}:{each.message_offset}",
            "state": _state(each, now_ms),
            "delivery_count": each.delivery_count,
            "age_ms": None if each.started_at_ms is None else max(0, now_ms - each.started_at_ms),
            "deadline_at_ms": each.deadline_at_ms,
            "due_at_ms": each.deadline_at_ms if each.is_deferred else None,
            "logical_queue": text_of(
                cast("Headers", (record.headers() if record is not None else None) or []), LOGICAL_QUEUE
            ),
            "consumer_id": each.consumer_id,
            **json_bytes("key", None if record is None else record.key(), SHOWN_BYTES),
            **json_bytes("value", None if record is None else record.value(), SHOWN_BYTES),
        }


def _state(held: HeldMessage, now_ms: int) -> str:
    if held.deadline_at_ms < 0:
        return "rejected"
    if held.is_deferred:
        return "deferred"
    return "overdue" if held.deadline_at_ms < now_ms else "in flight"


def _ready(inspector: QueueInspector, limit: int) -> Iterator[dict[str, Any]]:
    """Yield ready messages, partition by partition; there is no global order, as each consumer has other partitions."""
    now_ms = int(time.time() * 1000)
    for record in inspector.ready_records(limit):
        headers = cast("Headers", record.headers() or [])
        yield {
            "id": f"{record.partition()}:{record.offset()}",
            "state": "ready",
            "delivery_count": delivery_count_of(headers),
            "age_ms": max(0, now_ms - record.timestamp()[1]),
            "deadline_at_ms": None,
            "due_at_ms": _due_at_ms(headers, record.timestamp()[1]),
            "logical_queue": text_of(headers, LOGICAL_QUEUE),
            "consumer_id": "",
            **json_bytes("key", record.key(), SHOWN_BYTES),
            **json_bytes("value", record.value(), SHOWN_BYTES),
        }


def _due_at_ms(headers: Headers, appended_at_ms: int) -> int | None:
    """Return when a delayed message may be handed out, epoch milliseconds; None if it has no delay."""
    known = by_name(headers)
    due_at_ms = read_number(known.get(NOT_BEFORE_MS))
    delay_ms = read_number(known.get(DELAY_MS))
    if delay_ms is not None:
        due_at_ms = max(due_at_ms or 0, appended_at_ms + delay_ms)
    return due_at_ms


def _messages(rows: list[dict[str, Any]]) -> Table:
    now_ms = int(time.time() * 1000)
    columns: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("ID", lambda row: row["id"]),
        ("STATE", lambda row: row["state"]),
        (">DELIVERIES", lambda row: str(row["delivery_count"])),
        (">AGE", lambda row: "-" if row["age_ms"] is None else span(row["age_ms"])),
    ]
    # Show these two columns only if delays or logical queues are used, because a terminal is narrow.
    if any(row["due_at_ms"] is not None for row in rows):
        columns.append((">DUE IN", lambda row: "-" if row["due_at_ms"] is None else span(row["due_at_ms"] - now_ms)))
    if any(row["logical_queue"] for row in rows):
        columns.append(("LOGICAL QUEUE…", lambda row: shown(row["logical_queue"]) or "-"))
    columns += [
        ("HELD BY…", lambda row: shown(row["consumer_id"]) or "-"),
        ("KEY…", lambda row: _cell(row, "key")),
        ("VALUE…", lambda row: _cell(row, "value")),
    ]
    return table([head for head, _ in columns], [[cell(row) for _, cell in columns] for row in rows])


def _cell(row: dict[str, Any], name: str) -> str:
    cut = "…" if row.get(f"{name}_is_cut") else ""
    return (f"0x{row[f'{name}_hex']}" if f"{name}_hex" in row else shown(row[name])) + cut
