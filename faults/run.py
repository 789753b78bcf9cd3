"""
Run the campaign: `python -m faults.run [--only F1,F2] [--scale 0.1,K=0.2] [--seed N] [--keep]`.

Exit code 1 where a promise was broken. Results are written after every fault, so a run that is stopped has some. With
`--only` they go to the folder of the logs, which is kept then.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from faults import (
    on_brokers,
    on_clusters,
    on_consumers,
    on_coordination,
    on_fleets,
    on_ledgers,
    on_letters,
    on_markers,
    on_producers,
    on_sinks,
    on_trackers,
)
from faults.campaign import Campaign
from faults.evidence import Violation
from faults.stage import Judged

if TYPE_CHECKING:
    from collections.abc import Iterable

logger = logging.getLogger(__name__)

HERE = Path(__file__).resolve().parent
MOST_LISTED = 5
"""Violations of one promise that are listed; the others are counted."""

Scenario = Callable[[Campaign], Judged | Sequence[Judged] | None]
Row = dict[str, Any]

ROWS: tuple[tuple[str, Scenario], ...] = (
    ("K1", on_clusters.killed),
    ("K2", on_clusters.suspended),
    ("K3", on_clusters.killed_in_a_commit),
    ("K4", on_clusters.restarted),
    ("K5", on_clusters.controller_killed),
    ("K6", on_clusters.elected),
    ("K7", on_clusters.coordinator_suspended),
    ("K8", on_clusters.producer_suspended),
    ("K8", on_clusters.redrive_suspended),
    ("K9", on_clusters.replicas_lost),
    ("K10", on_clusters.slow_follower),
    ("K11", on_clusters.skewed),
    ("K12", on_clusters.cut_off),
    ("K13", on_clusters.near_follower),
    ("K14", on_clusters.full_disk),
    ("K15", on_clusters.fleet_leaders_killed),
    ("K16", on_clusters.sink_leaders_killed),
    ("G6", on_fleets.killed),
    ("G6", on_fleets.upgraded),
    ("F1", on_consumers.killed),
    ("F2", on_trackers.killed),
    ("F3", on_brokers.killed),
    ("F4", on_consumers.paused),
    ("F4", on_trackers.paused),
    ("F5", on_trackers.two_at_once),
    ("F5", on_trackers.duel),
    ("F6", on_trackers.zombie),
    ("F6", on_trackers.stalled),
    ("F7", on_trackers.lost_checkpoints),
    ("F9", on_markers.disordered),
    ("F10", on_consumers.skewed),
    ("F10", on_trackers.skewed),
    ("F11", on_brokers.killed_in_a_transaction),
    ("F12", on_brokers.payloads_removed),
    ("F13", on_brokers.grown),
    ("F14", on_markers.corrupted),
    ("F15", on_brokers.grown_too_large),
    ("F17", on_trackers.full_disk),
    ("F18", on_brokers.cut),
    ("F19", on_ledgers.killed),
    ("F20", on_markers.many_at_once),
    ("F21", on_consumers.holding_many),
    ("F22", on_consumers.poisoned),
    ("F22", on_consumers.murdered),
    ("F23", on_consumers.storm),
    ("F24", on_trackers.cold_start),
    ("F25", on_brokers.clock_stepped),
    ("F27", on_brokers.offsets_expired),
    ("F28", on_markers.hostile),
    ("F29", on_brokers.answers_lost),
    ("F30", on_brokers.made_anew),
    ("F31", on_brokers.settings_changed),
    ("F32", on_consumers.asleep),
    ("R1", on_letters.redriven),
    ("S1", on_producers.killed),
    ("S1", on_producers.answers_lost),
    ("S3", on_producers.two_at_once),
    ("S4", on_sinks.killed),
    ("G1", on_coordination.killed),
    ("G2", on_coordination.paused),
    ("G5", on_coordination.consumers_killed),
    ("G8", on_coordination.partition_moved),
)
"""
A fault has one row in the results, and may have several scenarios; the first line of each says what it does.
"""


class Result:
    """What the scenarios of a fault gave so far."""

    def __init__(self, fault: str, seed: int) -> None:
        self.fault, self._seed = fault, seed
        self.what: list[str] = []
        self.injections, self.brokers, self.took_s, self.patience = 0, 1, 0.0, 1.0
        self.violations: list[Violation] = []
        self._lateness_ms: list[int] = []
        self._recovery_s: list[float] = []
        self.counts: Counter[str] = Counter()
        self.notes: list[str] = []
        self._protocols: set[str] = set()

    def run(self, scenario: Scenario, campaign: Campaign) -> None:
        """Inject a fault and check what came of it."""
        began_s = time.monotonic()
        self.what.append((scenario.__doc__ or "").partition(": ")[2].rstrip("."))
        _say(f"{self.fault:>4}  {self.what[-1]}")
        try:
            found = scenario(campaign)
            if found is None:
                self.notes.append(f"{self.what[-1]}: not injected, the machine does not allow it")
            for stage in [found] if isinstance(found, Judged) else found or []:
                self._add(stage)
        except Exception as error:
            # The other faults are worth their time all the same; a scenario that broke off has proved nothing.
            logger.exception("%s broke off", self.fault)
            self.violations.append(Violation("harness", f"broke off: {error!r}"))
        finally:
            campaign.end_stages()
        self.took_s += time.monotonic() - began_s
        self.patience = max(self.patience, campaign.pace.since(began_s))

    def _add(self, stage: Judged) -> None:
        verdict = stage.verdict()
        self.injections += stage.injections
        self.brokers = max(self.brokers, stage.broker_count)
        self.violations += verdict.violations
        self._lateness_ms += [wait.came_ms - wait.due_ms for wait in verdict.waits]
        self.counts.update(verdict.counts)
        self._recovery_s += stage.recovery_s
        self.notes += stage.notes
        self._protocols |= stage.protocols

    def row(self) -> Row:
        """Return its row in `results.json`."""
        return {
            "id": self.fault,
            "what": "; ".join(self.what),
            "brokers": self.brokers,
            "injections": self.injections,
            "violations": len(self.violations),
            "lateness_ms": percentiles(self._lateness_ms),
            "recovery_s": round(max(self._recovery_s, default=0.0), 1),
            "seed": self._seed,
            "group_protocols": sorted(self._protocols),
            "took_s": round(self.took_s),
            "patience": self.patience,
            "counts": dict(self.counts),
            "notes": self.notes,
            "found": listed(self.violations),
        }


def percentiles(lateness_ms: Sequence[int]) -> dict[str, int]:
    """Return p50, p99 and the largest in milliseconds; empty where there is nothing."""
    if not lateness_ms:
        return {}
    p50, p99 = np.percentile(lateness_ms, [50, 99])
    return {"p50": int(p50), "p99": int(p99), "max": max(lateness_ms)}


def listed(violations: Iterable[Violation], most: int = MOST_LISTED) -> list[str]:
    """Return the first violations of each promise, and how many more there are: many of one do not hide another."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for invariant, what in violations:
        found[invariant].append(f"{invariant}: {what}")
    return [
        line
        for invariant, each in found.items()
        for line in [*each[:most], *([f"{invariant}: and {len(each) - most} more"] if len(each) > most else [])]
    ]


def write_results(rows: Sequence[Row], folder: Path, scale: str) -> None:
    """Write the results of a run at a scale: `results.json` for machines, `results.md` for readers."""
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    total = {name: sum(row[name] for row in rows) for name in ("injections", "violations", "took_s")}
    text = json.dumps({**total, "scale": scale, "machine": machine, "faults": rows}, indent=1)
    (folder / "results.json").write_text(text + "\n", encoding="utf-8")
    notes = [f"- {row['id']}: {note}" for row in rows for note in row["notes"]]
    found = [f"- {row['id']}: {one}" for row in rows for one in row["found"]]
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(row["counts"])
    seen = [f"{name.replace('_', ' ')} {count:,}" for name, count in sorted(counts.items())]
    lines = [
        "# Fault campaign: results",
        "",
        f"{total['injections']} injections, {total['violations']} violations, {total['took_s'] // 60} min, {machine}.",
        f"Written by `python -m faults.run --scale {scale}`. [docs/internals/faults.md](../docs/internals/faults.md)",
        "says what is broken and checked, and what the columns mean.",
        "",
        "| fault | what | injections | violations | lateness p50 / p99 / max | recovery | patience | seed |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
        *map(_line, rows),
        "",
        f"Seen: {', '.join(seen)}.",
        *(["", "## Notes", "", *notes] if notes else []),
        *(["", "## Violations", "", *found] if found else []),
    ]
    (folder / "results.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _line(row: Row) -> str:
    late = row["lateness_ms"]
    shown = f"{late['p50']} / {late['p99']} / {late['max']}" if late else "-"
    recovery = f"{row['recovery_s']:g}" if row["recovery_s"] else "-"
    names = "id", "what", "injections", "violations"
    cells = (*(row[name] for name in names), shown, recovery, f"{row['patience']:g}", row["seed"])
    return f"| {' | '.join(map(str, cells))} |"


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m faults.run", description="Break things, and check the promises.")
    parser.add_argument("--only", default="", help="faults such as F1,F2; all by default")
    share = "share of the full number of injections, and of the faults of a letter: 0.1,K=0.2; 0: one each"
    parser.add_argument("--scale", type=_scales, default="1", help=share)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="repeats a run's choices")  # noqa: S311  # a seed, no secret
    parser.add_argument("--patience", type=float, help="factor of bounds of time; by default measured all the time")
    parser.add_argument("--keep", action="store_true", help="keep logs and event files")
    return parser.parse_args(arguments)


def _scales(text: str) -> dict[str, float]:
    """Return the scale by the letter of a fault; of all others under no letter."""
    return {letter: float(scale) for letter, _, scale in (each.rpartition("=") for each in text.split(","))}


def main(arguments: Sequence[str]) -> int:
    """Run what was asked for; return the exit code."""
    options = _arguments(arguments)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    # As Ctrl-C: what the running scenario has started ends too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="kmq-faults-"))
    _say(f"seed {options.seed}, logs in {folder}")
    wanted = set(filter(None, options.only.split(","))) or {fault for fault, _ in ROWS}
    if unknown := wanted - {fault for fault, _ in ROWS}:
        _say(f"unknown faults: {', '.join(sorted(unknown))}")
        return 2
    results: dict[str, Result] = {}
    campaign = Campaign(folder, seed=options.seed, patience=options.patience)
    shown = ",".join(f"{letter}{'=' * bool(letter)}{scale:g}" for letter, scale in options.scale.items())
    try:
        for fault, scenario in ROWS:
            if fault in wanted:
                campaign.scale = options.scale.get(fault[0], options.scale.get("", 1.0))
                result = results.setdefault(fault, Result(fault, options.seed))
                result.run(scenario, campaign)
                _print(result)
                rows = [each.row() for each in results.values()]
                write_results(rows, folder if options.only else HERE, shown)
    finally:
        campaign.close()
    violations = sum(len(result.violations) for result in results.values())
    if not violations and not options.only and not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if violations else 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _print(result: Result) -> None:
    row = result.row()
    _say(
        f"{row['id']:>4}  {row['injections']:4} injections  {row['violations']:3} violations  {row['took_s']:5} s  "
        f"patience {row['patience']:.2f}  lateness {row['lateness_ms']}  {row['counts']}",
    )
    for line in [*row["found"], *(f"note: {note}" for note in row["notes"])]:
        _say(f"      {line}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
