"""
Judge what the members of a coordination group did, from what they wrote down and from the log of the group.

Rule 1: acts are compared by the host's monotonic clock, which all processes share; the log by its append times.
Rule 2: of the product only the codec of its records is used.

The promises: **C1** no two members act on a resource at the same time, and epochs only rise. **C2** every epoch is the
offset of a CLAIM of that member and resource. **C3** a claim passes to another member only after its release, or more
than 2T after the last renewal. **C4** a resource of a killed member is acted on again within 2T + 1 s. **C5** at most
once: no message is handed out twice, and a kill loses a batch at most. **C6** at least once: none is missing, and what
is handed out again was handed out within T before its owner died.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from faults.evidence import Violation
from faults.topics import read_topic
from kmq_spark.core.coordination.records import Record, RecordType
from kmq_spark.wire.coordination import decode_record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

RENEWS = frozenset({RecordType.JOIN, RecordType.HEARTBEAT})


class Act(NamedTuple):
    """A process was allowed to act on a resource at this instant."""

    at_ms: float
    resource: str
    epoch: int
    process: str


class Handed(NamedTuple):
    """A message that a process handed out."""

    at_ms: float
    partition: int
    offset: int
    epoch: int
    process: str


class Kill(NamedTuple):
    """A process that was killed."""

    at_ms: float
    process: str


class Disturbance(NamedTuple):
    """A time in which no broker led the group's partition, or another one began to."""

    begin_ms: float
    end_ms: float


class Logged(NamedTuple):
    """A record of the coordination topic at its place."""

    offset: int
    append_ms: int
    record: Record


class Holding(NamedTuple):
    """The acts of one process on one resource under one epoch."""

    resource: str
    epoch: int
    process: str
    first_ms: float
    last_ms: float


def said(events: Iterable[Mapping[str, Any]]) -> tuple[list[Act], list[Handed]]:
    """Return what the processes wrote down."""
    acts, handed = [], []
    for event in events:
        if event["event"] == "act":
            acts.append(Act(event["at_ms"], event["resource"], event["epoch"], event["actor"]))
        elif event["event"] == "handed":
            place = event["partition"], event["offset"], event["epoch"]
            handed.append(Handed(event["at_ms"], *place, event["actor"]))
    return acts, handed


def client_of(process: str) -> str:
    """Return the client id of a process; they are named `<client id>-<number>`."""
    return process.rpartition("-")[0]


def holdings_of(acts: Iterable[Act]) -> list[Holding]:
    """Return the acts by resource, epoch and process, in this order."""
    found: dict[tuple[str, int, str], tuple[float, float]] = {}
    for act in acts:
        key = (act.resource, act.epoch, act.process)
        first, last = found.get(key, (act.at_ms, act.at_ms))
        found[key] = min(first, act.at_ms), max(last, act.at_ms)
    return [Holding(*key, *times) for key, times in sorted(found.items())]


def overlaps(holdings: Sequence[Holding]) -> Iterator[Violation]:
    """C1: yield two holdings of one resource of which the second begins before the first ends."""
    for before, after in pairwise(holdings):
        if before.resource != after.resource:
            continue
        if before.epoch == after.epoch:
            what = f"{before.resource}: epoch {before.epoch} was used by {before.process} and by {after.process}"
            yield Violation("C1", what)
        elif after.first_ms <= before.last_ms:
            what = (
                f"{before.resource}: {after.process} acted under epoch {after.epoch} "
                f"{before.last_ms - after.first_ms:.0f} ms before {before.process} ended under epoch {before.epoch}"
            )
            yield Violation("C1", what)


def bad_grants(holdings: Sequence[Holding], log: Mapping[int, Logged], heartbeat_ms: int) -> Iterator[Violation]:
    """C2, C3: yield epochs that the log does not grant."""
    for one in holdings:
        at = log.get(one.epoch)
        expected = RecordType.CLAIM, one.resource, client_of(one.process)
        if at is None or (at.record.type, at.record.resource, at.record.client_id) != expected:
            what = f"{one.process} acted on {one.resource} under epoch {one.epoch}, and that record is {at}"
            yield Violation("C2", what)
    granted = {one.epoch for one in holdings}
    by_client: defaultdict[str, list[Logged]] = defaultdict(list)
    for _, logged in sorted(log.items()):
        by_client[logged.record.client_id].append(logged)
    for before, after in pairwise(holdings):
        is_passed_on = before.resource == after.resource and client_of(before.process) != client_of(after.process)
        if not is_passed_on or before.epoch not in log or after.epoch not in log:
            continue
        claimed = log[before.epoch].record
        own = by_client[client_of(before.process)]
        between = [one for one in own if before.epoch <= one.offset < after.epoch]
        # Renewals behind a gap of more than 2T had no effect: the claim had lapsed. A CLAIM that was refused renews
        # nothing; one that was granted shows in the acts under it.
        renewed_ms = [
            one.append_ms
            for one in between
            if one.record.instance == claimed.instance and (one.record.type in RENEWS or one.offset in granted)
        ]
        longest_ms = max(later - earlier for earlier, later in pairwise([*renewed_ms, log[after.epoch].append_ms]))
        if longest_ms <= 2 * heartbeat_ms and not any(_releases(one.record, before) for one in between):
            what = (
                f"{after.process} was granted {after.resource}, which {before.process} had renewed at least every "
                f"{longest_ms} ms and had not released"
            )
            yield Violation("C3", what)


def _releases(record: Record, holding: Holding) -> bool:
    is_release = record.type is RecordType.RELEASE
    is_release = is_release and record.resource == holding.resource and record.epoch == holding.epoch
    return is_release or record.type is RecordType.LEAVE


def takeovers_ms(holdings: Sequence[Holding], kills: Sequence[Kill], held_within_ms: float) -> list[float]:
    """C4: return how long each resource was without an owner, ms, that a process held just before it was killed."""
    killed_ms = {kill.process: kill.at_ms for kill in kills}
    return [
        after.first_ms - killed_ms[before.process]
        for before, after in pairwise(holdings)
        if before.resource == after.resource
        and before.process in killed_ms
        and killed_ms[before.process] - before.last_ms < held_within_ms
    ]


def orphans(holdings: Sequence[Holding], kills: Sequence[Kill], held_within_ms: float) -> Iterator[Violation]:
    """C4: yield resources on which no process has acted since their holder was killed."""
    killed_ms = {kill.process: kill.at_ms for kill in kills}
    newest = {one.resource: one for one in holdings}
    for one in newest.values():
        if one.process in killed_ms and killed_ms[one.process] - one.last_ms < held_within_ms:
            yield Violation("C4", f"{one.resource}: no process has acted on it since {one.process} was killed")


def undisturbed(kills: Iterable[Kill], disturbances: Sequence[Disturbance], within_ms: float) -> list[Kill]:
    """Return the kills after which the broker was there and led the group's partition for as long as given."""
    return [
        kill
        for kill in kills
        if not any(one.begin_ms <= kill.at_ms + within_ms and kill.at_ms <= one.end_ms for one in disturbances)
    ]


def repeats(handed: Sequence[Handed]) -> dict[tuple[int, int], list[Handed]]:
    """Return the messages that were handed out more than once, each with when and by whom."""
    found: defaultdict[tuple[int, int], list[Handed]] = defaultdict(list)
    for one in sorted(handed):
        found[one.partition, one.offset].append(one)
    return {place: each for place, each in found.items() if len(each) > 1}


def missing(handed: Iterable[Handed], ends: Mapping[int, int]) -> int:
    """Return how many messages below the ends of their partitions were never handed out."""
    seen = {(one.partition, one.offset) for one in handed}
    return sum(ends.values()) - sum(offset < ends[partition] for partition, offset in seen)


def late_repeats(handed: Sequence[Handed], within_ms: float) -> Iterator[Violation]:
    """C6: yield messages handed out again that their first owner had handed out long before its end."""
    ends_ms: dict[tuple[int, int, str], float] = {}
    for one in handed:
        key = (one.partition, one.epoch, one.process)
        ends_ms[key] = max(ends_ms.get(key, one.at_ms), one.at_ms)
    for (partition, offset), each in repeats(handed).items():
        for one in each[:-1]:
            before_ms = ends_ms[partition, one.epoch, one.process] - one.at_ms
            if before_ms > within_ms:
                what = f"{partition}:{offset} came again; {one.process} handed it out {before_ms:.0f} ms before its end"
                yield Violation("C6", what)


def read_log(bootstrap_servers: str, topic: str, group: str) -> dict[int, Logged]:
    """Return the records of a group by offset."""
    return {
        (message.offset() or 0): Logged(message.offset() or 0, message.timestamp()[1], decode_record(message.value()))
        for message in read_topic(topic, bootstrap_servers)
        if message.key() == group.encode()
    }
