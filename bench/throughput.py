"""
Measure consumers beside each other, in one run, interleaved: plain consume, Kafka's share consumer, ours.

A case is a size in bytes and a number of consumer processes. In each round, each contender reads the same number of
messages, in a process of its own; the order changes from round to round. Ours read with a tracker beside them, which
folds what they write; plain and share consumers have none. The processes of a contender start at the same time, and get
their partitions at the same time. Rates are only compared within a run. The first rounds do not count: broker and
tracker are compiled in them.

CPU is that of a whole run: a client from its creation to its close; broker and tracker from before the clients start
until all is read, and until the tracker has folded the last END. On Linux only.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bench.contender import read_from_the_beginning
from bench.processes import HAS_PROC, cpu_by_class
from bench.ratios import Case
from bench.stage import PARTITIONS, Bench, acked_of, markers_of, wait_until
from kmq_spark.core.markers import MarkerType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kmq_spark.kafka.queue_topics import QueueTopics
    from kmq_spark.tracker.queue_tracker import QueueTracker

OURS = frozenset({"ack", "batch", "run"})
CASES = (Case(100, 1), Case(100, 4), Case(1_024, 1))
MAX_MESSAGES = 5_000_000
"""Of a topic. Such a run takes seconds, so that the costs of its start are a small part."""
WARM_UP_FOLDS = 12
"""Of a tracker in rounds that do not count; in others, whose JVM is warm, it folds once, so that its workers exist."""
WARM_UP_MESSAGES = 40_000
FAR_OFFSET = 1_000_000_000
_numbers = itertools.count()


class Reading(NamedTuple):
    """What one contender did: all its processes together."""

    per_s: float
    cpu_us: dict[str, float]
    """CPU a message by class of processes, and their `sum`; nothing where there is no /proc."""


def measure(bench: Bench, *, rounds: int, warm_up: int, cases: Sequence[Case], mib: int) -> list[dict[str, Any]]:
    """Return the figures of each case: medians and extremes of the rates, medians of the CPU."""
    if not HAS_PROC:
        sys.stderr.write("no /proc on this system: CPU is left out\n")
    for number in range(warm_up):
        _say("warming up", _round(bench, cases[0], count_of(mib, cases[0].bytes), number, folds=WARM_UP_FOLDS))
    found = []
    for case in cases:
        readings: dict[str, list[Reading]] = {kind: [] for kind in case.kinds}
        for number in range(rounds):
            this = _round(bench, case, count_of(mib, case.bytes), number)
            _say(f"{case}, round {number + 1}", this)
            for kind, reading in this.items():
                readings[kind].append(reading)
        found.append(
            {
                "bytes": case.bytes, "consumers": case.consumers, "messages": count_of(mib, case.bytes),
                "rounds": rounds,
                "per_s": {kind: _spread([each.per_s for each in rows]) for kind, rows in readings.items()},
                "cpu_us_per_message": {
                    kind: _medians([each.cpu_us for each in rows]) for kind, rows in readings.items() if rows[0].cpu_us
                },
            }
        )  # fmt: skip
    return found


def count_of(mib: int, size: int) -> int:
    """Return how many messages of a size a topic has."""
    return min(MAX_MESSAGES, mib * 2**20 // size)


def let_fold(bench: Bench, tracker: QueueTracker, markers_topic: str, times: int) -> None:
    """
    Let a tracker fold what a busy consumer writes: trackers run for weeks, their JVMs and workers are warm.

    The messages are none that the topic has; each is acknowledged at once, so nothing is looked for.
    """
    for number in range(times):
        acked, first = acked_of(tracker), FAR_OFFSET + WARM_UP_MESSAGES * number
        starts = markers_of(MarkerType.START, WARM_UP_MESSAGES, 60_000, first=first)
        ends = markers_of(MarkerType.END, WARM_UP_MESSAGES, first=first)
        bench.write(markers_topic, itertools.chain.from_iterable(zip(starts, ends, strict=True)))
        wait_until_folded(tracker, acked + WARM_UP_MESSAGES)


def wait_until_folded(tracker: QueueTracker, acked: int) -> None:
    """Wait until a tracker has counted so many acknowledged messages."""
    wait_until(f"the END of {acked} messages in the tracker", lambda: acked_of(tracker) >= acked)


def contend(kind: str, processes: int, **work: Any) -> list[dict[str, Any]]:  # of contender.Work
    """Run the processes of a contender and return what each printed."""
    with tempfile.NamedTemporaryFile() as board:
        np.zeros(processes, np.int64).tofile(board.name)
        children = [_start(kind, work | {"board": board.name, "place": place}) for place in range(processes)]
        outputs = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        message = f"{kind} ended with {[child.returncode for child in children]}; its error is above"
        raise RuntimeError(message)
    return [json.loads(output) for output in outputs]


def _start(kind: str, work: dict[str, Any]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "bench.contender", kind, json.dumps(work)], stdout=subprocess.PIPE)


def _round(bench: Bench, case: Case, count: int, number: int, *, folds: int = 1) -> dict[str, Reading]:
    """Measure each contender once, in another order than in the round before."""
    turned = [case.kinds[(number + place) % len(case.kinds)] for place in range(len(case.kinds))]
    others, ours = ([kind for kind in turned if (kind in OURS) is is_ours] for is_ours in (False, True))
    queue = bench.queue(f"throughput-{next(_numbers)}")
    try:
        # These two leave the messages there: each has a group of its own.
        bench.send(queue.queue_topic, count, case.bytes)
        found = {kind: _reading(bench, kind, queue, case, count=count) for kind in others}
        if ours:
            with bench.tracking(queue) as tracker:
                let_fold(bench, tracker, queue.markers_topic, folds)
                for place, kind in enumerate(ours):
                    if place:
                        bench.send(queue.queue_topic, count, case.bytes)
                    found[kind] = _reading(bench, kind, queue, case, count=count, tracker=tracker)
    finally:
        bench.remove(queue)
    return {kind: found[kind] for kind in case.kinds}


def _reading(
    bench: Bench, kind: str, queue: QueueTopics, case: Case, *, count: int, tracker: QueueTracker | None = None
) -> Reading:
    """Run one contender to the end of the topic."""
    servers, group = bench.broker.bootstrap_servers, f"{queue.queue}-{kind}"
    if kind == "share":
        read_from_the_beginning(servers, group)
    acked = acked_of(tracker) if tracker else 0
    before = cpu_by_class(bench.broker.pid)
    results = contend(
        kind, min(case.consumers, PARTITIONS), bootstrap_servers=servers, topic=queue.queue, group=group,
        messages=count,
    )  # fmt: skip
    done = sum(result["messages"] for result in results)
    if done < count:
        message = f"{kind} got {done} of {count} messages"
        raise RuntimeError(message)
    if tracker:
        wait_until_folded(tracker, acked + count)
    spent = {name: value - before[name] for name, value in cpu_by_class(bench.broker.pid).items()}
    working = [result for result in results if result["messages"]]
    seconds = max(result["last_s"] for result in working) - min(result["first_s"] for result in working)
    client_s = sum(result["cpu_s"] for result in results)
    return Reading(done / seconds, _cpu_us(spent, client_s, done, has_tracker=tracker is not None))


def _cpu_us(spent: dict[str, float], client_s: float, messages: int, *, has_tracker: bool) -> dict[str, float]:
    """Return the CPU a message by class; without a tracker Spark only waits, and does not count."""
    if not spent:
        return {}
    seconds = {"client": client_s, "broker": spent["broker"]}
    if has_tracker:
        seconds |= {"spark": spent["driver"] + spent["jvm"], "workers": spent["workers"]}
    return {name: 1e6 * value / messages for name, value in (seconds | {"sum": sum(seconds.values())}).items()}


def _spread(rates: Sequence[float]) -> dict[str, int]:
    return {"median": round(statistics.median(rates)), "least": round(min(rates)), "most": round(max(rates))}


def _medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(row[name] for row in rows), 2) for name in rows[0]}


def _say(what: str, readings: dict[str, Reading]) -> None:
    per_s = "  ".join(
        f"{kind} {reading.per_s:,.0f}/s" + (f" {reading.cpu_us['sum']:.2f} µs" if reading.cpu_us else "")
        for kind, reading in readings.items()
    )
    sys.stderr.write(f"{time.strftime('%H:%M:%S')}  {what}: {per_s}\n")
