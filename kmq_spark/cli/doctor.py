"""`kmq doctor`: find problems of a queue and name the repairs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kmq_spark.cli.shared.common import EXIT_UNHEALTHY, counting, inspector_of, quiet_client
from kmq_spark.cli.shared.options import Connection
from kmq_spark.cli.shared.output import Output, OutputForm, print_data, rendered, shown, table
from kmq_spark.errors import KafkaClientError

if TYPE_CHECKING:
    from kmq_spark.config import Settings
    from kmq_spark.inspection.facts import DoctorFacts
    from kmq_spark.inspection.findings import Finding

ONE_HOUR_MS = 60 * 60 * 1000


def doctor(
    connection: Connection,
    queues: Annotated[
        list[str] | None, typer.Argument(help="Queues, or queue@subscription; default: all.", metavar="QUEUE")
    ] = None,
    output: Output = OutputForm.TABLE,
) -> None:
    """Check queues from their broker to their dead letters, and name each repair. Exit code 3: one is unhealthy."""
    from kmq_spark.inspection.cluster import Cluster, queues_of
    from kmq_spark.inspection.findings import examine, is_unhealthy, unreachable_finding

    quiet_client()
    settings = connection.settings()
    found: dict[str, list[Finding]] = {}
    try:
        names = queues or queues_of(Cluster(**settings.kafka.reach()).metadata().topics)
        for name in names:
            found[name] = examine(gather(name, settings))
            if output is OutputForm.TABLE:
                print_findings(found[name], "" if len(names) == 1 else f"\n{name}\n")
    except KafkaClientError as error:
        found[""] = [unreachable_finding(error)]
        if output is OutputForm.TABLE:
            print_findings(found[""])
    if output is not OutputForm.TABLE:
        rows = [{"queue": name, **asdict(finding)} for name, each in found.items() for finding in each]
        print_data(output, rows)
    elif not found:
        typer.echo("there is no queue; create one with `kmq queue create`")
    if any(map(is_unhealthy, found.values())):
        raise typer.Exit(EXIT_UNHEALTHY)


def gather(name: str, settings: Settings) -> DoctorFacts:
    """Collect the facts that the checks need."""
    from kmq_spark.inspection.facts import DoctorFacts
    from kmq_spark.inspection.findings import OPEN_TOO_LONG_MS, SILENT_MS
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
            taking_nothing=inspector.taking_nothing(view, now_ms - SILENT_MS),
            new_dead_letters=inspector.backlog(letters.name, recent, letters.end).count,
            producers=producers,
            fleets=look_at_fleets(cluster, name, topic=coordination, now_ms=now_ms, reach=reach),
            blocked={
                each.name: cluster.blocked(each, now_ms - OPEN_TOO_LONG_MS)
                for each in (view.queue_topic, view.markers_topic, letters)
            },
        )


def print_findings(found: list[Finding], heading: str = "") -> None:
    """Print findings as a table, then their repairs."""
    rows = [(finding.level.value, finding.check, shown(finding.what)) for finding in found]
    typer.echo(heading + rendered(table(("", "CHECK", "FOUND"), rows)))
    typer.echo(_repairs(found))


def _repairs(found: list[Finding]) -> str:
    """Return the repairs of findings, or that there is nothing to repair."""
    checks: dict[str, list[str]] = {}
    for finding in found:
        if finding.repair:
            checks.setdefault(finding.repair, []).append(finding.check)
    if not checks:
        return "\nhealthy"
    rows = [(f"{number}.", ", ".join(names), shown(repair)) for number, (repair, names) in enumerate(checks.items(), 1)]
    return "\n" + rendered(table(("", "CHECK", "WHAT TO DO"), rows))
