"""`kmq doctor`: find problems of a queue and name the repairs."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kmq_spark.cli.shared.common import EXIT_UNHEALTHY, one_line_errors
from kmq_spark.cli.shared.looking import inspector_of, reading
from kmq_spark.cli.shared.options import Connection, QueueName
from kmq_spark.cli.shared.output import Output, OutputForm, print_rows, rendered, shown, table
from kmq_spark.errors import KafkaClientError

if TYPE_CHECKING:
    from rich.table import Table

    from kmq_spark.config import Settings
    from kmq_spark.inspection.facts import QueueFacts
    from kmq_spark.inspection.findings import Finding

ONE_HOUR_MS = 60 * 60 * 1000

_SIGNS = {"ok": "ok", "warning": "WARN", "unhealthy": "FAIL"}


@one_line_errors
def doctor(
    name: QueueName,
    connection: Connection,
    output: Output = OutputForm.TABLE,
    checkpoint_dir: Annotated[
        str | None, typer.Option(help="The tracker's checkpoint folder, to look at it too.")
    ] = None,
) -> None:
    """Check a queue from its broker to its dead letters, and name each repair. Exit code 3: unhealthy."""
    report(_findings(name, connection.settings(tracker={"checkpoint_dir": checkpoint_dir})), output)


def report(found: list[Finding], output: OutputForm) -> None:
    """Print findings, with the repairs where it is a table; end with exit code 3 where one is unhealthy."""
    from kmq_spark.inspection.findings import is_unhealthy

    print_rows(output, [asdict(finding) for finding in found], lambda: as_table(found))
    if output is OutputForm.TABLE:
        typer.echo(repairs(found))
    if is_unhealthy(found):
        raise typer.Exit(EXIT_UNHEALTHY)


def _findings(name: str, settings: Settings) -> list[Finding]:
    from kmq_spark.inspection.findings import examine, unreachable_finding

    try:
        return examine(gather(name, settings))
    except KafkaClientError as error:
        return [unreachable_finding(error)]


def gather(name: str, settings: Settings) -> QueueFacts:
    """
    Collect the facts that the checks need.

    Args:
        name: Queue or `queue@subscription`.
        settings: Connection, settings of the queue, checkpoint folder.

    Raises:
        ConfigError: The name is not allowed.
        KafkaClientError: The broker cannot be reached, or does not answer in time.
    """
    from kmq_spark.cli.checkpoint import look_at_checkpoint
    from kmq_spark.inspection.facts import GroupFacts, QueueFacts, TrackerFacts
    from kmq_spark.inspection.findings import OPEN_TOO_LONG_MS
    from kmq_spark.inspection.groups import look_at_fleets
    from kmq_spark.inspection.producers import look_at_producers
    from kmq_spark.kafka.queue_rules import checked_rules, read_rules, rules_by_name

    with inspector_of(name, settings) as inspector:
        topics, cluster = inspector.topics, inspector.cluster
        brokers = cluster.facts()
        local = settings.for_queue(name)
        stored = read_rules(name, **settings.kafka.reach())
        # The settings apply where the queue has no rule of its own.
        own = {} if stored is None else {rule: value for rule, value in stored.to_dict().items() if value is not None}
        rules = checked_rules({**rules_by_name(local), **own})
        queue, markers, letters = cluster.topics(topics.all_topics).values()
        exists = bool(queue.partition_count and markers.partition_count)
        with reading(name) as on_progress:
            views = inspector.refresh(on_progress) if exists else {}
        consumers = cluster.group(topics.consumer_group, queue.name) if exists else GroupFacts(topics.consumer_group)
        now_ms = int(time.time() * 1000)
        producers = look_at_producers(cluster, topics, settings.kafka.reach())
        coordination = settings.tracker.coordination_topic
        fleets = look_at_fleets(cluster, name, topic=coordination, now_ms=now_ms, reach=settings.kafka.reach())
        recent = cluster.offsets_at(letters.name, letters.end, now_ms - ONE_HOUR_MS)
        return QueueFacts(
            queue=name,
            now_ms=now_ms,
            cluster=brokers,
            queue_topic=queue,
            markers_topic=markers,
            dead_letter_topic=letters,
            consumers=consumers,
            tracker=inspector.tracker(markers) if exists else TrackerFacts(topics.tracker_group),
            ready=inspector.ready(queue, consumers.positions),
            dead_letters=inspector.dead_letters(letters),
            new_dead_letters=inspector.backlog(letters.name, recent, letters.end).count,
            views=views,
            lease_ms=rules.lease_ms,
            max_deliveries=rules.max_deliveries,
            rules="" if stored is None else stored.text,
            rules_differing=() if stored is None else tuple(stored.differing(local)),
            checkpoint=look_at_checkpoint(settings.tracker.checkpoint_dir, name),
            producers=producers,
            fleets=fleets,
            blocked={each.name: cluster.blocked(each, now_ms - OPEN_TOO_LONG_MS) for each in (queue, markers, letters)},
        )


def as_table(found: list[Finding]) -> Table:
    """Return findings as a table."""
    return table(
        ("", "CHECK", "FOUND"),
        [(_SIGNS[finding.level.value], finding.check, shown(finding.what)) for finding in found],
    )


def repairs(found: list[Finding]) -> str:
    """Return the repairs of findings, or that there is nothing to repair."""
    bad = [finding for finding in found if finding.repair]
    if not bad:
        return "\nhealthy"
    rows = [(f"{number}.", finding.check, shown(finding.repair)) for number, finding in enumerate(bad, 1)]
    return "\n" + rendered(table(("", "CHECK", "WHAT TO DO"), rows))
