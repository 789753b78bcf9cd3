"""
Judge again, from evidence that a campaign has kept: `python -m faults.judge FOLDER [FOLDER…]`.

Each FOLDER is what `python -m faults.run --evidence` was given, or the folder of one stage. Prints a line for each
stage; the exit code is 1 where a promise was broken.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faults.checker import Verdict, check
from faults.clocks import Epoch, MovableClock
from faults.conservation import Told
from faults.events import read_events
from faults.evidence import FACTS, RECORDS, REMEMBERED, read_records
from faults.leases import Session
from faults.topics import Dump, dump_of, without
from faults.waits import Bounds, Stretch
from kmq_spark.core.state import Status

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


def judge(folder: Path) -> Verdict:
    """Return the verdict of a stage."""
    facts = json.loads((folder / FACTS).read_text())
    dump = read_evidence(folder, facts)
    hostile = facts["hostile_markers"]
    found = check(
        dump,
        read_events(folder),
        [Session(name, _by_partition(decides_from)) for name, decides_from in facts["sessions"]],
        max_deliveries=facts["max_deliveries"],
        is_drained=facts["is_drained"],
        told={} if hostile else _told(facts),
        bounds=_bounds(facts, dump),
    )
    for failure in facts["failures"]:
        invariant, _, what = failure.partition(": ") if failure.startswith("I") else ("harness", "", failure)
        found.add(invariant, what)
    return found


def read_evidence(folder: Path, facts: Mapping[str, Any]) -> Dump:
    """Return what the topics held."""
    dump = _read(folder / RECORDS, facts["topics"])
    removed = {record.place: record for record in _read(folder / REMEMBERED, facts["topics"]).messages}
    present = {record.place: record for record in dump.messages}
    dump.messages = list((removed | present).values())
    dump.removed = removed.keys() - present.keys()
    dump.injected = {(partition, offset) for partition, offset in facts["injected_markers"]}
    without(dump, {(partition, offset) for partition, offset in facts["hostile_markers"]})
    return dump


def _read(file: Path, topics: Sequence[str]) -> Dump:
    by_topic = {topic: [record for record in read_records(file) if record.topic == topic] for topic in topics}
    return dump_of(*by_topic.values())


def _by_partition(values: Mapping[str, Any]) -> dict[int, Any]:
    return {int(partition): value for partition, value in values.items()}


def _told(facts: Mapping[str, Any]) -> dict[int, Told]:
    told = _by_partition(facts["told"])
    return {each: Told(begins_at, Status.from_dict(status)) for each, (begins_at, status) in told.items()}


def _bounds(facts: Mapping[str, Any], dump: Dump) -> Bounds:
    values = {**facts["bounds"], "true_markers": {}, "true_messages": {}}
    bounds = Bounds(**{**values, "away": [Stretch(*stretch) for stretch in values["away"]]})
    epochs = facts["clock_epochs"]
    return bounds if epochs is None else MovableClock.moved([Epoch(*each) for each in epochs]).corrected(bounds, dump)


def stages(folders: Sequence[Path]) -> Iterator[Path]:
    """Return the folders of stages in some folders."""
    for folder in folders:
        yield from [folder] if (folder / FACTS).exists() else sorted(file.parent for file in folder.glob(f"*/{FACTS}"))


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
