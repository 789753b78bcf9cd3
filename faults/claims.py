"""
Judge what the members of a coordination group did, from what they wrote down and from the log of the group.

Rule 1: nothing of the product is imported: records are read by a plain consumer and decoded by hand.
Rule 2: acts are compared by the host's monotonic clock, which all processes share; the log by its append times.

The promises: **C1** no two members act on a resource at the same time, and epochs only rise. **C2** every epoch is the
offset of a CLAIM of that member and resource. **C3** a claim passes to another member only after its release, or more
than 2T after the last renewal. **C4** a resource of a killed member is acted on again within 2T + 1 s. **C5** at most
once: no message is handed out twice, and a kill loses a batch at most. **C6** at least once: none is missing, and what
is handed out again was handed out within T before its owner died.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from confluent_kafka import Consumer, TopicPartition

from faults.topics import patiently

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

READ_TIMEOUT_S = 60.0
JOIN, HEARTBEAT, LEAVE, CLAIM, RELEASE = 1, 2, 3, 4, 5
"""Types of records, as docs/coordination.md numbers them."""

_TYPE, _CLIENT_ID, _INSTANCE, _RESOURCE, _EPOCH = 2, 3, 4, 11, 12
"""Fields of a record."""

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


class Act(NamedTuple):
    """An instant at which a process was allowed to act on a resource."""

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


class LogRecord(NamedTuple):
    """A record of the coordination topic."""

    offset: int
    append_ms: int
    type: int
    client_id: str
    instance: str
    resource: str
    epoch: int


class Holding(NamedTuple):
    """The acts of one process on one resource under one epoch."""

    resource: str
    epoch: int
    process: str
    first_ms: float
    last_ms: float


def read_lines(folder: Path) -> tuple[list[Act], list[Handed]]:
    """Return what the processes wrote down; a line that a kill has cut short is left out."""
    acts, handed = [], []
    for file in sorted(folder.glob("*.acts")):
        for line in file.read_text("utf-8").split("\n")[:-1]:
            kind, at_ms, *rest = line.split()
            if kind == "act":
                acts.append(Act(float(at_ms), rest[0], int(rest[1]), file.stem))
            else:
                handed.append(Handed(float(at_ms), int(rest[0]), int(rest[1]), int(rest[2]), file.stem))
    return acts, handed


def client_of(process: str) -> str:
    """Return the client id of a process; files are named `<client id>-<number>`."""
    return process.rpartition("-")[0]


def holdings_of(acts: Iterable[Act]) -> list[Holding]:
    """Return the acts by resource, epoch and process, in this order."""
    found: dict[tuple[str, int, str], tuple[float, float]] = {}
    for act in acts:
        key = (act.resource, act.epoch, act.process)
        first, last = found.get(key, (act.at_ms, act.at_ms))
        found[key] = min(first, act.at_ms), max(last, act.at_ms)
    return [Holding(*key, *times) for key, times in sorted(found.items())]


def overlaps(holdings: Sequence[Holding]) -> Iterator[str]:
    """C1: yield two holdings of one resource of which the second begins before the first ends."""
    for before, after in itertools.pairwise(holdings):
        if before.resource != after.resource:
            continue
        if before.epoch == after.epoch:
            yield f"{before.resource}: epoch {before.epoch} was used by {before.process} and by {after.process}"
        elif after.first_ms <= before.last_ms:
            yield (
                f"{before.resource}: {after.process} acted under epoch {after.epoch} "
                f"{before.last_ms - after.first_ms:.0f} ms before {before.process} ended under epoch {before.epoch}"
            )


def bad_grants(holdings: Sequence[Holding], log: Mapping[int, LogRecord], heartbeat_ms: int) -> Iterator[str]:
    """C2, C3: yield epochs that the log does not grant."""
    for one in holdings:
        record = log.get(one.epoch)
        is_claim = record is not None and record.type == CLAIM and record.resource == one.resource
        if not is_claim or record is None or record.client_id != client_of(one.process):
            yield f"C2: {one.process} acted on {one.resource} under epoch {one.epoch}, and that record is {record}"
    acted_under = {one.epoch for one in holdings}
    by_client: defaultdict[str, list[LogRecord]] = defaultdict(list)
    for _, record in sorted(log.items()):
        by_client[record.client_id].append(record)
    for before, after in itertools.pairwise(holdings):
        is_passed_on = before.resource == after.resource and client_of(before.process) != client_of(after.process)
        if not is_passed_on or before.epoch not in log or after.epoch not in log:
            continue
        instance, claimed_ms = log[before.epoch].instance, log[after.epoch].append_ms
        between = [one for one in by_client[client_of(before.process)] if before.epoch <= one.offset < after.epoch]
        is_released = any(
            one.type == LEAVE or (one.type == RELEASE and one.resource == before.resource and one.epoch == before.epoch)
            for one in between
        )
        # Renewals behind a gap of more than 2T had no effect: the claim had lapsed. A CLAIM that was refused renews
        # nothing; one that was granted shows in the acts under it.
        renewed_ms = [
            one.append_ms
            for one in between
            if one.instance == instance
            and (one.type in {JOIN, HEARTBEAT} or (one.type == CLAIM and one.offset in acted_under))
        ]
        longest_ms = max(later - earlier for earlier, later in itertools.pairwise([*renewed_ms, claimed_ms]))
        if not is_released and longest_ms <= 2 * heartbeat_ms:
            yield (
                f"C3: {after.process} was granted {after.resource}, which {before.process} had renewed at least every "
                f"{longest_ms} ms and had not released"
            )


def takeovers_ms(holdings: Sequence[Holding], kills: Sequence[Kill], held_within_ms: float) -> list[float]:
    """
    C4: return how long each resource of a killed process was without an owner, milliseconds.

    Args:
        holdings: In order.
        kills: The killed processes.
        held_within_ms: A process that acted on a resource so shortly before it was killed held it.
    """
    killed_ms = {kill.process: kill.at_ms for kill in kills}
    return [
        after.first_ms - killed_ms[before.process]
        for before, after in itertools.pairwise(holdings)
        if before.resource == after.resource
        and before.process in killed_ms
        and killed_ms[before.process] - before.last_ms < held_within_ms
    ]


def orphans(holdings: Sequence[Holding], kills: Sequence[Kill], held_within_ms: float) -> Iterator[str]:
    """C4: yield resources on which no process has acted since their holder was killed."""
    killed_ms = {kill.process: kill.at_ms for kill in kills}
    newest = {one.resource: one for one in holdings}
    for one in newest.values():
        if one.process in killed_ms and killed_ms[one.process] - one.last_ms < held_within_ms:
            yield f"{one.resource}: no process has acted on it since {one.process} was killed"


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


def late_repeats(handed: Sequence[Handed], within_ms: float) -> Iterator[str]:
    """C6: yield messages handed out again that their first owner had handed out long before its end."""
    ends_ms: dict[tuple[int, int, str], float] = {}
    for one in handed:
        key = (one.partition, one.epoch, one.process)
        ends_ms[key] = max(ends_ms.get(key, one.at_ms), one.at_ms)
    for (partition, offset), each in repeats(handed).items():
        for one in each[:-1]:
            before_ms = ends_ms[partition, one.epoch, one.process] - one.at_ms
            if before_ms > within_ms:
                yield f"{partition}:{offset} came again; {one.process} handed it out {before_ms:.0f} ms before its end"


def summary(times_ms: Sequence[float]) -> str:
    """Return median and maximum of takeover times as text."""
    if not times_ms:
        return "no takeover"
    return f"{len(times_ms)} takeovers, p50 {statistics.median(times_ms):.0f} ms, max {max(times_ms):.0f} ms"


def read_log(bootstrap_servers: str, topic: str, group: str) -> dict[int, LogRecord]:
    """
    Return the records of a group by offset.

    Raises:
        RuntimeError: The end was not reached in time.
        ValueError: A record is no protobuf message.
    """
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers, "group.id": "kmq-faults-claims", "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )  # fmt: skip
    try:
        partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
        # As of now: the members of a living group write on, and a reader that waits for the end never gets there.
        watermarks = {
            number: patiently(
                partial(consumer.get_watermark_offsets, TopicPartition(topic, number), timeout=30, cached=False)
            )
            for number in partitions
        }
        unread = {number: end for number, (first, end) in watermarks.items() if end > first}
        consumer.assign([TopicPartition(topic, number, 0) for number in partitions])
        until_s = time.monotonic() + READ_TIMEOUT_S
        found: dict[int, LogRecord] = {}
        while unread:
            if time.monotonic() > until_s:
                message = f"cannot read {topic} to its end in {READ_TIMEOUT_S:g} s"
                raise RuntimeError(message)
            for record in consumer.consume(1_000, 0.1):
                if record.error() is not None:
                    continue  # it passes, or the time is over
                partition, offset = record.partition() or 0, record.offset() or 0
                if record.key() == group.encode():
                    found[offset] = _decoded(offset, record.timestamp()[1], bytes(record.value() or b""))
                if offset + 1 >= unread.get(partition, 0):
                    unread.pop(partition, None)
        return found
    finally:
        consumer.close()


def _decoded(offset: int, append_ms: int, value: bytes) -> LogRecord:
    numbers: dict[int, int] = {}
    texts: dict[int, bytes] = {}
    at = 0
    while at < len(value):
        tag, at = _varint(value, at)
        field, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            numbers[field], at = _varint(value, at)
        elif wire in {_FIXED64, _FIXED32}:
            at += 8 if wire == _FIXED64 else 4
        elif wire == _LENGTH:
            size, at = _varint(value, at)
            texts[field] = value[at : at + size]
            at += size
        else:
            message = f"record at {offset} is no protobuf message: wire type {wire}"
            raise ValueError(message)
    return LogRecord(
        offset,
        append_ms,
        numbers.get(_TYPE, 0),
        texts.get(_CLIENT_ID, b"").decode(),
        texts.get(_INSTANCE, b"").decode(),
        texts.get(_RESOURCE, b"").decode(),
        numbers.get(_EPOCH, 0),
    )


def _varint(value: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = value[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:  # noqa: PLR2004  # the last byte of a number
            return number, at
