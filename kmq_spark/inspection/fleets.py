"""
What can be wrong with the tracker fleets of a queue.

Rule 1: no client here: facts in, findings out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kmq_spark.inspection.producers import Problem
from kmq_spark.inspection.spans import counted
from kmq_spark.kafka.topic_rules import replication_findings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kmq_spark.inspection.facts import FleetFacts


def fleet_problems(fleets: Sequence[FleetFacts], queue: str) -> Iterator[Problem]:
    """
    Yield what is wrong.

    Args:
        fleets: Fleets to which the queue belongs.
        queue: Name of the queue, for the commands.
    """
    if len(fleets) > 1:
        yield Problem(
            f"{queue} belongs to {counted(len(fleets), 'fleet')}, whose trackers fence each other: "
            f"{', '.join(fleet.name for fleet in fleets)}",
            is_bad=True,
            repair=f"keep one of them: kmq tracker fleet {fleets[-1].name} --remove {queue}",
        )
    for fleet in fleets:
        yield from _problems_of(fleet, queue)


def fleet_summary(fleet: FleetFacts) -> str:
    """Return what is shown of a fleet without a problem."""
    standby = fleet.processes - 1
    processes = "process" if standby == 1 else "processes"
    return f"fleet {fleet.name}: tracked by {fleet.tracked_by}, {standby} more {processes}"


def _problems_of(fleet: FleetFacts, queue: str) -> Iterator[Problem]:
    start = f"kmq tracker run --fleet {fleet.name} {queue}"
    if fleet.is_paused:
        yield Problem(
            f"fleet {fleet.name} is paused: it redelivers nothing",
            is_bad=True,
            repair=f"when the reason is over: kmq group pause kmq.fleet.{fleet.name} --end",
        )
    elif not fleet.processes:
        yield Problem(f"fleet {fleet.name} has no running process", is_bad=True, repair=f"start two: {start}")
    elif not fleet.tracked_by or fleet.tracked_by in fleet.stale:
        what = f"assigned to {fleet.assigned_to}" if fleet.assigned_to else "assigned to no process"
        yield Problem(
            f"no process of fleet {fleet.name} tracks {queue}, it is {what}",
            is_bad=True,
            repair=f"look at the logs of the processes: kmq tracker fleet {fleet.name}",
        )
    elif fleet.processes == 1:
        yield Problem(
            f"fleet {fleet.name} has one process: no other one takes over if it fails",
            is_bad=False,
            repair=f"start a second one on another machine: {start}",
        )
    if not fleet.is_complete:
        yield Problem(
            f"records of fleet {fleet.name} were removed from {fleet.topic.name} before a snapshot replaced them",
            is_bad=False,
            repair="wait a minute; if it stays, raise retention.ms of the topic to at least an hour",
        )
    for what, repair in replication_findings(fleet.topic.name, fleet.topic.settings, fleet.topic.replicas):
        yield Problem(f"{fleet.topic.name} {what}", is_bad=True, repair=repair)
