"""
Run all benchmarks in one go: `make bench`; or look that nothing got slower: `python -m bench.run --guard`.

`python -m bench.run --only producers` measures one part and keeps what is stored of the others.

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
from typing import TYPE_CHECKING, Any, NamedTuple

from bench import in_flight, latency, lateness, mass_expiry, poison, producer, throughput
from bench.report import write_picture, write_table
from bench.stage import Bench

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = Path(__file__).resolve().parent
WARM_UP_ROUNDS = 2
"""All of the first case, a minute each: a broker and a tracker are compiled for minutes, and run for weeks."""

LATENESS_S = {1: 120, 100: 120, 10_000: 60}
"""How long lateness is measured, by expiries a second; the first half does not count."""

TOLERATED = 0.8
"""Share of a stored ratio that a new one must reach: machines are shared and noisy."""


class Sizes(NamedTuple):
    """
    How much is measured.

    Attributes:
        rounds: Rounds of each case; the median counts.
        bytes: Sizes of a message.
        consumers: Numbers of consumer processes.
        in_flight: Numbers of messages in flight.
    """

    rounds: int
    bytes: list[int]
    consumers: list[int]
    in_flight: list[int]


def measure(parts: Sequence[str], sizes: Sizes) -> dict[str, Any]:
    """
    Measure some parts, or all, and return what results.json has of them.

    Args:
        parts: Names in `ON_ONE_BROKER` and `ON_THEIR_OWN`, measured in this order.
        sizes: How much is measured.
    """
    found: dict[str, Any] = {}
    if any(part in ON_ONE_BROKER for part in parts):
        bench = Bench()
        try:
            for part in parts:
                if part in ON_ONE_BROKER:
                    found |= _said(part, ON_ONE_BROKER[part](bench, sizes))
        finally:
            bench.close()
    for part in parts:
        if part in ON_THEIR_OWN:
            found |= _said(part, ON_THEIR_OWN[part]())
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}"
    return {"measured_on": dict.fromkeys(parts, machine), **found}


def _throughput(bench: Bench, sizes: Sizes) -> dict[str, Any]:
    rates = throughput.measure(
        bench, rounds=sizes.rounds, warm_up=WARM_UP_ROUNDS, sizes=sizes.bytes, consumers=sizes.consumers, mib=600
    )
    return {"ratios": rates["ratios"], "throughput": rates["cases"]}


def _latency(bench: Bench, sizes: Sizes) -> dict[str, Any]:
    return {"latency": latency.measure(bench, rate_per_s=1_000, seconds=12, rounds=sizes.rounds)}


def _producers(bench: Bench, sizes: Sizes) -> dict[str, Any]:
    return {"producers": producer.measure(bench.broker, rounds=sizes.rounds, sizes=[100, 1_024], mib=200)}


def _mass_expiry(bench: Bench, _: Sizes) -> dict[str, Any]:
    mass_expiry.measure(bench, 250_000)  # a warm-up: this way through tracker and broker is cold
    mass = mass_expiry.measure(bench, 1_000_000)
    return {"mass_expiry_per_s": mass["per_s"], "mass_expiry": mass}


def _tracker(bench: Bench, sizes: Sizes) -> dict[str, Any]:
    return {
        "tracker": [
            in_flight.measure(bench, count, scattered=scattered)
            for count in sizes.in_flight
            for scattered in (False, True)
        ],
        "tick_ms_by_partitions": in_flight.tick_ms_by_partitions(bench, (4, 16, 64)),
    }


def _lateness() -> dict[str, Any]:
    late = {str(rate): lateness.main(rate, seconds=seconds) for rate, seconds in LATENESS_S.items()}
    return {
        "lateness_ms": late["100"]["lateness_ms"] | {"early": late["100"]["early"]},
        "lateness_by_rate": late,
    }


def _poison() -> dict[str, Any]:
    return {"poison": poison.main()}


ON_ONE_BROKER = {
    "throughput": _throughput,
    "latency": _latency,
    "producers": _producers,
    "mass_expiry": _mass_expiry,
    "tracker": _tracker,
}
"""Parts that share a broker and a Spark session, which get warm on the way."""

ON_THEIR_OWN = {"lateness": _lateness, "poison": _poison}


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


def _said(part: str, result: dict[str, Any]) -> dict[str, Any]:
    """Print the result of a part, and return it."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')}  {part}: {json.dumps(result)}\n")
    return result


def _parts(text: str) -> list[str]:
    """Return the parts that an argument names."""
    known, wanted = [*ON_ONE_BROKER, *ON_THEIR_OWN], text.split(",")
    if unknown := [part for part in wanted if part not in known]:
        raise argparse.ArgumentTypeError(f"unknown part: got {', '.join(unknown)}, allowed are {', '.join(known)}")
    return [part for part in known if part in wanted]


def main() -> int:
    """Measure, write, and print the table; or guard."""
    parser = argparse.ArgumentParser(prog="python -m bench.run")
    parser.add_argument("--guard", action="store_true", help="compare the ratios with the stored ones, write nothing")
    parser.add_argument("--only", type=_parts, help="measure these parts, such as producers,latency; keep the others")
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
    results = measure(
        options.only or [*ON_ONE_BROKER, *ON_THEIR_OWN], Sizes(options.rounds, sizes, consumers, in_flights)
    )
    stored = HERE / "results.json"
    if options.only:
        before = json.loads(stored.read_text())
        results = before | results | {"measured_on": before["measured_on"] | results["measured_on"]}
    stored.write_text(json.dumps(results, indent=1) + "\n")
    sys.stdout.write(write_table(results, HERE / "results.md"))
    write_picture(results, HERE / "results.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
