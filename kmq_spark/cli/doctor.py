"""`kmq doctor`: find problems of a queue and name the repairs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from kmq_spark.cli.shared.common import EXIT_UNHEALTHY, counting, inspector_of
from kmq_spark.cli.shared.options import Connection, QueueName
from kmq_spark.cli.shared.output import Output, OutputForm, print_rows, rendered, shown, table
from kmq_spark.errors import KafkaClientError

if TYPE_CHECKING:
    from rich.table import Table

    from kmq_spark.config import Settings
    from kmq_spark.inspection.facts import DoctorFacts
    from kmq_spark.inspection.findings import Finding

ONE_HOUR_MS = 60 * 60 * 1000

_SIGNS = {"ok": "ok", "warning": "WARN", "unhealthy": "FAIL"}


def doctor(name: QueueName, connection: Connection, output: Output = OutputForm.TABLE) -> None:
    """Check a queue from its broker to its dead letters, and name each repair. Exit code 3: unhealthy."""
    from kmq_spark.inspection.findings import examine, unreachable_finding

    try:
        found = examine(gather(name, connection.settings()))
    except KafkaClientError as error:
        found = [unreachable_finding(error)]
    report(found, output)


def report(found: list[Finding], output: OutputForm) -> None:
    """Print findings, with the repairs where it is a table; end with exit code 3 where one is unhealthy."""
    from kmq_spark.inspection.findings import is_unhealthy

    print_rows(output, [asdict(finding) for finding in found], lambda: as_table(found))
    if output is OutputForm.TABLE:
        typer.echo(repairs(found))
    if is_unhealthy(found):
        raise typer.Exit(EXIT_UNHEALTHY)


def gather(name: str, settings: Settings) -> DoctorFacts:
    """Collect the facts that the checks need."""
    from kmq_spark.inspection.facts import DoctorFacts
    from kmq_spark.inspection.findings import OPEN_TOO_LONG_MS
    from kmq_spark.inspection.groups import look_at_fleets
    from kmq_spark.inspection.inspector import look_at_producers
    from kmq_spark.kafka.queue_rules import DEFAULT_LEASE_S, StoredRules, read_rules

    reach = settings.kafka.reach()
    with inspector_of(name, settings) as inspector:
        topics, cluster = inspector.topics, inspector.cluster
        brokers = cluster.facts()
        stored = read_rules(name, **reach)
        rules = stored or StoredRules(name)
        with counting(topics.markers_topic) as on_progress:
            view = inspector.look(on_progress, with_members=True, must_exist=False)
        now_ms, letters = view.now_ms, view.dead_letter_topic
        producers = look_at_producers(cluster, topics, reach)
        coordination = settings.tracker.coordination_topic
        recent = cluster.offsets_at(letters.name, letters.end, now_ms - ONE_HOUR_MS)
        return DoctorFacts(
            view=view,
            cluster=brokers,
            rules="none of its own: the defaults apply" if stored is None else stored.text,
            lease_ms=round(1000 * (rules.lease_s or DEFAULT_LEASE_S)),
            max_deliveries=rules.rules.max_deliveries,
            new_dead_letters=inspector.backlog(letters.name, recent, letters.end).count,
            producers=producers,
            fleets=look_at_fleets(cluster, name, topic=coordination, now_ms=now_ms, reach=reach),
            blocked={
                each.name: cluster.blocked(each, now_ms - OPEN_TOO_LONG_MS)
                for each in (view.queue_topic, view.markers_topic, letters)
            },
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
