"""
Which settings of a topic keep acknowledged records when a broker is lost.

Rule 1: the same rules for a topic that is created, for the check at a start, and for `kmq doctor`.

Source: Kafka's documentation of `min.insync.replicas` and `unclean.leader.election.enable`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

REPLICAS_OF_A_QUORUM, QUORUM = 3, 2
"""From three replicas on, two of them must have a record before it counts as written."""


def replication_settings(replicas: int) -> dict[str, str]:
    """
    Return the settings on which a topic's durability depends.

    Args:
        replicas: Replicas of each partition; -1 where they are not known yet.
    """
    # With three replicas, two must have a record before it counts as written: with Kafka's default of one, a START that
    # one broker alone has seen may vanish with it. With fewer replicas, a lost broker would stop the queue.
    quorum = {"min.insync.replicas": str(QUORUM)} if replicas >= REPLICAS_OF_A_QUORUM else {}
    # A replica that was not in sync must not become the leader: it lacks records that were acknowledged.
    return {"unclean.leader.election.enable": "false", **quorum}


def replication_findings(name: str, settings: Mapping[str, str], replicas: int) -> Iterator[tuple[str, str]]:
    """
    Yield what lets a lost broker lose acknowledged records, each with its repair.

    Args:
        name: Topic.
        settings: Its settings; what is not among them is not checked.
        replicas: Replicas of a partition; a single one is not checked: there is nothing to choose.
    """
    in_sync = int(settings.get("min.insync.replicas", QUORUM))
    if replicas >= REPLICAS_OF_A_QUORUM and in_sync < QUORUM:
        what = (
            f"has min.insync.replicas={in_sync} with {replicas} replicas, must be at least {QUORUM}: a record that one "
            "broker has counts as written and is lost with it"
        )
        yield what, alter_command(name, "min.insync.replicas", str(QUORUM))
    if replicas > 1 and settings.get("unclean.leader.election.enable", "false") != "false":
        what = (
            "has unclean.leader.election.enable=true, must be false: a replica that lacks records may become the leader"
        )
        yield what, alter_command(name, "unclean.leader.election.enable", "false")


def alter_command(name: str, key: str, value: str) -> str:
    """Return the command that sets a topic's setting."""
    return f"kafka-configs.sh --alter --entity-type topics --entity-name {name} --add-config {key}={value}"
