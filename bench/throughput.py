"""
Measure consumers beside each other, in one run, interleaved: plain consume, Kafka's share consumer, ours.

    .venv/bin/python -m bench.throughput [--rounds 3] [--warm-up 2] [--sizes 100,1024,10240] [--consumers 1,4]
        [--mib 600]

Every round gives each contender a topic of its own with the same messages, and a process of its own; our contenders
have a tracker running beside them, which reads and folds what they write. Rates are only compared within a run. The
first rounds do not count: broker and tracker are compiled in them, and either rate doubles meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from bench.share_groups import read_from_the_beginning
from bench.stage import PARTITIONS, Bench, markers_of, wait_until
from kmq_spark.core.markers import MarkerType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kmq_spark.tracker.queue_tracker import QueueTracker

KINDS = ("plain", "share", "ack", "batch", "run")
OURS = frozenset({"ack", "batch", "run"})
MAX_MESSAGES = 2_000_000
"""Of a topic: a run takes seconds then, and what starts with it, the tracker's query for one, is a small part of it."""
WARM_UP_ROUNDS = 12
WARM_UP_MESSAGES = 40_000
FAR_OFFSET = 1_000_000_000
_numbers = itertools.count()


def measure(
    bench: Bench, *, rounds: int, warm_up: int, sizes: Sequence[int], consumers: Sequence[int], mib: int
) -> dict[str, Any]:
    """Return the rates of all contenders, by size and number of consumers, and the ratios of their medians."""
    cases = []
    for _ in range(warm_up):
        count = _count(mib, sizes[0])
        _say("warming up", {kind: _rate(bench, kind, count, sizes[0], consumers[0]) for kind in KINDS})
    for size in sizes:
        count = _count(mib, size)
        for consumer_count in consumers:
            rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for _ in range(rounds):
                for kind in KINDS:
                    rates[kind].append(_rate(bench, kind, count, size, consumer_count))
            cases.append({"bytes": size, "consumers": consumer_count, "messages": count, "per_s": _spread(rates)})
            medians = {kind: statistics.median(found) for kind, found in rates.items()}
            _say(f"{size} B, {consumer_count} consumer(s)", medians)
    return {"cases": cases, "ratios": ratios(cases[0])}


def ratios(case: dict[str, Any]) -> dict[str, float]:
    """Return the ratios that the project promises, of one case's medians."""
    median = {kind: spread["median"] for kind, spread in case["per_s"].items()}
    return {
        "ack_vs_share_consumer": round(median["ack"] / median["share"], 2),
        "ack_vs_plain": round(median["ack"] / median["plain"], 2),
        "batch_vs_share_consumer": round(median["batch"] / median["share"], 2),
        "batch_vs_plain": round(median["batch"] / median["plain"], 2),
        "run_vs_plain": round(median["run"] / median["plain"], 2),
    }


def group_of(topic: str) -> str:
    """Return the consumer group of a contender."""
    return f"{topic}-group"


def _count(mib: int, size: int) -> int:
    return min(MAX_MESSAGES, mib * 2**20 // size)


def _spread(rates: dict[str, list[float]]) -> dict[str, dict[str, int]]:
    return {
        kind: {"median": round(statistics.median(found)), "least": round(min(found)), "most": round(max(found))}
        for kind, found in rates.items()
    }


def _rate(bench: Bench, kind: str, count: int, size: int, consumer_count: int) -> float:
    """Return messages by second of one contender, all its processes together."""
    queue = bench.queue(f"throughput-{kind}-{next(_numbers)}")
    if kind == "share":
        read_from_the_beginning(bench.broker.bootstrap_servers, group_of(queue.queue))
    bench.send(queue.queue_topic, count, size)
    try:
        if kind not in OURS:
            return _run(bench, kind, queue.queue, count, consumer_count)
        with bench.tracking(queue) as tracker:
            _warm_up(bench, tracker, queue.markers_topic)
            return _run(bench, kind, queue.queue, count, consumer_count)
    finally:
        bench.remove(queue)


def _warm_up(bench: Bench, tracker: QueueTracker, markers_topic: str) -> None:
    """
    Let the tracker fold for some seconds what a busy consumer writes: trackers run for weeks, their JVMs are warm.

    The messages are none that the topic has; each is acknowledged, so nothing is looked for.
    """
    ended = 0
    for number in range(WARM_UP_ROUNDS):
        for kind in (MarkerType.START, MarkerType.END):
            lease_ms = 60_000 if kind is MarkerType.START else 0
            bench.write(markers_topic, markers_of(kind, WARM_UP_MESSAGES, lease_ms, first=FAR_OFFSET * (number + 1)))
        ended += WARM_UP_MESSAGES
        wait_until(
            "the ENDs of the warm-up",
            lambda most=ended: sum(each.counters["acked"] for each in tracker.stats.statuses.values()) >= most,
        )


def _run(bench: Bench, kind: str, topic: str, count: int, consumer_count: int) -> float:
    work = {
        "bootstrap_servers": bench.broker.bootstrap_servers, "topic": topic, "group": group_of(topic),
        "messages": count if consumer_count == 1 else 0,
    }  # fmt: skip
    command = [sys.executable, "-m", "bench.contender", kind, json.dumps(work)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(min(consumer_count, PARTITIONS))]
    results = [json.loads(child.communicate()[0]) for child in children]
    done = sum(result["messages"] for result in results)
    if done < count:
        message = f"{kind} got {done} of {count} messages"
        raise RuntimeError(message)
    working = [result for result in results if result["messages"]]
    seconds = max(result["last_s"] for result in working) - min(result["first_s"] for result in working)
    return float(done / seconds)


def _say(what: str, rates: dict[str, float]) -> None:
    per_s = "  ".join(f"{kind} {rate:,.0f}" for kind, rate in rates.items())
    sys.stderr.write(f"{time.strftime('%H:%M:%S')}  {what}: {per_s}\n")


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m bench.throughput")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=2, help="rounds of the first case that do not count")
    parser.add_argument("--sizes", default="100,1024,10240")
    parser.add_argument("--consumers", default="1,4")
    parser.add_argument("--mib", type=int, default=600, help="payload of one topic, at most two million messages")
    options = parser.parse_args()
    bench = Bench()
    try:
        sizes, consumers = ([int(part) for part in text.split(",")] for text in (options.sizes, options.consumers))
        result = measure(
            bench,
            rounds=options.rounds,
            warm_up=options.warm_up,
            sizes=sizes,
            consumers=consumers,
            mib=options.mib,
        )
    finally:
        bench.close()
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
