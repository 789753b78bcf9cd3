"""
The topic settings that keep acknowledged records when a broker is lost.

Rule 1: The same rules apply when a topic is created, when it is checked at a start, and in `kmq doctor`.

Source: Kafka's documentation of `min.insync.replicas` and `unclean.leader.election.enable`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

REPLICAS_OF_A_QUORUM, QUORUM = 3, 2
"""With three replicas or more, two must have a record before it counts as written."""


def replication_settings(replicas: int) -> dict[str, str]:
    """
    Return the settings on which a topic's durability depends.

    Args:
        replicas: Number of replicas of each partition; -1 if not known yet.
    """
    # With three replicas, two must have a record before it counts as written: with Kafka's default of one, a START that
    # only one broker has may be lost with that broker. With fewer replicas, the loss of a broker would stop the queue.
    quorum = {"min.insync.replicas": str(QUORUM)} if replicas >= REPLICAS_OF_A_QUORUM else {}
    # An out-of-sync replica must not become the leader: it lacks acknowledged records.
    return {"unclean.leader.election.enable": "false", **quorum}


def replication_findings(name: str, settings: Mapping[str, str], replicas: int) -> Iterator[tuple[str, str]]:
    """
    Yield each setting with which the loss of a broker may lose acknowledged records, with the command that repairs it.

    Args:
        name: Topic.
        settings: Settings of the topic; missing ones are not checked.
        replicas: Number of replicas of a partition; a single replica is not checked, because no setting helps.
    """
    in_sync = int(settings.get("min.insync.replicas", QUORUM))
    if replicas >= REPLICAS_OF_A_QUORUM and in_sync < QUORUM:
        what = (
            f"has min.insync.replicas={in_sync} with {replicas} replicas, must be at least {QUORUM}: a record that "
            "only one broker has is acknowledged, and lost with that broker"
        )
        yield what, alter_command(name, "min.insync.replicas", str(QUORUM))
    if replicas > 1 and settings.get("unclean.leader.election.enable", "false") != "false":
        what = (
            "has unclean.leader.election.enable=true, must be false: a replica that lacks records may become the leader"
        )
        yield what, alter_command(name, "unclean.leader.election.enable", "false")


def alter_command(name: str, key: str, value: str) -> str:
    """Return the command that changes a setting of a topic."""
    return f"kafka-configs.sh --alter --entity-type topics --entity-name {name} --add-config {key}={value}"
