"""The results of a campaign: `results.json` for machines, `results.md` for readers."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from faults.checker import Violation


@dataclass(slots=True)
class FaultResult:
    """
    What one scenario of a fault gave.

    Attributes:
        fault: Its number, `F1` to `F24`.
        what: One line.
        injections: How often it was injected.
        violations: What the checker found.
        lateness_ms: Of every redelivered message.
        recovery_s: From a kill to the first batch of what took over, each time.
        counts: What the checker saw.
        notes: What was left out, and why.
        took_s: Seconds.
    """

    fault: str
    what: str
    injections: int = 0
    violations: list[Violation] = field(default_factory=list)
    lateness_ms: list[int] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    took_s: float = 0.0


def write_results(results: Sequence[FaultResult], folder: Path, *, seed: int, took_s: float, machine: str) -> None:
    """Write both files."""
    faults = [_fault(number, scenarios) for number, scenarios in _by_fault(results).items()]
    total = {
        "injections": sum(fault["injections"] for fault in faults),
        "violations": sum(fault["violations"] for fault in faults),
        "seed": seed,
        "took_s": round(took_s),
        "machine": machine,
        "counts": dict(sum((result.counts for result in results), Counter())),
        "faults": faults,
    }
    (folder / "results.json").write_text(json.dumps(total, indent=1) + "\n", encoding="utf-8")
    (folder / "results.md").write_text(_page(total, results), encoding="utf-8")


def percentiles(lateness_ms: Iterable[int]) -> dict[str, int]:
    """Return p50, p99 and the largest in milliseconds; empty where there is nothing."""
    values = list(lateness_ms)
    if not values:
        return {}
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": int(p50), "p99": int(p99), "max": max(values)}


def _by_fault(results: Iterable[FaultResult]) -> dict[str, list[FaultResult]]:
    found: defaultdict[str, list[FaultResult]] = defaultdict(list)
    for result in results:
        found[result.fault].append(result)
    return dict(sorted(found.items(), key=lambda pair: int(pair[0][1:])))


def _fault(number: str, scenarios: Sequence[FaultResult]) -> dict[str, Any]:
    return {
        "id": number,
        "what": "; ".join(scenario.what for scenario in scenarios),
        "injections": sum(scenario.injections for scenario in scenarios),
        "violations": sum(len(scenario.violations) for scenario in scenarios),
        "lateness_ms": percentiles(late for scenario in scenarios for late in scenario.lateness_ms),
        "recovery_s": [round(seconds, 1) for scenario in scenarios for seconds in scenario.recovery_s],
        "notes": [note for scenario in scenarios for note in scenario.notes],
    }


def _page(total: dict[str, Any], results: Sequence[FaultResult]) -> str:
    lines = [
        "# Fault campaign: results",
        "",
        f"{total['injections']} injections, {total['violations']} violations.",
        f"Seed {total['seed']}, {total['took_s']} s, on {total['machine']}.",
        "Written by `make faults`; what the faults are and what is checked: docs/faults.md.",
        "",
        "Lateness: append time of the redelivered message less its deadline, milliseconds, the broker's clock on both",
        "sides; negative would be early. Recovery: seconds from the fault to the first batch after it, the longest.",
        "",
        "| fault | what | injections | violations | lateness p50 / p99 / max | recovery |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for fault in total["faults"]:
        late = fault["lateness_ms"]
        shown = f"{late['p50']} / {late['p99']} / {late['max']}" if late else "-"
        recovery = f"{max(fault['recovery_s']):g}" if fault["recovery_s"] else "-"
        cells = (fault["id"], fault["what"], fault["injections"], fault["violations"], shown, recovery)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    counts = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in sorted(total["counts"].items()))
    lines += ["", f"Seen: {counts}.", ""]
    notes = [f"- {result.fault}: {note}" for result in results for note in result.notes]
    violations = [f"- {result.fault} {one.invariant}: {one.what}" for result in results for one in result.violations]
    lines += ["## Left out", "", *notes, ""] if notes else []
    lines += ["## Violations", "", *violations, ""] if violations else []
    return "\n".join(lines)
