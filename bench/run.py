"""
Run all benchmarks in one go: `make bench`; or look that nothing got slower: `make bench-guard`.

    .venv/bin/python -m bench.run                        all parts
    .venv/bin/python -m bench.run --only producers,busy  some; what is stored of the others stays
    .venv/bin/python -m bench.run --quick                small sizes: does every part run to its end? Nothing is kept
    .venv/bin/python -m bench.run --guard                the ratios alone, compared with the stored ones

Each says first what it measures and about how long that takes. Everything runs on this machine, on the embedded broker,
one after the other. results.json, results.md and results.png are written beside this file, and the figures in
docs/performance.md. Rates of one run are compared with each other and never with those of another machine: the guard
measures ratios anew, and fails where one became worse by more than `ratios.TOLERATED`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bench import busy, in_flight, latency, lateness, mass_expiry, poison, producer, throughput
from bench.picture import write_picture
from bench.ratios import RATIOS, Case, cases_for, ratios, together
from bench.report import results_page, with_figures, with_summary
from bench.stage import Bench

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "performance.md"
README = HERE.parent / "README.md"


class Sizes(NamedTuple):
    """
    How much is measured. The defaults are those of `make bench`.

    Attributes:
        rounds: Rounds of each case of the throughput and of the producers; the median counts.
        warm_up: Rounds before them that do not count.
        cases: Of the throughput.
        mib: Payload of a topic of the throughput.
        producer_mib: Payload of a topic of the producers.
        latency_rounds: Rounds of the latency.
        latency_s: Seconds of one latency, the first third is left out; also of the producers'.
        expired: Messages of the mass expiry; a quarter of them first, because that way is cold.
        in_flight: Numbers of messages in flight.
        partitions: Numbers of markers partitions with a TICK in each.
        busy_s: Seconds beside a consumer at full speed.
        busy_messages: In its queue.
        lateness_s: Seconds by expiries a second; the first half does not count.
        good: Good messages beside poison.
    """

    rounds: int = 5
    warm_up: int = 1
    cases: Sequence[Case] = throughput.CASES
    mib: int = 1_500
    producer_mib: int = 200
    latency_rounds: int = 3
    latency_s: int = 12
    expired: int = 1_000_000
    in_flight: Sequence[int] = (10_000, 100_000, 1_000_000, 10_000_000)
    partitions: Sequence[int] = (4, 16, 64)
    busy_s: int = 60
    busy_messages: int = 24_000_000
    lateness_s: tuple[tuple[int, int], ...] = ((1, 120), (100, 120), (10_000, 60))
    good: int = 4_000


QUICK = Sizes(
    rounds=1, warm_up=0, mib=10, producer_mib=5, latency_rounds=1, latency_s=3, expired=20_000,
    in_flight=(10_000, 100_000), partitions=(4, 16), busy_s=5, busy_messages=500_000,
    lateness_s=((1, 12), (100, 12), (10_000, 12)), good=400,
)  # fmt: skip
GUARD = Sizes(rounds=3)
"""The sizes of `make bench`: in shorter runs the start of the tracker weighs more, and ratios are worse."""


class Part(NamedTuple):
    """
    One part of the benchmarks.

    Attributes:
        what: Says what is measured.
        about_s: Says about how long that takes on two cores, seconds.
        measure: Does it, with a broker and Spark that other parts use too and that get warm on the way.
        alone: Does it with a broker and Spark of its own; each part has one of the two.
    """

    what: Callable[[Sizes], str]
    about_s: Callable[[Sizes], float]
    measure: Callable[[Bench, Sizes], dict[str, Any]] | None = None
    alone: Callable[[Sizes], dict[str, Any]] | None = None


def _throughput(bench: Bench, sizes: Sizes) -> dict[str, Any]:
    return {
        "throughput": throughput.measure(
            bench, rounds=sizes.rounds, warm_up=sizes.warm_up, cases=sizes.cases, mib=sizes.mib
        )
    }


def _throughput_s(sizes: Sizes) -> float:
    def round_s(case: Case) -> float:
        million = throughput.count_of(sizes.mib, case.bytes) / 1e6
        # Start and end of each process, of a tracker and of topics.
        fixed = 12 + (1.5 + case.consumers / 2) * len(case.kinds)
        return fixed + million * (2 + case.bytes / 300) * len(case.kinds)

    return 20 + sizes.warm_up * round_s(sizes.cases[0]) + sizes.rounds * sum(map(round_s, sizes.cases))


def _busy(bench: Bench, sizes: Sizes) -> dict[str, Any]:
    found = busy.measure(bench, sizes.busy_s, sizes.busy_messages)
    return {"tracker_busy_cores": found["cores"], "tracker_busy": found} if found else {}


def _latency(bench: Bench, sizes: Sizes) -> dict[str, Any]:
    return {"latency": latency.measure(bench, rate_per_s=1_000, seconds=sizes.latency_s, rounds=sizes.latency_rounds)}


def _producers(bench: Bench, sizes: Sizes) -> dict[str, Any]:
    return {
        "producers": producer.measure(
            bench.broker, rounds=sizes.rounds, sizes=[100, 1_024], mib=sizes.producer_mib, seconds=sizes.latency_s
        )
    }


def _mass_expiry(bench: Bench, sizes: Sizes) -> dict[str, Any]:
    mass = mass_expiry.measure_all(bench, sizes.expired)
    return {"mass_expiry_per_s": mass["per_s"], "mass_expiry": mass}


def _tracker(bench: Bench, sizes: Sizes) -> dict[str, Any]:
    return {
        "tracker": [
            in_flight.measure(bench, count, scattered=scattered)
            for count in sizes.in_flight
            for scattered in (False, True)
        ],
        "tick_ms_by_partitions": in_flight.tick_ms_by_partitions(bench, sizes.partitions),
    }


def _lateness(sizes: Sizes) -> dict[str, Any]:
    late = {str(rate): lateness.main(rate, seconds=seconds) for rate, seconds in sizes.lateness_s}
    return {
        "lateness_ms": late["100"]["lateness_ms"] | {"early": late["100"]["early"]},
        "lateness_by_rate": late,
    }


def _poison(sizes: Sizes) -> dict[str, Any]:
    return {"poison": poison.main(sizes.good)}


PARTS = {
    "throughput": Part(
        lambda sizes: f"{'; '.join(map(_case_text, sizes.cases))}; {sizes.rounds} rounds after {sizes.warm_up}",
        _throughput_s,
        measure=_throughput,
    ),
    "busy": Part(
        lambda sizes: f"the tracker's cores beside a consumer at full speed, {sizes.busy_s} s",
        lambda sizes: 25 + sizes.busy_s + sizes.busy_messages / 700_000,
        measure=_busy,
    ),
    "latency": Part(
        lambda sizes: f"1,000 messages a second, {sizes.latency_rounds} rounds",
        lambda sizes: 4 * sizes.latency_rounds * (sizes.latency_s + 10),
        measure=_latency,
    ),
    "producers": Part(
        lambda sizes: f"five producers, 100 and 1,024 B, {sizes.rounds} rounds after 1",
        lambda sizes: 10 * (sizes.rounds + 1) * (1 + sizes.producer_mib / 80) + 5 * (sizes.latency_s + 3),
        measure=_producers,
    ),
    "mass_expiry": Part(
        lambda sizes: f"{sizes.expired:,} leases that run out at once, {mass_expiry.FLOODS} times, and beside a queue",
        lambda sizes: 150 + sizes.expired * 1e-4,
        measure=_mass_expiry,
    ),
    "tracker": Part(
        lambda sizes: f"up to {max(sizes.in_flight):,} messages in flight, up to {max(sizes.partitions)} partitions",
        lambda sizes: 40 * len(sizes.in_flight) + 20 * len(sizes.partitions) + 6 * sum(sizes.in_flight) / 1e6,
        measure=_tracker,
    ),
    "lateness": Part(
        lambda sizes: f"{', '.join(f'{rate:,}' for rate, _ in sizes.lateness_s)} expiries a second",
        lambda sizes: sum(seconds + 25 for _, seconds in sizes.lateness_s),
        alone=_lateness,
    ),
    "poison": Part(
        lambda sizes: f"{sizes.good:,} good messages, alone and with a fifth of poison",
        lambda sizes: 20 + sizes.good / 50,
        alone=_poison,
    ),
}


def measure(parts: Sequence[str], sizes: Sizes) -> dict[str, Any]:
    """
    Measure some parts, or all, and return what results.json has of them.

    Args:
        parts: Names in `PARTS`, measured in this order.
        sizes: How much is measured.
    """
    found: dict[str, Any] = {}
    took_s: dict[str, int] = {}
    bench: Bench | None = None
    try:
        for name in parts:
            began_s = time.monotonic()
            part = PARTS[name]
            if part.alone is not None:
                if bench is not None:
                    bench.close()
                    bench = None
                result = part.alone(sizes)
            elif part.measure is not None:
                bench = bench or Bench()
                result = part.measure(bench, sizes)
            took_s[name] = round(time.monotonic() - began_s)
            sys.stderr.write(f"{time.strftime('%H:%M:%S')}  {name}, {took_s[name]} s: {json.dumps(result)}\n")
            found |= result
    finally:
        if bench is not None:
            bench.close()
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}"
    for case in found.get("throughput", []):
        case["measured_on"] = machine
    return {"measured_on": dict.fromkeys(parts, machine), "took_s": took_s, **found}


def guard() -> int:
    """Measure the stored ratios anew, with no more contenders than they need, and compare; return the exit code."""
    stored = {name: ratio for name, ratio in _stored()["ratios"].items() if name in RATIOS}
    sizes = GUARD._replace(cases=cases_for(stored))
    for name, ratio in stored.items():
        sys.stderr.write(f"guarded: {name}, stored {ratio}, {RATIOS[name].better} is better\n")
    if missing := RATIOS.keys() - stored.keys():
        sys.stderr.write(f"not stored, so not guarded: {', '.join(sorted(missing))}\n")
    _announce(["throughput"], sizes)
    bench = Bench()
    try:
        now = ratios(_throughput(bench, sizes)["throughput"])
    finally:
        bench.close()
    fallen = [name for name, ratio in stored.items() if name in now and RATIOS[name].has_fallen(ratio, now[name])]
    for name, ratio in stored.items():
        verdict = "not measured" if name not in now else "WORSE" if name in fallen else "ok"
        sys.stdout.write(f"{verdict:>12}  {name}: stored {ratio}, now {now.get(name, '-')}\n")
    return 1 if fallen else 0


def _stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / "results.json").read_text("utf-8"))
    return found


def _announce(parts: Sequence[str], sizes: Sizes) -> None:
    """Print what will be measured, and about how long it takes."""
    total_s = 0.0
    for name in parts:
        about_s = PARTS[name].about_s(sizes)
        total_s += about_s
        sys.stderr.write(f"{name}, about {about_s / 60:.1f} min: {PARTS[name].what(sizes)}\n")
    ends = time.strftime("%H:%M", time.localtime(time.time() + total_s))
    sys.stderr.write(f"together about {total_s / 60:.0f} min on two quiet cores, until {ends}\n")


def _case_text(case: Case) -> str:
    return f"{case} ({', '.join(case.kinds)})"


def _parts(text: str) -> list[str]:
    """Return the parts that an argument names."""
    wanted = text.split(",")
    if unknown := [part for part in wanted if part not in PARTS]:
        raise argparse.ArgumentTypeError(f"unknown part: got {', '.join(unknown)}, allowed are {', '.join(PARTS)}")
    return [part for part in PARTS if part in wanted]


def _write(results: dict[str, Any], elsewhere: Path | None = None) -> None:
    """Write the results, as JSON, as tables and as a picture, and the figures of the two pages; or all *elsewhere*."""
    folder = elsewhere or HERE
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    (folder / "results.md").write_text(results_page(results), "utf-8")
    write_picture(results, folder / "results.png")
    for page, with_figures_of in ((PAGE, with_figures), (README, with_summary)):
        written = elsewhere / page.name if elsewhere else page
        written.write_text(with_figures_of(page.read_text("utf-8"), results), "utf-8")


def main() -> int:
    """Measure, write, and print the tables; or guard."""
    parser = argparse.ArgumentParser(prog="python -m bench.run")
    parser.add_argument("--guard", action="store_true", help="compare the ratios with the stored ones, write nothing")
    parser.add_argument("--only", type=_parts, help=f"measure these parts, keep the others; of {','.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="small sizes; write to a new temporary folder")
    parser.add_argument("--render", action="store_true", help="measure nothing: write the tables of results.json anew")
    parser.add_argument("--rounds", type=int, help="of the throughput and of the producers, 5 by default")
    parser.add_argument("--cases", type=throughput.cases_of, help="of the throughput, 100x1,100x4,1024x1 by default")
    options = parser.parse_args()
    if options.guard:
        return guard()
    if options.render:
        _write(together(_stored(), {}))
        return 0
    parts = options.only or list(PARTS)
    chosen = {name: value for name in ("rounds", "cases") if (value := getattr(options, name)) is not None}
    sizes = (QUICK if options.quick else Sizes())._replace(**chosen)
    _announce(parts, sizes)
    results = together(_stored(), measure(parts, sizes))
    elsewhere = Path(tempfile.mkdtemp(prefix="kmq-bench-")) if options.quick else None
    _write(results, elsewhere)
    sys.stdout.write(results_page(results))
    sys.stderr.write(f"written to {elsewhere or HERE}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
