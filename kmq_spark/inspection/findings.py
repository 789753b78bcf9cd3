"""
The checks of `kmq doctor`: problems of a queue and their repairs.

Rule 1: A check is a function of the facts. It yields its findings; most checks yield an OK finding if there is no
problem. Each problem names its repair.
Rule 2: UNHEALTHY means that an operator must act now: work has stopped, is lost, or will be lost.
Rule 3: Ages are computed with the clock of the machine that runs the check, so no bound is below a few seconds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING

from kmq_spark.inspection.facts import Life
from kmq_spark.inspection.spans import counted, span
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.settings import BULK_TRANSACTION_TIMEOUT_MS
from kmq_spark.kafka.topic_rules import TopicProblem, alter_command, kinds_of, partition_problems, topic_problems

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kmq_spark.errors import KafkaClientError
    from kmq_spark.inspection.facts import DoctorFacts, FleetFacts, QueueView, TopicFacts
    from kmq_spark.kafka.topic_rules import TopicKind

TRACKER_LATE_MS = 30_000
"""
Age of an unread marker above which the tracker is late: a batch takes well below a second, a restart twelve seconds.
"""

SNAPSHOT_LATE_BATCHES = 300
"""Batches without a snapshot of the state, as in the tracker. Spark fails after about 860."""

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

CORRECT = "correct the cause of the tracker's failures; its log says more"

MAX_LISTED = 3
"""Maximum number of names or places listed in a finding."""


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    UNHEALTHY = "unhealthy"


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check: what was found, and what to do (empty if nothing)."""

    check: str
    level: Level
    what: str
    repair: str = ""


def examine(facts: DoctorFacts) -> list[Finding]:
    """Run every check for which the facts are available, from the broker to the dead letters."""
    view = facts.view
    brokers = Finding("broker", Level.OK, f"{counted(facts.cluster.broker_count, 'broker')} at {facts.cluster.address}")
    checks = [iter((brokers,)), _topics(facts)]
    if view.exists:
        checks += [
            iter((Finding("rules", Level.OK, facts.rules),)),
            _producers(facts),
            _retention(facts),
            _open_transactions(facts),
            _tracker(view),
            _fencing(view),
            _fleets(facts),
            _consumers(view),
            _removed_messages(view),
            _overdue(view),
            _missing_ticks(view),
            _stuck_workers(facts),
            _unreadable(view),
        ]
    return list(chain(*checks, _dead_letters(facts)))


def is_unhealthy(findings: list[Finding]) -> bool:
    """Return whether an operator must act now."""
    return any(finding.level is Level.UNHEALTHY for finding in findings)


def unreachable_finding(error: KafkaClientError) -> Finding:
    """Return the finding of a doctor whose broker cannot be reached, or does not answer."""
    what, _, repair = str(error).rpartition("; ")
    return Finding("broker", Level.UNHEALTHY, what, repair)


def topic_findings(
    check: str, kind: TopicKind, topic: TopicFacts, broker_count: int, used_by: str
) -> Iterator[Finding]:
    """Yield what is wrong with a topic that exists; *used_by* is what stops with it: `the queue`."""
    if topic.leaderless:
        places = ", ".join(map(str, topic.leaderless))
        yield Finding(check, Level.UNHEALTHY, f"{topic.name} has no leader: partitions {places}", "start the broker")
    elif topic.under_replicated:
        places = ", ".join(map(str, topic.under_replicated))
        what = f"{topic.name} has out-of-sync replicas: partitions {places}"
        yield Finding(check, Level.WARNING, what, "check the brokers")
    if topic.replicas == 1 and broker_count > 1:
        what = f"{topic.name} has one replica: the loss of its broker stops {used_by}"
        yield Finding(check, Level.WARNING, what, "raise its replication factor")
    for problem in topic_problems(kind, topic.name, topic.settings, topic.replicas):
        yield _finding_of(check, problem)


def _finding_of(check: str, problem: TopicProblem) -> Finding:
    return Finding(check, Level.UNHEALTHY if problem.is_fatal else Level.WARNING, problem.what, problem.repair)


def tracker_state(view: QueueView) -> str:
    """Return one line: whether a tracker runs, how long ago it stopped, and how many messages are overdue."""
    life, at_ms = view.life, view.tracker.heartbeat_at_ms
    ago = span(max(0, view.now_ms - (view.now_ms if at_ms is None else at_ms)))
    trouble = view.tracker.trouble
    return {
        Life.LOST: f"no tracker for {ago}, {view.overdue()} overdue{trouble and f'; its last words: {trouble}'}",
        Life.FAILING: f"the tracker is {trouble}; last heartbeat {ago} ago, {view.overdue()} overdue",
        Life.STOPPED: f"the tracker was stopped {ago} ago, {view.overdue()} overdue",
        Life.RUNNING: f"the tracker runs, last heartbeat {ago} ago",
    }.get(life, "")


def is_tracker_down(view: QueueView) -> bool:
    """Return whether no tracker works, and one should; where it was stopped, only if messages are overdue."""
    never = {Life.NEVER, Life.FAILING, Life.LOST}
    return view.life in never or (view.life is Life.STOPPED and view.overdue() > 0)


def _topics(facts: DoctorFacts) -> Iterator[Finding]:
    view, topics = facts.view, QueueTopics.parse(facts.view.queue)
    kinds = kinds_of(topics)
    there = [topic for topic in (view.queue_topic, view.markers_topic, view.dead_letter_topic) if topic.partition_count]
    problems = partition_problems(topics, {topic.name: topic.partition_count for topic in there})
    found = [_finding_of("topics", problem) for problem in problems]
    for topic in there:
        found += topic_findings("topics", kinds[topic.name], topic, facts.cluster.broker_count, "the queue")
    yield from found
    if not found:
        count = view.queue_topic.partition_count
        yield Finding("topics", Level.OK, f"three topics, {count} partitions, LogAppendTime, cleanup.policy=delete")


def _producers(facts: DoctorFacts) -> Iterator[Finding]:
    producers, queue = facts.producers, facts.view.queue.partition("@")[0]
    if producers is None:
        return
    found: list[Finding] = []
    longest_ms = facts.cluster.transaction_max_timeout_ms
    if 0 < longest_ms < BULK_TRANSACTION_TIMEOUT_MS:
        what = (
            f"the brokers have transaction.max.timeout.ms={longest_ms}: sinks and `kmq dlq redrive` request "
            f"{BULK_TRANSACTION_TIMEOUT_MS} and cannot start"
        )
        repair = f"set transaction.max.timeout.ms={BULK_TRANSACTION_TIMEOUT_MS} or more on the brokers"
        found.append(Finding("producers", Level.WARNING, what, repair))
    topic = producers.topic
    if topic.partition_count:
        found += topic_findings("producers", "producers", topic, facts.cluster.broker_count, "its producers")
    if producers.unreadable:
        what = f"the position of {_some(producers.unreadable)} cannot be read: no producer with this id can start"
        repair = f"upgrade its program, or remove the position: kmq producer forget {queue} {producers.unreadable[0]}"
        found.append(Finding("producers", Level.UNHEALTHY, what, repair))
    if producers.open_for_ms:
        what = (
            f"a transaction has been open in {topic.name} for at least {span(producers.open_for_ms)}: a producer that "
            "starts waits for it, and so do the consumers of the partitions that it wrote to"
        )
        repair = "start its producer again, or wait for its transaction.timeout.ms; kafka-transactions.sh find-hanging"
        found.append(Finding("producers", Level.WARNING, what, repair))
    if producers.ids and not found:
        text = f"{counted(producers.ids, 'producer id')}, positions in a compacted topic"
        found.append(Finding("producers", Level.OK, text))
    yield from found


def _retention(facts: DoctorFacts) -> Iterator[Finding]:
    view, deliveries = facts.view, facts.max_deliveries or 1
    wanted_ms = facts.lease_ms * deliveries * RETENTION_FACTOR
    is_short = False
    for topic in (view.queue_topic, view.markers_topic):
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
        kept = view.markers_topic.settings.get("retention.ms")
        unknown = "for an unknown time (retention.ms is not readable)"
        text = unknown if kept is None else "without limit" if int(kept) < 0 else span(int(kept))
        text = f"markers kept {text}, lease {span(facts.lease_ms)}, {deliveries} deliveries"
        yield Finding("retention", Level.OK, text)


def _tracker(view: QueueView) -> Iterator[Finding]:
    tracker, life, run = view.tracker, view.life, f"kmq tracker run {view.queue}"
    if life is Life.NEVER:
        level = Level.UNHEALTHY if view.markers_topic.size > 0 else Level.WARNING
        yield Finding("tracker", level, "no tracker has ever committed: nothing is redelivered", run)
        return
    if life in {Life.FAILING, Life.LOST, Life.STOPPED}:
        level = Level.UNHEALTHY if is_tracker_down(view) else Level.WARNING
        repairs = {Life.STOPPED: run, Life.FAILING: CORRECT}
        repair = repairs.get(life, f"if one runs, its log says why it fails; else: {run}")
        yield Finding("tracker", level, tracker_state(view), repair)
    if tracker.snapshot_lag > SNAPSHOT_LATE_BATCHES:
        what = f"no snapshot of the tracker's state for {tracker.snapshot_lag} batches: its query fails after about 860"
        yield Finding("tracker", Level.UNHEALTHY, what, "check the checkpoint's file system and the tracker's log")
    late_ms, unread = view.tracker_late_ms, counted(tracker.unread.count, "marker")
    if tracker.unread.count and late_ms > TRACKER_LATE_MS:
        what = f"{unread} not read, the oldest for {span(late_ms)}: the tracker is down or stuck"
        repair = CORRECT if life is Life.FAILING else f"check that it runs, and its log; if it does not run: {run}"
        yield Finding("tracker", Level.UNHEALTHY, what, repair)
    elif tracker.unread.oldest_at_ms is not None:
        yield Finding("tracker", Level.OK, f"{unread} behind, {span(late_ms)}")
    else:
        newest_ms = max((each.newest_at_ms for each in view.partitions.values()), default=0)
        text = f", the newest {span(view.now_ms - newest_ms)} ago" if newest_ms else ""
        state = tracker_state(view) if life is Life.RUNNING else ""
        yield Finding("tracker", Level.OK, f"has read all markers{text}" + (f"; {state}" if state else ""))
    yield from _tracker_places(view, run)


def _tracker_places(view: QueueView, run: str) -> Iterator[Finding]:
    markers, positions = view.markers_topic, view.tracker.positions
    for removed in _removed(markers, positions, "markers"):
        repair = "raise retention.ms, then see 'markers were removed' in docs/operations.md"
        yield Finding("tracker", Level.UNHEALTHY, f"{removed} before the tracker read them", repair)
    for partition, position in sorted(positions.items()):
        if position > (end := markers.end.get(partition, position)):
            what = (
                f"{markers.name}[{partition}] ends at {end}, the tracker has committed {position}: the topic was "
                "deleted and created again"
            )
            repair = f"{run}: it starts at the beginning of the new topic"
            yield Finding("tracker", Level.UNHEALTHY, what, repair)


def _removed(topic: TopicFacts, positions: Mapping[int, int], records: str) -> Iterator[str]:
    """Yield what retention removed past positions."""
    for partition, position in sorted(positions.items()):
        if position < (first := topic.first.get(partition, 0)):
            yield f"retention removed {records} {position} to {first - 1} of {topic.name}[{partition}]"


def _fencing(view: QueueView) -> Iterator[Finding]:
    committers = Counter(view.tracker.last_committers.values())
    if not committers:
        return
    text = ", ".join(name or "unknown" for name, _ in committers.most_common(MAX_LISTED))
    if len(committers) > 1:
        what = f"{len(committers)} trackers made the latest commits: {text}"
        repair = "run one tracker per queue: a newer tracker fences the older one; find what restarts the older one"
        yield Finding("fencing", Level.WARNING, what, repair)
    else:
        yield Finding("fencing", Level.OK, f"last commit by {text}")


def _fleets(facts: DoctorFacts) -> Iterator[Finding]:
    fleets, queue = facts.fleets, facts.view.queue
    if not fleets:
        return
    found: list[Finding] = []
    if len(fleets) > 1:
        what = (
            f"{queue} belongs to {counted(len(fleets), 'fleet')}, whose trackers fence each other: "
            f"{', '.join(fleet.name for fleet in fleets)}"
        )
        repair = f"keep one of them: kmq tracker fleet {fleets[-1].name} --remove {queue}"
        found.append(Finding("fleet", Level.UNHEALTHY, what, repair))
    found += chain(*(_fleet(fleet, queue) for fleet in fleets))
    found += topic_findings("fleet", "coordination", fleets[0].topic, facts.cluster.broker_count, "the fleet")
    yield from found
    if not found:
        text = f"fleet {fleets[0].name}: tracked by {fleets[0].tracked_by}, {fleets[0].processes - 1} on standby"
        yield Finding("fleet", Level.OK, text)


def _fleet(fleet: FleetFacts, queue: str) -> Iterator[Finding]:
    start = f"kmq tracker run --fleet {fleet.name} {queue}"
    if fleet.is_paused:
        what = f"fleet {fleet.name} is paused: it redelivers nothing"
        repair = f"when the reason is over: kmq group pause kmq.fleet.{fleet.name} --end"
        yield Finding("fleet", Level.UNHEALTHY, what, repair)
    elif not fleet.processes:
        yield Finding("fleet", Level.UNHEALTHY, f"fleet {fleet.name} has no running process", f"start two: {start}")
    elif not fleet.tracked_by or fleet.tracked_by in fleet.stale:
        assigned = f"assigned to {fleet.assigned_to}" if fleet.assigned_to else "assigned to no process"
        what = f"no process of fleet {fleet.name} tracks {queue}, it is {assigned}"
        repair = f"look at the logs of the processes: kmq tracker fleet {fleet.name}"
        yield Finding("fleet", Level.UNHEALTHY, what, repair)
    elif fleet.processes == 1:
        what = f"fleet {fleet.name} has one process: no other one takes over if it fails"
        yield Finding("fleet", Level.WARNING, what, f"start a second one on another machine: {start}")
    if not fleet.is_complete:
        what = f"records of fleet {fleet.name} were removed from {fleet.topic.name} before a snapshot replaced them"
        repair = "wait a minute; if it stays, raise retention.ms of the topic to at least an hour"
        yield Finding("fleet", Level.WARNING, what, repair)


def _consumers(view: QueueView) -> Iterator[Finding]:
    group, ready = view.consumers, view.default_ready
    for name, each in view.logical.items():
        if each.ready and (each.group is None or not each.group.members):
            what = f"{counted(each.ready, 'message')} of logical queue {name} ready and no consumer of it"
            repair = f"start workers with logical_queue={name!r}; if the name is wrong, correct its sender"
            yield Finding("consumers", Level.UNHEALTHY, what, repair)
    members = sum(1 for theirs in group.members.values() if theirs)
    if not group.members and ready:
        what = f"{counted(ready, 'message')} ready and no consumer in {group.name}"
        yield Finding("consumers", Level.UNHEALTHY, what, "start workers")
    elif not group.members:
        if not view.logical:
            yield Finding("consumers", Level.OK, f"none in {group.name}, no message is ready")
    else:
        text = f"{len(group.members)} in {group.name} ({group.state.lower()}), {members} with partitions"
        missing = view.queue_topic.partition_count - sum(map(len, group.members.values()))
        if missing > 0 and group.state.lower() == "stable":
            what = f"{text}; {missing} partitions have no consumer"
            yield Finding("consumers", Level.WARNING, what, "wait for the rebalance")
        else:
            yield Finding("consumers", Level.OK, f"{text}; {counted(ready, 'message')} ready")
    served = [
        f"{name} ({counted(len(each.group.members), 'consumer')}, {each.ready} ready)"
        for name, each in view.logical.items()
        if each.group is not None and (each.group.members or not each.ready)
    ]
    if served:
        yield Finding("consumers", Level.OK, f"logical queues: {', '.join(served)}")


def _removed_messages(view: QueueView) -> Iterator[Finding]:
    for removed in _removed(view.queue_topic, view.consumers.positions, "messages"):
        what = f"{removed} before a consumer started them: they are lost"
        yield Finding("consumers", Level.UNHEALTHY, what, "raise retention.ms of the queue topic, add workers")


def _overdue(view: QueueView) -> Iterator[Finding]:
    overdue, deferred = view.overdue(OVERDUE_MS), view.deferred
    if not overdue:
        text = counted(view.in_flight, "message") + (f" and {deferred} deferred" if deferred else "")
        yield Finding("in flight", Level.OK, f"{text}, none past its deadline")
        return
    earliest_ms = min(int(each.deadlines_ms.min()) for each in view.partitions.values() if len(each.deadlines_ms))
    what = (
        f"{overdue} of {counted(view.in_flight + deferred, 'message')} "
        f"{'is past its' if overdue == 1 else 'are past their'} deadline, the oldest by "
        f"{span(view.now_ms - earliest_ms)}: no tracker redelivers them"
    )
    repair = CORRECT if view.life is Life.FAILING else f"start the tracker: kmq tracker run {view.queue}"
    yield Finding("in flight", Level.UNHEALTHY, what, repair)


def _missing_ticks(view: QueueView) -> Iterator[Finding]:
    """Find partitions where a deadline has passed and no TICK followed: a tracker decides only at TICKs."""
    since_ms = {
        partition: deadline_at_ms
        for partition, each in view.partitions.items()
        if (deadline_at_ms := each.due_without_tick_since_ms()) is not None
        and deadline_at_ms < view.now_ms - OVERDUE_MS
    }
    if since_ms and view.life is Life.RUNNING:
        places = ", ".join(map(str, sorted(since_ms)))
        what = (
            f"no TICK for {span(view.now_ms - min(since_ms.values()))} although messages are due: partitions {places}"
        )
        repair = "look for 'cannot write TICKs' in the tracker's log; restart the tracker"
        yield Finding("ticks", Level.UNHEALTHY, what, repair)


def _stuck_workers(facts: DoctorFacts) -> Iterator[Finding]:
    """Find consumers that settle nothing, or take nothing, while messages are ready."""
    view, lease_ms = facts.view, facts.lease_ms
    holders = view.holders()
    for name, members in facts.taking_nothing.items():
        if not (idle := members - holders.keys()):
            continue
        named, ready = (f" of logical queue {name}", view.logical[name].ready) if name else ("", view.default_ready)
        what = f"no message{named} was taken for at least {span(SILENT_MS)}"
        if idle < {each for each, theirs in view.groups[name].members.items() if theirs}:
            what += f" by {_some(tuple(sorted(idle)))}, though there are some in their partitions"
        what += f"; ready: {ready}"
        repair = "their handlers hang, or they do not call receive: look at the consumers' logs, and restart them"
        yield Finding("workers", Level.UNHEALTHY, what, repair)
    if not holders or not view.ready.count:
        return
    settled_ms = max((each.acked_at_ms for each in view.partitions.values()), default=0)
    quiet_ms = view.now_ms - max(settled_ms, min(holder.since_ms for holder in holders.values()))
    if quiet_ms < max(SILENT_MS, 2 * lease_ms):
        return
    most = sorted(holders.items(), key=lambda each: -each[1].message_count)[:MAX_LISTED]
    text = "; ".join(
        f"{name or 'unnamed'} holds {count} for {span(view.now_ms - since_ms)}" for name, (count, since_ms) in most
    )
    what = f"no message was settled for {span(quiet_ms)} while {view.ready.count} are ready: {text}"
    repair = (
        "if their handlers hang, keep-alive renews the leases: restart those processes, their messages are redelivered"
    )
    yield Finding("workers", Level.UNHEALTHY, what, repair)


def _open_transactions(facts: DoctorFacts) -> Iterator[Finding]:
    for name, partitions in facts.blocked.items():
        if partitions:
            what = (
                f"a transaction has been open in {name} for more than {span(OPEN_TOO_LONG_MS)}: partitions "
                f"{', '.join(map(str, partitions))}; what is behind it is neither received nor redelivered"
            )
            repair = 'kafka-transactions.sh find-hanging; docs/operations.md, "A transaction hangs"'
            yield Finding("transactions", Level.UNHEALTHY, what, repair)


def _unreadable(view: QueueView) -> Iterator[Finding]:
    count = sum(each.unreadable for each in view.partitions.values())
    if count:
        places = [f"[{partition}]@{at}" for partition, each in view.partitions.items() for at in each.unreadable_at]
        are_not_markers = "is not a marker" if count == 1 else "are not markers"
        where = ", ".join(places[:MAX_LISTED])
        what = f"{counted(count, 'record')} of {view.markers_topic.name} {are_not_markers}: {where}"
        yield Finding("markers", Level.WARNING, what, "another program writes to the topic: revoke its right to Write")


def _dead_letters(facts: DoctorFacts) -> Iterator[Finding]:
    view, letters = facts.view, facts.view.dead_letters
    if not view.dead_letter_topic.partition_count:
        return
    if not letters.count:
        yield Finding("dead letters", Level.OK, "none")
        return
    text = f"{'' if letters.is_exact else 'at most '}{letters.count} in {view.dead_letter_topic.name}"
    if facts.new_dead_letters:
        text += f", growing: {min(facts.new_dead_letters, letters.count)} in the last hour"
    repair = f"kmq dlq list {view.queue}, then kmq dlq redrive {view.queue} or purge"
    yield Finding("dead letters", Level.WARNING, text, repair)


def _some(ids: tuple[str, ...]) -> str:
    return ", ".join(ids[:MAX_LISTED]) + (f" and {len(ids) - MAX_LISTED} more" if len(ids) > MAX_LISTED else "")
