"""Faults of the markers log: twice, late, out of order, of unstarted messages; records that are no markers."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from faults.load import finished_messages, messages_in_flight, write_marker, write_record
from faults.processes import processes_of
from faults.product_log import read_marker_logs
from kmq_spark.core.markers import MAX_DUE_AT_MS, MAX_MESSAGES_PER_MARKER, Marker, MarkerType, OffsetRange, Outcome
from kmq_spark.wire.codec import encode_marker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from faults.campaign import Campaign
    from faults.stage import Stage

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
    stage = campaign.stage("f14")
    generator = random.Random(stage.seed)  # noqa: S311  # repeatable
    with stage.tracking() as tracker:
        stage.send(rate=campaign.rate(150))
        stage.worker("crew").wait_working()
        written = 0
        for _ in range(campaign.scaled(3, least=1)):
            for value in NOT_MARKERS:
                partition = generator.randrange(stage.layout.partition_count)
                write_record(stage, value, partition)
                stage.injected("no marker", length=len(value or b""), partition=partition)
                written += 1
                time.sleep(0.2)
        stage.drain()
        if tracker.stats.restarts:
            stage.fail(f"F14: the query was restarted {tracker.stats.restarts} times")
    found = sum(status.counters["unreadable"] for status in tracker.stats.statuses.values())
    if found != written:
        stage.fail(f"F14: {written} records were no markers, the tracker counted {found}")
    return stage


def disordered(campaign: Campaign) -> Stage:
    """F9: markers twice, late and out of order."""
    stage = campaign.stage("f9", raised=0.0, rejected=0.0, poison=0.0, slow=0.0)
    generator = random.Random(stage.seed)  # noqa: S311  # repeatable
    with stage.tracking():
        stage.send(rate=0, count=400).join()
        stage.worker("crew").wait_working(400, 40 * stage.patience)
        for _ in range(campaign.scaled(3, least=1)):
            for injection in (
                _ends_again,
                _keep_alive_after_end,
                _end_without_start,
                _late_end,
                _start_after_end,
                _start_of_no_partition,
            ):
                injection(stage, generator)
                stage.injected(injection.__name__.strip("_").replace("_", " "))
                time.sleep(0.3)
        _log_again(stage, generator)
        stage.injected("a part of the log again")
        stage.drain()
    return stage


def _pick(stage: Stage, generator: random.Random) -> tuple[int, OffsetRange]:
    return generator.randrange(stage.layout.partition_count), OffsetRange(generator.randrange(50), 3)


def _ends_again(stage: Stage, generator: random.Random) -> None:
    partition, covered = _pick(stage, generator)
    for _ in range(3):
        write_marker(stage, Marker(MarkerType.END, partition, (covered,)))


def _keep_alive_after_end(stage: Stage, generator: random.Random) -> None:
    partition, covered = _pick(stage, generator)
    write_marker(stage, Marker(MarkerType.KEEPALIVE, partition, (covered,), redeliver_after_ms=500))


def _end_without_start(stage: Stage, generator: random.Random) -> None:
    partition, _ = _pick(stage, generator)
    never = OffsetRange(10_000_000 + generator.randrange(1_000), 5)
    write_marker(stage, Marker(MarkerType.END, partition, (never,), outcome=generator.choice(list(Outcome)[:3])))


def _late_end(stage: Stage, generator: random.Random) -> None:
    """START, then nothing for zero to three leases, then END: redelivered where it came too late, and not otherwise."""
    partition, covered = _pick(stage, generator)
    write_marker(stage, Marker(MarkerType.START, partition, (covered,), redeliver_after_ms=400))
    time.sleep(0.4 * generator.uniform(0, 3))
    write_marker(stage, Marker(MarkerType.END, partition, (covered,)))


def _start_after_end(stage: Stage, generator: random.Random) -> None:
    partition, covered = _pick(stage, generator)
    write_marker(stage, Marker(MarkerType.END, partition, (covered,)))
    write_marker(stage, Marker(MarkerType.START, partition, (covered,), redeliver_after_ms=600))


def _start_of_no_partition(stage: Stage, generator: random.Random) -> None:
    """A message of a queue partition that does not exist: its lease ends, and nothing else comes of it."""
    covered = OffsetRange(generator.randrange(1_000), 2)
    write_marker(stage, Marker(MarkerType.START, 999, (covered,), redeliver_after_ms=300), partition=0)


def _log_again(stage: Stage, generator: random.Random) -> None:
    """Write a part of every markers partition once more, as a replication tool that lost its place does."""
    for partition, log in read_marker_logs(stage.queue, stage.bootstrap_servers).items():
        theirs = {MarkerType.TICK, MarkerType.RULES}
        by_workers = {Outcome.ACKED, Outcome.REJECTED}
        ours = [one.marker for one in log if one.marker is not None and one.marker.type not in theirs]
        begin = generator.randrange(max(1, len(ours) - 20))
        for marker in ours[begin : begin + 20]:
            if marker.outcome in by_workers:
                write_marker(stage, marker, partition)


def flooded(campaign: Campaign) -> Stage:
    """F20: floods of KEEPALIVEs, of messages in flight and of unknown messages."""
    stage = campaign.stage("f20")
    with stage.tracking():
        stage.send(rate=campaign.rate(150))
        stage.worker("crew").wait_working()
        for number in range(campaign.scaled(8, least=1)):
            partition = number % stage.layout.partition_count
            unknown = tuple(OffsetRange(20_000_000 + 2 * gap, 1) for gap in range(1_000))
            ranges = unknown if number % 2 else (OffsetRange(1_000_000, 5_000),)
            marker = Marker(MarkerType.KEEPALIVE, partition, ranges, redeliver_after_ms=1_000)
            write_record(stage, encode_marker(marker), partition, times=100)
            stage.injected("flood of KEEPALIVEs", markers=100, unknown=bool(number % 2))
            time.sleep(0.5)
        stage.drain()
    return stage


def many_at_once(campaign: Campaign) -> Stage:
    """F20: tens of thousands of messages that fall due at the same instant."""
    stage = campaign.stage("f20-burst", max_deliveries=0, raised=0.0, rejected=0.0, poison=0.0, slow=0.0, work_ms=0)
    with stage.tracking():
        finished_messages(stage, 1_000)
        messages_in_flight(stage, campaign.scaled(20_000, least=2_000), lease_ms=1_000)
        stage.injected("mass expiry")
        stage.drain()
    return stage


def hostile(campaign: Campaign) -> Stage:
    """F28: markers of a hostile writer: 100,000 unknown messages each, past the end, in the year 9999, forged ENDs."""
    stage = campaign.stage("f28", poison=0.0)
    stage.judge(late_ms=HOSTILE_LATE_MS)
    generator = random.Random(stage.seed)  # noqa: S311  # repeatable
    # A hundred thousand decisions in transactions of a hundred would measure the harness.
    tracker = stage.tracker(max_transaction_messages=None)
    stage.must_get_ready(tracker)
    stage.send(rate=campaign.rate(100))
    stage.worker("crew").wait_working(50)
    time.sleep(3)
    with MemoryPeak(tracker.group) as peak:
        for number, (marker, times, what) in enumerate(_hostile_markers(campaign, generator)):
            count = stage.layout.partition_count
            # What becomes rows of the state goes to one partition at a time, everything else to all.
            partitions = [number % count] if marker.type is MarkerType.START else range(count)
            for partition in partitions:
                value = encode_marker(replace(marker, queue_partition=partition if marker.ranges else -1))
                write_record(stage, value, partition, times=times, is_hostile=True)
            stage.injected(what, markers=times * len(partitions))
            time.sleep(1)
        time.sleep(5)
    grown_mib = peak.grown_mib()
    stage.notes.append(f"the tracker's Python processes grew by {grown_mib} MiB at their peak")
    if grown_mib > HOSTILE_GROWTH_MIB:
        stage.fail(f"I13: the tracker grew by {grown_mib} MiB, bound {HOSTILE_GROWTH_MIB} MiB")
    stage.drain()
    return stage


def _hostile_markers(campaign: Campaign, generator: random.Random) -> Iterator[tuple[Marker, int, str]]:
    """Yield markers, how often each is written to each partition, and what they are."""
    far = 50_000_000
    for number in range(campaign.scaled(4, least=1)):
        many = (OffsetRange(far + number * MAX_MESSAGES_PER_MARKER, MAX_MESSAGES_PER_MARKER),)
        keep_alive = Marker(MarkerType.KEEPALIVE, 0, many, redeliver_after_ms=1_000)
        yield keep_alive, 50, "200 KEEPALIVEs of 100,000 unknown messages"
        past = Marker(MarkerType.START, 0, many, redeliver_after_ms=1_000)
        yield past, 1, "START of 100,000 messages past the end"
        last = replace(past, due_at_ms=MAX_DUE_AT_MS, never_handed_out=True)
        yield last, 1, "START of 100,000 messages past the end, due in the year 9999"
        held = (OffsetRange(generator.randrange(20), 2_000),)
        for outcome in (Outcome.REDELIVERED, Outcome.DEAD_LETTERED):
            forged = Marker(MarkerType.END, 0, held, outcome=outcome, consumer_id=f"tracker-{number}")
            yield forged, 3, f"forged ENDs, {outcome.name}"
        yield Marker(MarkerType.TICK, consumer_id=f"tracker-{number}"), 20, "forged TICKs"


class MemoryPeak:
    """
    Watches by how much the Python processes of a group grow.

    Args:
        group: Process group of a tracker.
    """

    def __init__(self, group: int) -> None:
        """Remember the group."""
        self._group = group
        self._peaks: list[int] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        """Begin to watch."""
        self._peaks.append(self._resident_mib())
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        """Watch no more."""
        self._stopping.set()
        self._thread.join()

    def grown_mib(self) -> int:
        """Return the growth at the peak."""
        return max(self._peaks) - self._peaks[0]

    def _watch(self) -> None:
        while not self._stopping.wait(0.1):
            self._peaks.append(self._resident_mib())

    def _resident_mib(self) -> int:
        return sum(process.resident_mib for process in processes_of(self._group) if not process.is_jvm)
