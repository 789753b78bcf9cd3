"""
The checks of `kmq doctor`: problems of a queue and their repairs.

Rule 1: A check is a function of the facts. It yields its findings; most checks yield an OK finding if there is no
problem.
Rule 2: Each problem names its repair. UNHEALTHY means that an operator must act now: work has stopped, is lost, or will
be lost.
Rule 3: Ages are computed with the clock of the machine that runs the check, so no bound is below a few seconds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING

from kmq_spark.inspection.fleets import fleet_problems, fleet_summary
from kmq_spark.inspection.liveness import Life, describe, life_of, snapshots_late
from kmq_spark.inspection.producers import producers_problems, producers_summary
from kmq_spark.inspection.spans import counted, span
from kmq_spark.kafka.topic_rules import alter_command, replication_findings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kmq_spark.errors import KafkaClientError
    from kmq_spark.inspection.facts import ClusterFacts, QueueFacts, TopicFacts

TRACKER_LATE_MS = 30_000
"""
Age of an unread marker above which the tracker is late: a batch takes well below a second, a restart twelve seconds.
"""

OVERDUE_MS = 15_000
"""How long a message may be past its deadline: redelivery takes well below a second."""

SILENT_MS = 60_000
"""
Minimum time without a settled message, while consumers hold messages and others are ready, that counts as a problem.
"""

OPEN_TOO_LONG_MS = 90_000
"""How long a transaction may be open: those of kmq-spark time out after 60 s; the broker checks this every 10 s."""

RETENTION_FACTOR = 3
"""Minimum ratio of the retention to the sum of all leases of a message: it leaves room for an outage."""

MAX_LISTED = 3
"""Maximum number of names or places listed in a finding."""


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    UNHEALTHY = "unhealthy"


@dataclass(frozen=True, slots=True)
class Finding:
    """
    One result of a check.

    Attributes:
        check: Name of the check.
        level: Severity.
        what: What was found.
        repair: What to do; empty if nothing is to be done.
    """

    check: str
    level: Level
    what: str
    repair: str = ""


def examine(facts: QueueFacts) -> list[Finding]:
    """
    Run every check for which the facts are available.

    Args:
        facts: Facts from the inspector.

    Returns:
        Findings in the order of the checks, from the broker to the dead-letter topic and the checkpoint.
    """
    checks = [iter((broker_finding(facts.cluster),)), _topics(facts)]
    if facts.queue_topic.partition_count and facts.markers_topic.partition_count:
        checks += [
            _rules(facts),
            _producers(facts),
            _retention(facts),
            _open_transactions(facts),
            _tracker(facts),
            _fencing(facts),
            _fleets(facts),
            _consumers(facts),
            _removed_messages(facts),
        ]
        checks += [
            _overdue(facts),
            _missing_ticks(facts),
            _stuck_workers(facts),
            _unreadable(facts),
        ]
    return list(chain(*checks, _dead_letters(facts), _checkpoint(facts)))


def is_unhealthy(findings: list[Finding]) -> bool:
    """Return whether an operator must act now."""
    return any(finding.level is Level.UNHEALTHY for finding in findings)


def unreachable_finding(error: KafkaClientError) -> Finding:
    """Return the finding of a doctor whose broker cannot be reached, or does not answer."""
    what, _, repair = str(error).rpartition("; ")
    return Finding("broker", Level.UNHEALTHY, what, repair)


def broker_finding(cluster: ClusterFacts) -> Finding:
    """Return what is found about the brokers."""
    text = f"{cluster.broker_count} broker{'s' if cluster.broker_count != 1 else ''} at {cluster.address}"
    if cluster.release:
        text += f", {cluster.release}"
    if cluster.can_transact is False:
        return Finding("broker", Level.UNHEALTHY, f"{text}: no KIP-447 transactions", "upgrade the brokers to 2.5")
    return Finding("broker", Level.OK, text)


def replica_findings(check: str, topic: TopicFacts, broker_count: int, used_by: str) -> Iterator[Finding]:
    """
    Yield what is wrong with the leaders and the replicas of a topic.

    Args:
        check: Name of the check.
        topic: That exists.
        broker_count: Number of brokers of the cluster.
        used_by: What stops with it: `the queue`.
    """
    if topic.leaderless:
        places = ", ".join(map(str, topic.leaderless))
        yield Finding(check, Level.UNHEALTHY, f"{topic.name} has no leader: partitions {places}", "start the broker")
    elif topic.under_replicated:
        places = ", ".join(map(str, topic.under_replicated))
        yield Finding(
            check, Level.WARNING, f"{topic.name} has out-of-sync replicas: partitions {places}", "check the brokers"
        )
    if topic.replicas == 1 and broker_count > 1:
        what = f"{topic.name} has one replica: the loss of its broker stops {used_by}"
        yield Finding(check, Level.WARNING, what, "raise its replication factor")


def _topics(facts: QueueFacts) -> Iterator[Finding]:
    found = list(chain.from_iterable(_topic(topic, facts) for topic in facts.topics))
    queue, markers = facts.queue_topic.partition_count, facts.markers_topic.partition_count
    if queue and markers and queue != markers:
        smaller = min(facts.queue_topic, facts.markers_topic, key=lambda topic: topic.partition_count)
        found.append(
            Finding(
                "topics",
                Level.UNHEALTHY,
                f"{facts.queue_topic.name} has {queue} partitions, {facts.markers_topic.name} has {markers}",
                f"kafka-topics.sh --alter --topic {smaller.name} --partitions {max(queue, markers)}",
            )
        )
    yield from found
    if not found:
        yield Finding("topics", Level.OK, f"three topics, {queue} partitions, LogAppendTime, cleanup.policy=delete")


def _topic(topic: TopicFacts, facts: QueueFacts) -> Iterator[Finding]:
    if not topic.partition_count:
        yield Finding(
            "topics", Level.UNHEALTHY, f"topic {topic.name} does not exist", f"kmq queue create {facts.queue}"
        )
        return
    yield from replica_findings("topics", topic, facts.cluster.broker_count, "the queue")
    for what, repair in replication_findings(topic.name, topic.settings, topic.replicas):
        yield Finding("topics", Level.UNHEALTHY, f"{topic.name} {what}", repair)
    wanted = {"cleanup.policy": "delete", "message.timestamp.type": "LogAppendTime"}
    for key, value in wanted.items():
        got = topic.settings.get(key, value)
        if got == value:
            continue
        # The append time of the markers is the clock of all leases. That of the messages gives only ages and times to
        # live.
        is_needed = key == "cleanup.policy" or topic.name == facts.markers_topic.name
        what = f"{topic.name} has {key}={got}, should be {value}"
        repair = alter_command(topic.name, key, value)
        yield Finding("topics", Level.UNHEALTHY if is_needed else Level.WARNING, what, repair)


def _rules(facts: QueueFacts) -> Iterator[Finding]:
    if not facts.rules:
        yield Finding("rules", Level.OK, "none of its own: the settings of its tracker and consumers apply")
    elif facts.rules_differing:
        what = f"these settings differ from the queue's rules, which override them: {', '.join(facts.rules_differing)}"
        repair = f"remove them from the settings, or change the rules: kmq queue alter {facts.queue}"
        yield Finding("rules", Level.WARNING, what, repair)
    else:
        yield Finding("rules", Level.OK, facts.rules)


def _producers(facts: QueueFacts) -> Iterator[Finding]:
    if facts.producers is None:
        return
    queue, longest_ms = facts.queue.partition("@")[0], facts.cluster.transaction_max_timeout_ms
    found = [
        Finding("producers", Level.UNHEALTHY if problem.is_bad else Level.WARNING, problem.what, problem.repair)
        for problem in producers_problems(facts.producers, queue, longest_ms)
    ]
    yield from found
    if facts.producers.ids and not found:
        yield Finding("producers", Level.OK, producers_summary(facts.producers))


def _fleets(facts: QueueFacts) -> Iterator[Finding]:
    found = [
        Finding("fleet", Level.UNHEALTHY if problem.is_bad else Level.WARNING, problem.what, problem.repair)
        for problem in fleet_problems(facts.fleets, facts.queue)
    ]
    yield from found
    if facts.fleets and not found:
        yield Finding("fleet", Level.OK, fleet_summary(facts.fleets[0]))


def _retention(facts: QueueFacts) -> Iterator[Finding]:
    deliveries = facts.max_deliveries or 1
    wanted_ms = facts.lease_ms * deliveries * RETENTION_FACTOR
    is_short = False
    for topic in (facts.queue_topic, facts.markers_topic):
        kept_ms = int(topic.settings.get("retention.ms", "-1"))
        if 0 <= kept_ms < wanted_ms:
            is_short = True
            yield Finding(
                "retention",
                Level.WARNING if kept_ms > facts.lease_ms * deliveries else Level.UNHEALTHY,
                f"{topic.name} is kept for {span(kept_ms)}; {deliveries} leases of {span(facts.lease_ms)} and an "
                f"outage need {span(wanted_ms)}",
                alter_command(topic.name, "retention.ms", str(wanted_ms)),
            )
    if not is_short:
        kept = facts.markers_topic.settings.get("retention.ms")
        unknown = "for an unknown time (retention.ms is not readable)"
        text = unknown if kept is None else "without limit" if int(kept) < 0 else span(int(kept))
        yield Finding(
            "retention", Level.OK, f"markers kept {text}, lease {span(facts.lease_ms)}, {deliveries} deliveries"
        )


def _tracker(facts: QueueFacts) -> Iterator[Finding]:
    tracker, run = facts.tracker, f"kmq tracker run {facts.queue}"
    if not tracker.positions:
        used = facts.markers_topic.size > 0
        level = Level.UNHEALTHY if used else Level.WARNING
        yield Finding("tracker", level, "no tracker has ever committed: nothing is redelivered", run)
        return
    life = life_of(tracker, facts.now_ms)
    overdue = sum(view.overdue(facts.now_ms) for view in facts.views.values())
    if life is Life.LOST or life is Life.STOPPED:
        level = Level.WARNING if life is Life.STOPPED and not overdue else Level.UNHEALTHY
        yield Finding("tracker", level, describe(tracker, overdue, facts.now_ms), run)
    if (late := snapshots_late(tracker)) is not None:
        yield Finding("tracker", Level.UNHEALTHY, *late)
    late_ms = 0 if tracker.unread_since_ms is None else facts.now_ms - tracker.unread_since_ms
    unread = counted(tracker.unread, "marker")
    if tracker.unread and late_ms > TRACKER_LATE_MS:
        what = f"{unread} not read, the oldest for {span(late_ms)}: the tracker is down or stuck"
        repair = f"check that it runs, and its log; if it does not run: {run}"
        yield Finding("tracker", Level.UNHEALTHY, what, repair)
    elif tracker.unread_since_ms is not None:
        yield Finding("tracker", Level.OK, f"{unread} behind, {span(late_ms)}")
    else:
        newest_ms = max((view.newest_at_ms for view in facts.views.values()), default=0)
        text = f", the newest {span(facts.now_ms - newest_ms)} ago" if newest_ms else ""
        state = describe(tracker, overdue, facts.now_ms) if life is Life.RUNNING else ""
        hint = "; unknown whether the tracker is idle or stopped: its version writes no heartbeat"
        what = f"has read all markers{text}" + (f"; {state}" if state else hint if life is Life.UNKNOWN else "")
        yield Finding("tracker", Level.OK, what)
    yield from _tracker_places(facts, run)


def _tracker_places(facts: QueueFacts, run: str) -> Iterator[Finding]:
    for partition, position in sorted(facts.tracker.positions.items()):
        first, end = facts.markers_topic.first.get(partition, 0), facts.markers_topic.end.get(partition, position)
        place = f"{facts.markers_topic.name}[{partition}]"
        if position < first:
            what = f"retention removed markers {position} to {first - 1} of {place} before the tracker read them"
            repair = "raise retention.ms, then see 'markers were removed' in docs/operations.md"
            yield Finding("tracker", Level.UNHEALTHY, what, repair)
        elif position > end:
            what = (
                f"{place} ends at {end}, the tracker has committed {position}: the topic was deleted and created again"
            )
            repair = f"{run}: it starts at the beginning of the new topic"
            yield Finding("tracker", Level.UNHEALTHY, what, repair)


def _fencing(facts: QueueFacts) -> Iterator[Finding]:
    committers = Counter(facts.tracker.last_committers.values())
    if not committers:
        return
    text = ", ".join(name or "unknown" for name, _ in committers.most_common(MAX_LISTED))
    if len(committers) > 1:
        what = f"{len(committers)} trackers made the latest commits: {text}"
        repair = "run one tracker per queue: a newer tracker fences the older one; find what restarts the older one"
        yield Finding("fencing", Level.WARNING, what, repair)
    else:
        yield Finding("fencing", Level.OK, f"last commit by {text}")


def _consumers(facts: QueueFacts) -> Iterator[Finding]:
    group, ready = facts.consumers, facts.ready.count
    members = sum(1 for count in group.members.values() if count)
    if not group.members and ready:
        what = f"{counted(ready, 'message')} ready and no consumer in {group.name}"
        yield Finding("consumers", Level.UNHEALTHY, what, "start workers")
    elif not group.members:
        yield Finding("consumers", Level.OK, f"none in {group.name}, no message is ready")
    else:
        assigned = sum(group.members.values())
        text = f"{len(group.members)} in {group.name} ({group.state.lower()}), {members} with partitions"
        missing = facts.queue_topic.partition_count - assigned
        if missing > 0 and group.state.lower() == "stable":
            yield Finding(
                "consumers", Level.WARNING, f"{text}; {missing} partitions have no consumer", "wait for the rebalance"
            )
        else:
            yield Finding("consumers", Level.OK, f"{text}; {counted(ready, 'message')} ready")


def _removed_messages(facts: QueueFacts) -> Iterator[Finding]:
    for partition, position in sorted(facts.consumers.positions.items()):
        first = facts.queue_topic.first.get(partition, 0)
        if position < first:
            what = (
                f"retention removed messages {position} to {first - 1} of {facts.queue_topic.name}[{partition}] "
                "before a consumer started them: they are lost"
            )
            repair = "raise retention.ms of the queue topic, add workers"
            yield Finding("consumers", Level.UNHEALTHY, what, repair)


def _overdue(facts: QueueFacts) -> Iterator[Finding]:
    overdue = sum(view.overdue(facts.now_ms - OVERDUE_MS) for view in facts.views.values())
    in_flight = deferred = 0
    for view in facts.views.values():
        for start, count, _ in view.by_start():
            # Count as `kmq top` does: no consumer holds a deferred message.
            if start is not None and start.is_deferral:
                deferred += count
            else:
                in_flight += count
    text = counted(in_flight, "message") + (f" and {deferred} deferred" if deferred else "")
    if not overdue:
        yield Finding("in flight", Level.OK, f"{text}, none past its deadline")
        return
    deadlines = [deadline for view in facts.views.values() for _, _, deadline in view.by_start() if deadline >= 0]
    what = (
        f"{overdue} of {counted(in_flight + deferred, 'message')} {'is past its' if overdue == 1 else 'are past their'}"
        f" deadline, the oldest by {span(facts.now_ms - min(deadlines))}: no tracker redelivers them"
    )
    repair = f"start the tracker: kmq tracker run {facts.queue}"
    yield Finding("in flight", Level.UNHEALTHY, what, repair)


def _missing_ticks(facts: QueueFacts) -> Iterator[Finding]:
    """Find partitions where a deadline has passed and no TICK followed: a tracker decides only at TICKs."""
    since_ms = {
        partition: deadline_at_ms
        for partition, view in facts.views.items()
        if (deadline_at_ms := view.due_without_tick_since_ms()) is not None
        and deadline_at_ms < facts.now_ms - OVERDUE_MS
    }
    if since_ms and life_of(facts.tracker, facts.now_ms) is Life.RUNNING:
        places = ", ".join(map(str, sorted(since_ms)))
        what = (
            f"no TICK for {span(facts.now_ms - min(since_ms.values()))} although messages are due: partitions {places}"
        )
        repair = "look for 'cannot write TICKs' in the tracker's log; restart the tracker"
        yield Finding("ticks", Level.UNHEALTHY, what, repair)


def _stuck_workers(facts: QueueFacts) -> Iterator[Finding]:
    """Find consumers that hold messages and renew their leases, but settle none while other messages are ready."""
    held: Counter[str] = Counter()
    since_ms: dict[str, int] = {}
    for view in facts.views.values():
        for start, count, deadline_at_ms in view.by_start():
            if start is not None and not start.is_deferral and deadline_at_ms >= facts.now_ms:
                held[start.consumer_id] += count
                since_ms[start.consumer_id] = min(start.at_ms, since_ms.get(start.consumer_id, start.at_ms))
    if not held or not facts.ready.count:
        return
    settled_ms = max((view.acked_at_ms for view in facts.views.values()), default=0)
    quiet_ms = facts.now_ms - max(settled_ms, min(since_ms.values()))
    if quiet_ms < max(SILENT_MS, 2 * facts.lease_ms):
        return
    text = "; ".join(
        f"{name or 'unnamed'} holds {count} for {span(facts.now_ms - since_ms[name])}"
        for name, count in held.most_common(MAX_LISTED)
    )
    what = f"no message was settled for {span(quiet_ms)} while {facts.ready.count} are ready: {text}"
    repair = (
        "their handlers hang and keep-alive renews the leases: restart those processes, their messages are redelivered"
    )
    yield Finding("workers", Level.UNHEALTHY, what, repair)


def _open_transactions(facts: QueueFacts) -> Iterator[Finding]:
    for name, partitions in facts.blocked.items():
        if partitions:
            yield Finding(
                "transactions",
                Level.UNHEALTHY,
                f"a transaction has been open in {name} for more than {span(OPEN_TOO_LONG_MS)}: partitions "
                f"{', '.join(map(str, partitions))}; what is behind it is neither received nor redelivered",
                'kafka-transactions.sh find-hanging; docs/operations.md, "A transaction hangs"',
            )


def _unreadable(facts: QueueFacts) -> Iterator[Finding]:
    count = sum(view.state.counters.unreadable for view in facts.views.values())
    if count:
        places = [f"[{partition}]@{offset}" for partition, view in facts.views.items() for offset in view.unreadable]
        are_not_markers = "is not a marker" if count == 1 else "are not markers"
        what = (
            f"{counted(count, 'record')} of {facts.markers_topic.name} {are_not_markers}: "
            f"{', '.join(places[:MAX_LISTED])}"
        )
        repair = "another program writes to the topic: revoke its Write"
        yield Finding("markers", Level.WARNING, what, repair)


def _dead_letters(facts: QueueFacts) -> Iterator[Finding]:
    letters = facts.dead_letters
    if not facts.dead_letter_topic.partition_count:
        return
    if not letters.count:
        yield Finding("dead letters", Level.OK, "none")
        return
    about = "" if letters.is_exact else "at most "
    text = f"{about}{letters.count} in {facts.dead_letter_topic.name}"
    if facts.new_dead_letters:
        text += f", growing: {min(facts.new_dead_letters, letters.count)} in the last hour"
    repair = f"kmq dlq list {facts.queue}, then kmq dlq redrive {facts.queue} or purge"
    yield Finding("dead letters", Level.WARNING, text, repair)


def _checkpoint(facts: QueueFacts) -> Iterator[Finding]:
    checkpoint = facts.checkpoint
    if checkpoint is None:
        return
    if checkpoint.problem:
        what = f"{checkpoint.path}: {checkpoint.problem}"
        repair = (
            "grant the tracker's user access; a damaged folder may be deleted: the state is rebuilt from the markers"
        )
        yield Finding("checkpoint", Level.UNHEALTHY, what, repair)
    elif not checkpoint.is_local:
        yield Finding("checkpoint", Level.OK, f"{checkpoint.path}: not on this machine, not checked")
    elif checkpoint.last_batch_at_ms is None:
        yield Finding("checkpoint", Level.OK, f"{checkpoint.path}: no batch yet")
    else:
        what = f"{checkpoint.path}: last batch {span(facts.now_ms - checkpoint.last_batch_at_ms)} ago"
        yield Finding("checkpoint", Level.OK, what)
