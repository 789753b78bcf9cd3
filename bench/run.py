"""
Run all benchmarks in one go: `make bench`; or look that nothing got slower: `make bench-guard`.

    .venv/bin/python -m bench.run                        all parts
    .venv/bin/python -m bench.run --only producers,poison  some; what is stored of the others stays
    .venv/bin/python -m bench.run --quick                small sizes: does every part run to its end? Nothing is kept
    .venv/bin/python -m bench.run --guard                the ratios alone, compared with the stored ones

Everything runs on this machine, on the embedded broker, one after the other. Written are bench/results.json and the
figures in docs/performance.md and README.md. Rates of one run are compared with each other and never with those of
another machine: the guard measures ratios anew, and fails where one became worse by more than `ratios.TOLERATED`.
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

from bench import in_flight, latency, lateness, mass_expiry, poison, producer, throughput
from bench.ratios import RATIOS, Case, cases_for, ratios, together
from bench.report import with_figures, with_summary
from bench.stage import Bench

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "performance.md"
README = HERE.parent / "README.md"


class Sizes(NamedTuple):
    """How much is measured. The defaults are those of `make bench`."""

    rounds: int = 5
    warm_up: int = 1
    """Rounds that do not count."""
    cases: Sequence[Case] = throughput.CASES
    mib: int = 1_500
    producer_mib: int = 200
    latency_rounds: int = 3
    latency_s: int = 12
    expired: int = 1_000_000
    in_flight: Sequence[int] = (10_000, 100_000, 1_000_000, 10_000_000)
    partitions: Sequence[int] = (4, 16, 64)
    """Markers partitions."""
    lateness_s: tuple[tuple[int, int], ...] = ((1, 120), (100, 120), (10_000, 60))
    """Expiries a second, and for how many seconds."""
    good: int = 4_000


QUICK = Sizes(
    rounds=1, warm_up=0, mib=10, producer_mib=5, latency_rounds=1, latency_s=3, expired=20_000,
    in_flight=(10_000, 100_000), partitions=(4, 16),
    lateness_s=((1, 12), (100, 12), (10_000, 12)), good=400,
)  # fmt: skip
GUARD = Sizes(rounds=3)
"""The sizes of `make bench`: in shorter runs the start of the tracker weighs more, and ratios are worse."""


def _throughput(bench: Bench, sizes: Sizes) -> dict[str, Any]:
    options = {"rounds": sizes.rounds, "warm_up": sizes.warm_up, "mib": sizes.mib}
    return {"throughput": throughput.measure(bench, cases=sizes.cases, **options)}


def _latency(bench: Bench, sizes: Sizes) -> dict[str, Any]:
    return {"latency": latency.measure(bench, rate_per_s=1_000, seconds=sizes.latency_s, rounds=sizes.latency_rounds)}


def _producers(bench: Bench, sizes: Sizes) -> dict[str, Any]:
    options = {"rounds": sizes.rounds, "mib": sizes.producer_mib, "seconds": sizes.latency_s}
    return {"producers": producer.measure(bench.broker, sizes=[100, 1_024], **options)}


def _mass_expiry(bench: Bench, sizes: Sizes) -> dict[str, Any]:
    return {"mass_expiry": mass_expiry.measure_all(bench, sizes.expired)}


def _tracker(bench: Bench, sizes: Sizes) -> dict[str, Any]:
    rows = [
        in_flight.measure(bench, count, scattered=scattered) for count in sizes.in_flight for scattered in (False, True)
    ]
    return {"tracker": rows, "tick_ms_by_partitions": in_flight.tick_ms_by_partitions(bench, sizes.partitions)}


def _lateness(_bench: Bench, sizes: Sizes) -> dict[str, Any]:
    late = {}
    for rate, seconds in sizes.lateness_s:
        # Of its own, since it shows the cold start too.
        with Bench() as own:
            late[str(rate)] = lateness.measure(own, rate, seconds)
    return {"lateness_by_rate": late}


def _poison(bench: Bench, sizes: Sizes) -> dict[str, Any]:
    return {"poison": poison.measure_all(bench, sizes.good)}


PARTS: dict[str, Callable[[Bench, Sizes], dict[str, Any]]] = {
    "throughput": _throughput,
    "latency": _latency,
    "producers": _producers,
    "mass_expiry": _mass_expiry,
    "tracker": _tracker,
    "poison": _poison,
    "lateness": _lateness,
}
"""In the order in which they are measured, on one broker and one Spark, which get warm on the way."""


def measure(parts: Sequence[str], sizes: Sizes) -> dict[str, Any]:
    """Measure some parts, or all, and return what results.json has of them."""
    found: dict[str, Any] = {}
    took_s: dict[str, int] = {}
    with Bench() as bench:
        for name in parts:
            began_s = time.monotonic()
            result = PARTS[name](bench, sizes)
            took_s[name] = round(time.monotonic() - began_s)
            sys.stderr.write(f"{time.strftime('%H:%M:%S')}  {name}, {took_s[name]} s: {json.dumps(result)}\n")
            found |= result
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}"
    for case in found.get("throughput", []):
        case["measured_on"] = machine
    return {"measured_on": dict.fromkeys(parts, machine), "took_s": took_s, **found}


def guard() -> int:
    """Measure the stored ratios anew, with no more contenders than they need, and compare; return the exit code."""
    stored = {name: ratio for name, ratio in _stored()["ratios"].items() if name in RATIOS}
    if missing := RATIOS.keys() - stored.keys():
        sys.stderr.write(f"not stored, so not guarded: {', '.join(sorted(missing))}\n")
    with Bench() as bench:
        now = ratios(_throughput(bench, GUARD._replace(cases=cases_for(stored)))["throughput"])
    fallen = [name for name, ratio in stored.items() if name in now and RATIOS[name].has_fallen(ratio, now[name])]
    for name, ratio in stored.items():
        verdict = "not measured" if name not in now else "WORSE" if name in fallen else "ok"
        sys.stdout.write(f"{verdict:>12}  {name}: stored {ratio}, now {now.get(name, '-')}\n")
    return 1 if fallen else 0


def _stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / "results.json").read_text("utf-8"))
    return found


def _parts(text: str) -> list[str]:
    """Return the parts that an argument names."""
    wanted = text.split(",")
    if unknown := [part for part in wanted if part not in PARTS]:
        raise argparse.ArgumentTypeError(f"unknown part: got {', '.join(unknown)}, allowed are {', '.join(PARTS)}")
    return [part for part in PARTS if part in wanted]


def _write(results: dict[str, Any], elsewhere: Path | None = None) -> None:
    """Write the results, and the figures of the two pages; or all *elsewhere*."""
    ((elsewhere or HERE) / "results.json").write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    for page, with_figures_of in ((PAGE, with_figures), (README, with_summary)):
        written = elsewhere / page.name if elsewhere else page
        written.write_text(with_figures_of(page.read_text("utf-8"), results), "utf-8")


def main() -> int:
    """Measure and write; or guard."""
    parser = argparse.ArgumentParser(prog="python -m bench.run")
    parser.add_argument("--guard", action="store_true", help="compare the ratios with the stored ones, write nothing")
    parser.add_argument("--only", type=_parts, help=f"measure these parts, keep the others; of {','.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="small sizes; write to a new temporary folder")
    parser.add_argument("--render", action="store_true", help="measure nothing: write the figures of results.json anew")
    options = parser.parse_args()
    if options.guard:
        return guard()
    if options.render:
        _write(together(_stored(), {}))
        return 0
    results = together(_stored(), measure(options.only or list(PARTS), QUICK if options.quick else Sizes()))
    elsewhere = Path(tempfile.mkdtemp(prefix="kmq-bench-")) if options.quick else None
    _write(results, elsewhere)
    sys.stderr.write(f"written to {elsewhere or HERE}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
