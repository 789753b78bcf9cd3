"""
The results of a campaign: `results.json` for machines, `results.md` for readers.

    python -m faults.report FOLDER …

puts the rows of runs of single faults, which wrote into these folders, into the stored results. Each row gets a note.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from faults.checker import Violation

MOST_LISTED = 5
"""Violations of one promise that are listed; the others are counted."""


@dataclass(slots=True)
class FaultResult:
    """
    What one scenario of a fault gave.

    Attributes:
        fault: Its number, `F1` to `F28`; `S1` on of senders, `G1` on of coordination groups and fleets.
        what: One line.
        injections: How often it was injected.
        violations: What the checker found.
        lateness_ms: Lateness of every redelivered message, milliseconds.
        recovery_s: From a kill to the first batch of what took over, each time.
        counts: What the checker saw.
        notes: What was left out, and why.
        protocols: Group protocols of the consumers.
        took_s: Seconds.
        patience: Factor of every bound of time, see `calibration.py`.
    """

    fault: str
    what: str
    injections: int = 0
    violations: list[Violation] = field(default_factory=list)
    lateness_ms: list[int] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    protocols: set[str] = field(default_factory=set)
    took_s: float = 0.0
    patience: float = 1.0


def write_results(results: Sequence[FaultResult], folder: Path, *, seed: int, machine: str) -> None:
    """
    Write both files.

    Args:
        results: Results of this run, so far.
        folder: Where to.
        seed: Seed of this run.
        machine: Where it ran.
    """
    faults = {number: _fault(number, seed, scenarios) for number, scenarios in _by_fault(results).items()}
    folder.mkdir(parents=True, exist_ok=True)
    _write(faults, folder, machine)


def add_rows(stored: Path, apart: Path, day: str) -> None:
    """
    Put the rows of a run of single faults into the results of a whole run, each with a note that says so.

    Args:
        stored: Folder with the results of the whole run.
        apart: Folder with those of the other run.
        day: When that was.
    """
    total = json.loads((stored / "results.json").read_text(encoding="utf-8"))
    faults = {fault["id"]: fault for fault in total["faults"]}
    for fault in json.loads((apart / "results.json").read_text(encoding="utf-8"))["faults"]:
        note = f"run apart from the others, {day}, seed {fault['seed']}"
        faults[fault["id"]] = {**fault, "notes": [*fault["notes"], note]}
    _write(faults, stored, total["machine"])


def _write(faults: Mapping[str, dict[str, Any]], folder: Path, machine: str) -> None:
    ordered = sorted(faults.values(), key=lambda fault: (fault["id"][0], int(fault["id"][1:])))
    total = {
        "injections": sum(fault["injections"] for fault in ordered),
        "violations": sum(fault["violations"] for fault in ordered),
        "machine": machine,
        "faults": ordered,
    }
    (folder / "results.json").write_text(json.dumps(total, indent=1) + "\n", encoding="utf-8")
    (folder / "results.md").write_text(_page(total), encoding="utf-8")


def percentiles(lateness_ms: Iterable[int]) -> dict[str, int]:
    """Return p50, p99 and the largest in milliseconds; empty where there is nothing."""
    values = list(lateness_ms)
    if not values:
        return {}
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": int(p50), "p99": int(p99), "max": max(values)}


def listed_violations(violations: Iterable[Violation], most: int = MOST_LISTED) -> list[str]:
    """Return the first violations of each promise, and how many more there are: many of one do not hide another."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for invariant, what in violations:
        found[invariant].append(f"{invariant}: {what}")
    lines: list[str] = []
    for invariant, each in found.items():
        lines += each[:most]
        lines += [f"{invariant}: and {len(each) - most} more"] if len(each) > most else []
    return lines


def _by_fault(results: Iterable[FaultResult]) -> dict[str, list[FaultResult]]:
    found: defaultdict[str, list[FaultResult]] = defaultdict(list)
    for result in results:
        found[result.fault].append(result)
    return found


def _fault(number: str, seed: int, scenarios: Sequence[FaultResult]) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    for scenario in scenarios:
        counts.update(scenario.counts)
    return {
        "id": number,
        "what": "; ".join(scenario.what for scenario in scenarios),
        "injections": sum(scenario.injections for scenario in scenarios),
        "violations": sum(len(scenario.violations) for scenario in scenarios),
        "lateness_ms": percentiles(late for scenario in scenarios for late in scenario.lateness_ms),
        "recovery_s": [round(seconds, 1) for scenario in scenarios for seconds in scenario.recovery_s],
        "seed": seed,
        "group_protocols": sorted(set[str]().union(*(scenario.protocols for scenario in scenarios))),
        "took_s": round(sum(scenario.took_s for scenario in scenarios)),
        "patience": max(scenario.patience for scenario in scenarios),
        "counts": dict(counts),
        "notes": [note for scenario in scenarios for note in scenario.notes],
        "found": listed_violations(one for scenario in scenarios for one in scenario.violations),
    }


def _page(total: dict[str, Any]) -> str:
    faults: list[dict[str, Any]] = total["faults"]
    counts: Counter[str] = Counter()
    for fault in faults:
        counts.update(fault["counts"])
    lines = [
        "# Fault campaign: results",
        "",
        f"{total['injections']} injections, {total['violations']} violations, on {total['machine']}.",
        "Written by `make faults`; what the faults are and what is checked: [docs/faults.md](../docs/faults.md).",
        "",
        "Lateness: append time of the redelivered message less its deadline, milliseconds, the broker's clock on both",
        "sides; negative would be early. Where the tracker itself is away, its absence is part of it.",
        "Recovery: seconds from the start of a tracker until it is ready, JVM and Spark included, the longest.",
        "Patience: how many times slower the machine was in this row than that on which the bounds of time were set;",
        "they are as many times longer.",
        "",
        "| fault | what | injections | violations | lateness p50 / p99 / max | recovery | patience | seed |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
        *map(_row, faults),
        "",
        f"Seen: {_counts_line(counts)}.",
        "",
    ]
    notes = [f"- {fault['id']}: {note}" for fault in faults for note in fault["notes"]]
    found = [f"- {fault['id']}: {one}" for fault in faults for one in fault["found"]]
    lines += ["## Notes", "", *notes, ""] if notes else []
    lines += ["## Violations", "", *found, ""] if found else []
    return "\n".join(lines)


def _row(fault: dict[str, Any]) -> str:
    late = fault["lateness_ms"]
    shown = f"{late['p50']} / {late['p99']} / {late['max']}" if late else "-"
    recovery = f"{max(fault['recovery_s']):g}" if fault["recovery_s"] else "-"
    patience = f"{fault.get('patience', 1):g}"  # rows of runs before 2026-11-26 have none
    what = fault["id"], fault["what"], fault["injections"], fault["violations"]
    cells = (*what, shown, recovery, patience, fault["seed"])
    return f"| {' | '.join(map(str, cells))} |"


def _counts_line(counts: Counter[str]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in sorted(counts.items()))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        written = datetime.fromtimestamp((Path(name) / "results.json").stat().st_mtime, UTC)
        add_rows(Path(__file__).parent, Path(name), f"{written:%Y-%m-%d}")
