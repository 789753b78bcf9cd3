"""
Run the campaign: `python -m faults.run [--only F1,F2] [--scale 1.0] [--seed N] [--evidence DIR]`.

Exit code 1 where a promise was broken. Results are written after every fault, so a run that is stopped has some.
The stored results are those of a whole run: with `--only` the results go to the folder of the logs, which is kept then,
unless `--results` names another. `python -m faults.report FOLDER` adds such rows to the stored ones, with a note.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from faults import (
    on_brokers,
    on_consumers,
    on_coordination,
    on_fleets,
    on_ledgers,
    on_markers,
    on_networks,
    on_producers,
    on_sinks,
    on_topics,
    on_trackers,
    on_versions,
)
from faults.calibration import slowness
from faults.campaign import Campaign
from faults.checker import Violation
from faults.judged_stage import JudgedStage
from faults.report import FaultResult, listed_violations, percentiles, write_results

logger = logging.getLogger(__name__)

HERE = Path(__file__).resolve().parent

Scenario = Callable[[Campaign], JudgedStage | Sequence[JudgedStage] | None]

SCENARIOS: tuple[tuple[str, Scenario], ...] = (
    ("F1", on_consumers.killed),
    ("F2", on_trackers.killed),
    ("F3", on_brokers.killed),
    ("F4", on_consumers.paused),
    ("F4", on_trackers.paused),
    ("F4", on_brokers.paused),
    ("F5", on_trackers.two_at_once),
    ("F6", on_trackers.zombie),
    ("F7", on_trackers.lost_checkpoints),
    ("F9", on_markers.disordered),
    ("F10", on_consumers.skewed),
    ("F10", on_trackers.skewed),
    ("F11", on_brokers.killed_in_a_transaction),
    ("F12", on_brokers.payloads_removed),
    ("F12", on_topics.retention_passed),
    ("F13", on_brokers.grown),
    ("F14", on_markers.corrupted),
    ("F15", on_topics.grown_too_large),
    ("F16", on_versions.mixed),
    ("F17", on_ledgers.killed),
    ("F18", on_networks.cut),
    ("F19", on_ledgers.compacted),
    ("F20", on_markers.flooded),
    ("F20", on_markers.many_at_once),
    ("F21", on_consumers.holding_many),
    ("F22", on_consumers.poisoned),
    ("F23", on_consumers.storm),
    ("F24", on_trackers.cold_start),
    ("F25", on_brokers.clock_stepped),
    ("F26", on_consumers.interrupted),
    ("F27", on_brokers.offsets_expired),
    ("F28", on_markers.hostile),
    ("S1", on_producers.restarted),
    ("S2", on_producers.killed_at_points),
    ("S3", on_producers.two_at_once),
    ("G1", on_coordination.killed),
    ("G2", on_coordination.paused),
    ("G3", on_coordination.broker_restarted),
    ("G4", on_coordination.leader_killed),
    ("G5", on_coordination.consumers_killed),
    ("G6", on_fleets.killed),
    ("G6", on_fleets.upgraded),
    ("G7", on_fleets.restarted),
    ("G8", on_coordination.partition_moved),
    ("S6", on_sinks.killed_at_points),
    # Last: half an hour for the two of them.
    ("S4", on_sinks.killed),
    ("S5", on_sinks.sparks_own_killed),
)


def run_scenario(fault: str, scenario: Scenario, campaign: Campaign) -> FaultResult:
    """Inject one fault and check what came of it."""
    began_s = time.monotonic()
    result = FaultResult(fault, (scenario.__doc__ or "").partition(": ")[2].rstrip("."), patience=campaign.patience)
    _say(f"{fault:>4}  {result.what}")
    try:
        stages = scenario(campaign)
        if stages is None:
            result.notes.append(f"{result.what}: not injected, there is no C compiler here")
        for stage in [stages] if isinstance(stages, JudgedStage) else stages or []:
            _add(result, stage)
    except Exception as error:
        # The other faults are worth their time all the same; a scenario that broke off has proved nothing.
        logger.exception("%s broke off", fault)
        result.violations.append(Violation("harness", f"broke off: {error!r}"))
    finally:
        campaign.end_stages()
    result.took_s = time.monotonic() - began_s
    return result


def _add(result: FaultResult, stage: JudgedStage) -> None:
    verdict = stage.verdict(is_drained=stage.is_drained)
    result.injections += stage.injections
    result.violations += verdict.violations
    result.lateness_ms += verdict.lateness_ms
    result.counts.update(verdict.counts)
    result.recovery_s += stage.recovery_s
    result.notes += stage.notes
    result.protocols |= stage.group_protocols


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m faults.run", description="Break things, and check the promises.")
    parser.add_argument("--only", default="", help="faults such as F1,F2; all by default")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full number of injections")
    parser.add_argument("--scale-of", action="append", default=[], metavar="F2=0.34", help="the same for one fault")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="repeats a run's choices")  # noqa: S311  # a seed, no secret
    parser.add_argument("--results", type=Path, help="where results.json and results.md go")
    parser.add_argument("--evidence", type=Path, help="where each verdict's evidence goes; see `faults.judge`")
    parser.add_argument("--keep", action="store_true", help="keep logs and event files")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run what was asked for; return the exit code."""
    options = _arguments(arguments)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    # As Ctrl-C: what the running scenario has started ends too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="kmq-faults-"))
    _say(f"seed {options.seed}, logs in {folder}")
    wanted = set(filter(None, options.only.split(",")))
    scales = {fault: float(scale) for fault, _, scale in (text.partition("=") for text in options.scale_of)}
    results: list[FaultResult] = []
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    campaign = Campaign(folder, seed=options.seed, scale=options.scale, evidence=options.evidence)
    try:
        for fault, scenario in SCENARIOS:
            if wanted and fault not in wanted:
                continue
            campaign.scale, campaign.patience = scales.get(fault, options.scale), slowness()
            results.append(run_scenario(fault, scenario, campaign))
            _print_result(results[-1])
            target = options.results or (folder if wanted else HERE)
            write_results(results, target, seed=options.seed, machine=machine)
    finally:
        campaign.close()
    violations = sum(len(result.violations) for result in results)
    if not violations and not wanted and not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if violations else 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _print_result(result: FaultResult) -> None:
    late = percentiles(result.lateness_ms)
    _say(
        f"{result.fault:>4}  {result.injections:4} injections  {len(result.violations):3} violations  "
        f"{result.took_s:5.0f} s  patience {result.patience:.2f}  lateness {late}  {dict(result.counts)}",
    )
    for line in listed_violations(result.violations):
        _say(f"      {line}")
    for note in result.notes:
        _say(f"      note: {note}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
