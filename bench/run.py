"""
Run all benchmarks in one go: `make bench`; or look that nothing got slower: `python -m bench.run --guard`.

Everything runs on this machine, on the embedded broker, one after the other; results.json, results.md and results.png
are written beside this file. Rates of one run are compared with each other and never with those of another machine:
the guard measures ratios anew, and fails where one fell below four fifths of the stored one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from bench import in_flight, latency, lateness, mass_expiry, poison, producer, throughput
from bench.report import write_picture, write_table
from bench.stage import Bench

HERE = Path(__file__).resolve().parent
WARM_UP_ROUNDS = 2
"""All of the first case, a minute each: a broker and a tracker are compiled for minutes, and run for weeks."""

LATENESS_S = {1: 120, 100: 120, 10_000: 60}
"""How long lateness is measured, by expiries a second; the first half does not count."""

TOLERATED = 0.8
"""Share of a stored ratio that a new one must reach: machines are shared and noisy."""


def measure(*, rounds: int, sizes: list[int], consumers: list[int], in_flights: list[int]) -> dict[str, Any]:
    """Measure everything and return it in the form of results.json."""
    bench = Bench()
    try:
        rates = throughput.measure(
            bench, rounds=rounds, warm_up=WARM_UP_ROUNDS, sizes=sizes, consumers=consumers, mib=600
        )
        _say("throughput", rates["ratios"])
        hand_over = latency.measure(bench, rate_per_s=1_000, seconds=12, rounds=rounds)
        _say("latency", hand_over)
        senders = producer.measure(bench.broker, rounds=rounds, sizes=[100, 1_024], mib=200)
        _say("producers", senders)
        mass_expiry.measure(bench, 250_000)  # a warm-up: this way through tracker and broker is cold
        mass = mass_expiry.measure(bench, 1_000_000)
        _say("mass expiry", mass)
        tracker = [
            in_flight.measure(bench, count, scattered=scattered) for count in in_flights for scattered in (False, True)
        ]
        _say("in flight", tracker)
        by_partitions = in_flight.tick_ms_by_partitions(bench, (4, 16, 64))
        _say("TICK by partitions", by_partitions)
    finally:
        bench.close()
    late = {str(rate): lateness.main(rate, seconds=seconds) for rate, seconds in LATENESS_S.items()}
    _say("lateness", late)
    return {
        "measured_on": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}",
        "ratios": rates["ratios"],
        "throughput": rates["cases"],
        "latency": hand_over,
        "producers": senders,
        "lateness_ms": late["100"]["lateness_ms"] | {"early": late["100"]["early"]},
        "lateness_by_rate": late,
        "mass_expiry_per_s": mass["per_s"],
        "mass_expiry": mass,
        "tracker": tracker,
        "tick_ms_by_partitions": by_partitions,
        "poison": poison.main(),
    }


def guard() -> int:
    """Measure the ratios anew, shortly, and compare; return the exit code."""
    stored = json.loads((HERE / "results.json").read_text())["ratios"]
    bench = Bench()
    try:
        now = throughput.measure(bench, rounds=3, warm_up=1, sizes=[100], consumers=[1], mib=200)["ratios"]
    finally:
        bench.close()
    fallen = [name for name, ratio in stored.items() if now[name] < TOLERATED * ratio]
    for name, ratio in stored.items():
        sys.stdout.write(f"{'SLOWER' if name in fallen else 'ok':>6}  {name}: stored {ratio}, now {now[name]}\n")
    return 1 if fallen else 0


def _say(what: str, result: object) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')}  {what}: {json.dumps(result)}\n")


def main() -> int:
    """Measure, write, and print the table; or guard."""
    parser = argparse.ArgumentParser(prog="python -m bench.run")
    parser.add_argument("--guard", action="store_true", help="compare the ratios with the stored ones, write nothing")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", default="100,1024,10240", help="bytes of a message")
    parser.add_argument("--consumers", default="1,4")
    parser.add_argument("--in-flight", default="10000,100000,1000000,10000000")
    options = parser.parse_args()
    if options.guard:
        return guard()
    sizes, consumers, in_flights = (
        [int(part) for part in text.split(",")] for text in (options.sizes, options.consumers, options.in_flight)
    )
    results = measure(rounds=options.rounds, sizes=sizes, consumers=consumers, in_flights=in_flights)
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    sys.stdout.write(write_table(results, HERE / "results.md"))
    write_picture(results, HERE / "results.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
