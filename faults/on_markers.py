"""Faults of the markers log: markers twice, late, out of order, of no message; records that are no markers; floods."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from faults.load import finished_messages, messages_in_flight, write
from faults.oracle import is_by_a_tracker
from faults.stage import CALM, Stage
from kmq_spark.core.markers import MAX_DUE_AT_MS, MAX_MESSAGES_PER_MARKER, Marker, MarkerType, OffsetRange, Outcome
from kmq_spark.wire.codec import encode_marker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from faults.campaign import Campaign

HOSTILE_LATE_MS = 60_000
"""I8: so long a hostile writer may hold up redeliveries: the tracker reads and ends whatever the markers name."""

HOSTILE_GROWTH_MIB = 200
"""I13: by so much the Python processes of a tracker may grow under hostile markers."""

NOT_MARKERS: tuple[bytes | None, ...] = (
    None,
    b"",
    b"\xff\xff\xff",
    b"\x08\x09",  # version 9
    b"\x10\x2a\x1a\x00",  # a type of the future
    b"{}",
    b"\x00" * 900_000,
    encode_marker(Marker(MarkerType.START, 0, (OffsetRange(1, 1),), redeliver_after_ms=1_000))[:3],
)


def corrupted(campaign: Campaign) -> Stage:
    """F14: records that are no markers, among those that are."""
    stage = Stage(campaign, "f14")
    tracker = stage.tracked()
    stage.send(rate=campaign.rate(150))
    stage.worker("crew").wait_working()
    for _ in range(campaign.times(2)):
        for value in NOT_MARKERS:
            write(stage, value, stage.random.randrange(stage.partitions))
            stage.injected("no marker", length=len(value or b""))
            time.sleep(0.2)
    stage.drain()
    if restarts := tracker.restarts():
        stage.fail(f"F14: the query was restarted {restarts} times")
    told = sum(status["counters"]["unreadable"] for status in tracker.statuses(stage.queue).values())
    if told != stage.injections:
        stage.fail(f"F14: {stage.injections} records were no markers, and the tracker has counted {told}")
    return stage


def disordered(campaign: Campaign) -> Stage:
    """F9: markers twice, late, out of order, and of messages that do not exist."""
    stage = Stage(campaign, "f9", **CALM)
    stage.tracked()
    stage.send(rate=0, count=400).join()
    stage.worker("crew").wait_working(400, 40 * stage.patience)
    for _ in range(campaign.times(3)):
        for injection in (
            _ends_again,
            _keep_alive_after_end,
            _end_without_start,
            _late_end,
            _start_after_end,
            _nowhere,
        ):
            injection(stage, stage.random.randrange(stage.partitions), (OffsetRange(stage.random.randrange(50), 3),))
            stage.injected(injection.__name__.strip("_").replace("_", " "))
            time.sleep(0.3)
    _log_again(stage)
    stage.injected("a part of the log again")
    stage.drain()
    return stage


def _ends_again(stage: Stage, partition: int, covered: tuple[OffsetRange, ...]) -> None:
    write(stage, Marker(MarkerType.END, partition, covered), times=3)


def _keep_alive_after_end(stage: Stage, partition: int, covered: tuple[OffsetRange, ...]) -> None:
    write(stage, Marker(MarkerType.KEEPALIVE, partition, covered, redeliver_after_ms=500))


def _end_without_start(stage: Stage, partition: int, _covered: tuple[OffsetRange, ...]) -> None:
    never = OffsetRange(10_000_000 + stage.random.randrange(1_000), 5)
    write(stage, Marker(MarkerType.END, partition, (never,), outcome=stage.random.choice(list(Outcome)[:3])))


def _late_end(stage: Stage, partition: int, covered: tuple[OffsetRange, ...]) -> None:
    """START, then nothing for zero to three leases, then END: redelivered where it came too late, and not otherwise."""
    write(stage, Marker(MarkerType.START, partition, covered, redeliver_after_ms=400))
    time.sleep(0.4 * stage.random.uniform(0, 3))
    write(stage, Marker(MarkerType.END, partition, covered))


def _start_after_end(stage: Stage, partition: int, covered: tuple[OffsetRange, ...]) -> None:
    write(stage, Marker(MarkerType.END, partition, covered))
    write(stage, Marker(MarkerType.START, partition, covered, redeliver_after_ms=600))


def _nowhere(stage: Stage, _partition: int, covered: tuple[OffsetRange, ...]) -> None:
    """A message of a queue partition that does not exist: its lease ends, and nothing else comes of it."""
    write(stage, Marker(MarkerType.START, 999, covered, redeliver_after_ms=300), partition=0)


def _log_again(stage: Stage) -> None:
    """Write a part of every markers partition once more, as a replication tool that lost its place does."""
    for partition, log in stage.dump().markers.items():
        ours = [one.marker for one in log if one.marker is not None and one.marker.ranges]
        begin = stage.random.randrange(max(1, len(ours) - 20))
        for marker in ours[begin : begin + 20]:
            if not is_by_a_tracker(marker):
                write(stage, marker, partition)


def many_at_once(campaign: Campaign) -> Stage:
    """F20: tens of thousands of messages that fall due at the same instant."""
    stage = Stage(campaign, "f20-burst", max_deliveries=0, work_ms=0, **CALM)
    stage.tracked()
    finished_messages(stage, 1_000)
    messages_in_flight(stage, campaign.times(20_000, least=2_000), lease_ms=1_000)
    stage.injected("mass expiry")
    stage.drain()
    return stage


def hostile(campaign: Campaign) -> Stage:
    """F28: markers of a hostile writer: of 100,000 unknown messages each, past the end, due in the year 9999."""
    stage = Stage(campaign, "f28", poison=0.0)
    stage.judge(late_ms=HOSTILE_LATE_MS)
    # A hundred thousand decisions in transactions of a hundred would measure the harness.
    tracker = stage.tracked(max_transaction_messages=None)
    stage.send(rate=campaign.rate(100))
    stage.worker("crew").wait_working(50)
    time.sleep(3)
    tracker.python_mib = 0
    tracker.look()
    before_mib = tracker.python_mib
    for number, (marker, times, what) in enumerate(_hostile_markers(campaign.times(3))):
        # What becomes rows of the state goes to one partition at a time, everything else to all.
        is_start = marker.type is MarkerType.START
        partitions = [number % stage.partitions] if is_start else range(stage.partitions)
        for partition in partitions:
            write(stage, replace(marker, queue_partition=partition), times=times, is_hostile=True)
        stage.injected(what, markers=times * len(partitions))
        time.sleep(1)
    time.sleep(5)
    tracker.look()
    grown_mib = tracker.python_mib - before_mib
    stage.notes.append(f"the tracker's Python processes grew by {grown_mib} MiB at their peak")
    if grown_mib > HOSTILE_GROWTH_MIB:
        stage.fail(f"I13: the tracker grew by {grown_mib} MiB, bound {HOSTILE_GROWTH_MIB} MiB")
    stage.drain()
    return stage


def _hostile_markers(rounds: int) -> Iterator[tuple[Marker, int, str]]:
    """Yield markers, how often each is written to each partition, and what they are."""
    for number in range(rounds):
        many = (OffsetRange(50_000_000 + number * MAX_MESSAGES_PER_MARKER, MAX_MESSAGES_PER_MARKER),)
        keep_alive = Marker(MarkerType.KEEPALIVE, 0, many, redeliver_after_ms=1_000)
        yield keep_alive, 50, "200 KEEPALIVEs of 100,000 unknown messages"
        past = replace(keep_alive, type=MarkerType.START)
        yield past, 1, "START of 100,000 messages past the end"
        last = replace(past, due_at_ms=MAX_DUE_AT_MS, never_handed_out=True)
        yield last, 1, "START of 100,000 messages past the end, due in the year 9999"
