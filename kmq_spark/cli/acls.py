"""
`kmq acls`: print commands that grant each part of a queue exactly the ACLs that it needs.

Rule 1: there is one table of grants. `tests/kafka/operator/test_rights.py` runs every part with these grants on a
broker with Kafka's authorizer, and checks that other operations are denied.
Rule 2: groups are granted by their full name. A prefix is granted only if a process chooses the rest of the name, and
the prefix ends with a separator: `kmq.orders` is also a prefix of the tracker's group, of the groups of every
`orders@subscription`, and of the groups of a queue `orders2`.

Source: Kafka's authorizer table; no part needs ClusterAction, Delete or Alter.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from kmq_spark.cli.shared.options import Connection, QueueName
from kmq_spark.cli.shared.output import Output, OutputForm, print_data
from kmq_spark.core.coordination.records import fleet_group
from kmq_spark.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kmq_spark.kafka.queue_topics import QueueTopics

PARTS = (
    "producer", "consumer", "transactional-consumer", "resuming-producer", "sink", "tracker", "dlq-operator", "viewer",
    "ledger", "creator", "member",
)  # fmt: skip


class Grant(NamedTuple):
    """One row of the table: a part may perform these operations on a resource."""

    part: str
    resource: str
    name: str
    operations: tuple[str, ...]
    is_prefix: bool = False


def grants(topics: QueueTopics, logical_queues: Sequence[str] = ()) -> Iterator[Grant]:
    """Yield the grants that the parts of a queue need; consumers of *logical_queues* have groups of their own."""
    from kmq_spark.kafka.queue_rules import RULES_TOPIC

    queue, markers, letters, redrive = (
        topics.queue_topic, topics.markers_topic, topics.dead_letter_topic, topics.redrive_topic,
    )  # fmt: skip
    yield Grant("producer", "topic", queue, ("Write", "Describe"))
    # The producer checks that a delay is not longer than the retention of the markers topic.
    yield Grant("producer", "topic", markers, ("Describe",))
    yield from _resuming_producer_grants(topics)
    yield from _sink_grants(topics)
    yield from _consumer_grants(topics, logical_queues)
    yield Grant("tracker", "topic", queue, ("Read", "Write", "Describe", "DescribeConfigs"))
    yield Grant("tracker", "topic", markers, ("Read", "Write", "Describe", "DescribeConfigs"))
    # Metrics count the dead letters that are open.
    yield Grant("tracker", "topic", letters, ("Read", "Write", "Describe", "DescribeConfigs"))
    yield Grant("tracker", "topic", redrive, ("Read", "Describe"))
    yield Grant("tracker", "group", topics.tracker_group, ("Read", "Describe"))
    # Spark's source names its groups `<prefix>-<uuid>-…`.
    yield Grant("tracker", "group", f"{topics.tracker_group}.source-", ("Read", "Describe"), is_prefix=True)
    # Metrics compare the consumers' committed offsets with the end of the queue topic.
    for group in (topics.consumer_group, *map(topics.logical_group, logical_queues)):
        yield Grant("tracker", "group", group, ("Describe",))
    yield Grant("tracker", "transactional-id", topics.tracker_group, ("Write", "Describe"))
    # To read the rules of the queue, which `kmq queue create` and `alter` write.
    for part in ("consumer", "transactional-consumer", "tracker", "viewer"):
        yield Grant(part, "topic", RULES_TOPIC, ("Read", "Describe"))
    yield Grant("creator", "topic", RULES_TOPIC, ("Create", "Describe", "Read", "Write"))
    yield Grant("creator", "transactional-id", f"{RULES_TOPIC}.{topics}", ("Write", "Describe"))
    yield Grant("creator", "group", topics.consumer_group, ("Read", "Describe"))
    yield Grant("dlq-operator", "topic", queue, ("Write", "Describe", "DescribeConfigs"))
    yield Grant("dlq-operator", "topic", markers, ("Describe", "DescribeConfigs"))
    yield Grant("dlq-operator", "topic", letters, ("Read", "Describe", "DescribeConfigs"))
    yield Grant("dlq-operator", "topic", redrive, ("Read", "Write", "Describe", "DescribeConfigs"))
    yield Grant("dlq-operator", "group", topics.redrive_id, ("Read", "Describe"))
    yield Grant("dlq-operator", "transactional-id", topics.redrive_id, ("Write", "Describe"))
    for topic in (queue, markers, letters, redrive, topics.producers_topic):
        yield Grant("viewer", "topic", topic, ("Read", "Describe", "DescribeConfigs"))
    for group in (topics.consumer_group, topics.tracker_group):
        yield Grant("viewer", "group", group, ("Describe",))
    for topic in (queue, markers, letters):
        yield Grant("ledger", "topic", topic, ("Read", "Describe", "DescribeConfigs"))
    # The group prefix is that of the queue without its subscription, whatever subscription the markers belong to.
    ledger = f"{replace(topics, subscription='').consumer_group}.ledger-"
    yield Grant("ledger", "group", ledger, ("Read", "Describe"), is_prefix=True)
    for topic in (queue, markers, letters, redrive, topics.producers_topic):
        # AlterConfigs: min.insync.replicas depends on the number of replicas, which is known only after the creation.
        yield Grant("creator", "topic", topic, ("Create", "Describe", "DescribeConfigs", "AlterConfigs"))


def _resuming_producer_grants(topics: QueueTopics) -> Iterator[Grant]:
    """Yield what a producer with an id needs: its position, and a transactional id of its own."""
    part = "resuming-producer"
    yield Grant(part, "topic", topics.queue_topic, ("Write", "Describe"))
    yield Grant(part, "topic", topics.markers_topic, ("Describe",))
    # DescribeConfigs: it refuses to start where its position would be deleted.
    yield Grant(part, "topic", topics.producers_topic, ("Read", "Write", "Describe", "DescribeConfigs"))
    own = topics.producer_transactional_id("")
    yield Grant(part, "transactional-id", own, ("Write", "Describe"), is_prefix=True)


def _sink_grants(topics: QueueTopics) -> Iterator[Grant]:
    """Yield what a Spark sink needs, on the driver and on executors."""
    yield Grant("sink", "topic", topics.queue_topic, ("Write", "Describe"))
    yield Grant("sink", "topic", topics.producers_topic, ("Read", "Write", "Describe", "DescribeConfigs"))
    yield Grant("sink", "transactional-id", topics.sink_transactional_prefix, ("Write", "Describe"), is_prefix=True)


def _consumer_grants(topics: QueueTopics, logical_queues: Sequence[str]) -> Iterator[Grant]:
    """Yield the grants of a consumer, and of one that uses `consumer.transaction()`."""
    for part in ("consumer", "transactional-consumer"):
        yield Grant(part, "topic", topics.queue_topic, ("Read", "Describe"))
        # Read on the markers topic: to begin without a committed offset, and to check a commit whose response was lost.
        # Output topics need Write in addition.
        yield Grant(part, "topic", topics.markers_topic, ("Read", "Write", "Describe"))
        for group in (topics.consumer_group, *map(topics.logical_group, logical_queues)):
            yield Grant(part, "group", group, ("Read", "Describe"))
    yield Grant("transactional-consumer", "group", topics.outcome_group, ("Describe",))
    own = topics.consumer_transactional_id("")
    yield Grant("transactional-consumer", "transactional-id", own, ("Write", "Describe"), is_prefix=True)


def coordination_grants(fleet: str, group: str, topic: str) -> Iterator[Grant]:
    """
    Yield the grants that a tracker fleet, and the members of a coordination group, need in addition.

    Write on the coordination topic is a right over all groups in it. Empty names: none.
    """
    used_by = [("tracker", fleet_group(fleet))] if fleet else []
    used_by += [("member", group)] if group else []
    for part, name in used_by:
        yield Grant(part, "topic", topic, ("Read", "Write", "Describe", "DescribeConfigs"))
        # Read: positions are also committed as offsets of this consumer group.
        yield Grant(part, "group", f"kmq.coordination.{name}", ("Read", "Describe"))
    if used_by:
        yield Grant("viewer", "topic", topic, ("Read", "Describe", "DescribeConfigs"))
        yield Grant("viewer", "group", "kmq.coordination.overview", ("Describe",))
        yield Grant("creator", "topic", topic, ("Create", "Describe", "DescribeConfigs", "AlterConfigs"))


def acls(
    name: QueueName,
    connection: Connection,
    part: Annotated[
        list[str] | None, typer.Option(help=f"Only this part: {', '.join(PARTS)}; may be repeated.", metavar="PART")
    ] = None,
    principal: Annotated[str, typer.Option(help="Principal; {part} stands for the part.")] = "User:kmq-{part}",
    logical_queues: Annotated[
        list[str] | None,
        typer.Option(
            "--logical-queue",
            help="Also for consumers and tracker of this logical queue; may be repeated.",
            metavar="NAME",
        ),
    ] = None,
    fleet: Annotated[
        str, typer.Option("--fleet", help="Also for the tracker as a process of this fleet.", metavar="NAME")
    ] = "",
    group: Annotated[
        str, typer.Option("--group", help="Also for members of this coordination group.", metavar="GROUP")
    ] = "",
    output: Output = OutputForm.TABLE,
) -> None:
    """Print the least that each part of a queue needs, as kafka-acls.sh commands (-o json: as data)."""
    from kmq_spark.kafka.queue_topics import QueueTopics

    for each in part or ():
        if each not in PARTS:
            message = f"part is not allowed: got {each!r}; expected one of {', '.join(PARTS)}; correct --part"
            raise ConfigError(message)
    topic = connection.settings().tracker.coordination_topic
    found = [*grants(QueueTopics.parse(name), logical_queues or ()), *coordination_grants(fleet, group, topic)]
    wanted = [grant for grant in found if not part or grant.part in part]
    # One block for each part; the order within a part is kept.
    wanted.sort(key=lambda grant: PARTS.index(grant.part))
    if output is not OutputForm.TABLE:
        print_data(output, (grant._asdict() for grant in wanted))
        return
    before = ""
    for grant in wanted:
        if grant.part != before:
            typer.echo(f"{'' if not before else chr(10)}# {grant.part}")
            before = grant.part
        typer.echo(_command(grant, principal.replace("{part}", grant.part)))


def _command(grant: Grant, principal: str) -> str:
    operations = " ".join(f"--operation {operation}" for operation in grant.operations)
    pattern = " --resource-pattern-type prefixed" if grant.is_prefix else ""
    return (
        f'kafka-acls.sh --bootstrap-server "$BOOTSTRAP" --command-config "$ADMIN" --add '
        f"--allow-principal {shlex.quote(principal)} {operations} --{grant.resource} {grant.name}{pattern}"
    )
