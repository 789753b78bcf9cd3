"""
Judge, in a run or again from evidence that a campaign has kept: `python -m faults.judge FOLDER [FOLDER…]`.

Each FOLDER is what `python -m faults.run --evidence` was given, or the folder of one stage. Prints a line for each
stage; the exit code is 1 where a promise was broken.
"""

from __future__ import annotations

import json
import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faults.allowances import Process, Run
from faults.checker import Verdict, check
from faults.clocks import Epoch, MovableClock
from faults.conservation import ReportedStatus, Status
from faults.events import read_events
from faults.evidence import FACTS, RECORDS, REMEMBERED, read_records
from faults.leases import Session
from faults.protocol import QueueRules
from faults.secrets import leaking
from faults.topics import Dump, dump_of, without
from faults.waits import Bounds, Interval

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


def judge(folder: Path) -> Verdict:
    """Return the verdict of a stage from its evidence."""
    facts = json.loads((folder / FACTS).read_text())
    queue = facts["queue"]
    dump = dump_of(read_records(folder / RECORDS), queue)
    remembered = dump_of(read_records(folder / REMEMBERED), queue)
    return verdict_of(folder, facts, dump, remembered)


def verdict_of(folder: Path, facts: Mapping[str, Any], dump: Dump, remembered: Dump) -> Verdict:
    """
    Return the verdict of a stage.

    Args:
        folder: Event files and logs.
        facts: Everything else, as `facts.json` has it.
        dump: The topics.
        remembered: The same, read before records were removed; empty where none were.
    """
    present = {record.place: record for record in dump.messages}
    removed = {record.place: record for record in remembered.messages if record.place not in present}
    dump.messages = [*removed.values(), *present.values()]
    dump.removed = set(removed)
    dump.injected = {(partition, offset) for partition, offset in facts["injected_markers"]}
    hostile = {(partition, offset) for partition, offset in facts["hostile_markers"]}
    without(dump, hostile)
    found = check(
        dump,
        read_events(folder),
        [Session(name, _by_partition(decides_from)) for name, decides_from in facts["sessions"]],
        rules=QueueRules(max_deliveries=facts["max_deliveries"]),
        is_drained=facts["is_drained"],
        # A tracker counts hostile STARTs too, until their leases end; the evidence does not have them.
        reported={} if hostile else _reported(facts),
        bounds=_bounds(facts, dump),
        run=_run(folder, facts),
    )
    for file in leaking(folder):
        found.add("I14", f"{file} holds a secret of the settings")
    for failure in facts["failures"]:
        invariant, _, what = failure.partition(": ") if failure.startswith("I") else ("harness", "", failure)
        found.add(invariant, what)
    return found


def _by_partition(values: Mapping[str, Any]) -> dict[int, Any]:
    return {int(partition): value for partition, value in values.items()}


def _reported(facts: Mapping[str, Any]) -> dict[int, ReportedStatus]:
    reported = _by_partition(facts["reported"])
    return {each: ReportedStatus(begins_at, Status.of(status)) for each, (begins_at, status) in reported.items()}


def _run(folder: Path, facts: Mapping[str, Any]) -> Run:
    processes = [_process(folder, values) for values in facts["processes"]]
    return Run(processes, facts["injections"], facts.get("checkpoint_mib", 0))


def _process(folder: Path, values: Mapping[str, Any]) -> Process:
    log = folder / values["log"]
    return Process(
        values["kind"],
        log.stem,
        values["exit_code"],
        values["is_ended_by_us"],
        values["ended_at_ms"],
        values.get("is_hung", False),
        log.read_text(errors="replace") if log.exists() else "",
        *values.get("peak", ()),
    )


def _bounds(facts: Mapping[str, Any], dump: Dump) -> Bounds:
    values = {**facts["bounds"], "true_markers": {}, "true_messages": {}}
    intervals = {name: [Interval(*each) for each in values.get(name, ())] for name in ("away", "held_up")}
    bounds = Bounds(**{**values, **intervals})
    epochs = facts["clock_epochs"]
    return bounds if epochs is None else MovableClock.moved([Epoch(*each) for each in epochs]).corrected(bounds, dump)


def stages(folders: Sequence[Path]) -> Iterator[Path]:
    """Return the folders of stages in some folders."""
    return chain.from_iterable(
        [folder] if (folder / FACTS).exists() else sorted(file.parent for file in folder.glob(f"*/{FACTS}"))
        for folder in folders
    )


def main(arguments: Sequence[str]) -> int:
    """Judge; return the exit code."""
    folders = list(stages([Path(argument) for argument in arguments]))
    if not folders:
        sys.stderr.write(f"kmq: no evidence in {' '.join(arguments) or 'no folder'}; give what --evidence was given\n")
        return 2
    broken = 0
    for folder in folders:
        verdict = judge(folder)
        broken += len(verdict.violations)
        sys.stdout.write(f"{folder.name}  {len(verdict.violations)} violations  {dict(verdict.counts)}\n")
        for one in verdict.violations:
            sys.stdout.write(f"      {one.invariant}: {one.what}\n")
        sys.stdout.flush()
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
