"""Faults of the ledger: killed around Delta's commits, and other jobs at work on its tables."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from faults.oracle import Oracle
from faults.processes import READY_TIMEOUT_S, Child, kmq
from faults.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from faults.campaign import Campaign
    from faults.topics import Dump

COMMIT_TIMEOUT_S = 60.0
VACUUM_HOURS = 168
FOLDER = "KMQ_LEDGER__DIR"

PLACES = {
    "markers": ("marker_partition", "marker_offset", "range_index"),
    "messages": ("queue_partition", "message_offset"),
    "dead_letters": ("dead_letter_partition", "dead_letter_offset"),
}
"""What names a row, by table."""

PATTERNS = {"data written": "*/*/*.parquet", "Delta's commit": "*/_delta_log/*.json"}
"""A data file that no commit names yet; a commit that Spark's commit log does not have yet."""


def _ledger(stage: Stage, *options: str) -> Child:
    """Start `kmq ledger run`."""
    command = kmq("ledger", "run", stage.queue, "--events", "--bootstrap-server", stage.bootstrap_servers)
    command += ["--driver-memory", "512m", *options]
    environment = {"KMQ_LEDGER__INTERVAL": "0.5", FOLDER: str(stage.folder / "ledger")}
    child = Child(command, stage.folder, f"ledger-{time.time_ns()}", environment=environment)
    stage.children.append(child)
    return child


def _running_ledger(stage: Stage) -> Child:
    """Start one, and wait until its queries run."""
    ledger = _ledger(stage)
    if ledger.wait_for("ready", READY_TIMEOUT_S):
        stage.recovery_s.append(ledger.lived_s)
    else:
        stage.fail(f"the ledger did not get ready: {ledger.last_words()}")
    return ledger


def _wait_for_file(stage: Stage, ledger: Child, pattern: str) -> bool:
    """Wait until there is one more file of a pattern; return whether there is."""
    folder = stage.folder / "ledger"
    before = len(list(folder.glob(pattern)))
    give_up_s = time.monotonic() + COMMIT_TIMEOUT_S * stage.patience
    while ledger.is_running and time.monotonic() < give_up_s:
        if len(list(folder.glob(pattern))) > before:
            return True
        time.sleep(0.001)
    return False


def killed(campaign: Campaign) -> Stage:
    """F19: the ledger killed before and after Delta's commits, OPTIMIZE and VACUUM of another job beside it."""
    stage = Stage(campaign, "f19")
    stage.tracked()
    stage.send(rate=campaign.rate(60))
    stage.worker("crew")
    for number in range(campaign.times(3, least=2)):
        what = list(PATTERNS)[number % len(PATTERNS)]
        ledger = _running_ledger(stage)
        # The tables' own first commits are behind it.
        if _wait_for_file(stage, ledger, PATTERNS[what]):
            _compact(stage)
            _wait_for_file(stage, ledger, PATTERNS[what])
            ledger.kill()
            stage.injected("kill -9 of the ledger", after=what)
        else:
            stage.fail(f"F19: no commit of the ledger in time: {ledger.last_words()}")
            ledger.kill()
    stage.drain()
    _must_be_whole(stage)
    return stage


def _compact(stage: Stage) -> None:
    """Run OPTIMIZE and VACUUM. A conflict is the other job's to repeat; the ledger's rows are judged."""
    for table in PLACES:
        try:
            other = DeltaTable(str(stage.folder / "ledger" / table))
            other.optimize.compact()
            other.vacuum(VACUUM_HOURS, dry_run=False)
        except DeltaError as error:
            stage.notes.append(f"OPTIMIZE or VACUUM of {table} was refused: {type(error).__name__}")
        stage.injected("OPTIMIZE and VACUUM", table=table)


def _must_be_whole(stage: Stage) -> None:
    """
    I10: when everything is written, each record of the topics is in its table once, and nothing else is.

    A marker has a row for each of its ranges, so a TICK has none; an unreadable one has one row.
    """
    last = _ledger(stage, "--once")
    if last.wait(READY_TIMEOUT_S) != 0:
        stage.fail(f"I10: the ledger did not write what is there: {last.exit_code}, {last.last_words()}")
        last.kill()
        return
    dump = stage.dump()
    there: dict[str, Iterable[tuple[int, ...]]] = {
        "markers": (
            (partition, one.marker_offset, index)
            for partition, log in dump.markers.items()
            for one in log
            for index in range(1 if one.marker is None else len(one.marker.ranges))
        ),
        "messages": (tuple(record.place) for record in dump.messages),
        "dead_letters": (tuple(record.place) for record in dump.dead_letters),
    }
    for table, columns in PLACES.items():
        written, expected = Counter(_rows(stage.folder / "ledger" / table, columns)), Counter(there[table])
        if lost := expected - written:
            stage.fail(f"I10: table {table} lacks {len(lost)} of {len(expected)} records")
        if doubled := written - expected:
            stage.fail(f"I10: table {table} has {len(doubled)} records too many")

    _must_count_as_the_log(stage, dump)


def _must_count_as_the_log(stage: Stage, dump: Dump) -> None:
    """I10: the ledger's totals are those of the log: a lease ends by the first END behind its START."""
    environment = {**os.environ, FOLDER: str(stage.folder / "ledger")}
    command = kmq("ledger", "show", "totals", "-o", "json")
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    (totals,) = json.loads(shown.stdout)
    expected: Counter[str] = Counter(
        sent=sum(record.previous is None for record in dump.messages),
        dead_letters=len(dump.dead_letters),
        unreadable_markers=sum(one.marker is None for log in dump.markers.values() for one in log),
        missing=0,
    )
    for log in dump.markers.values():
        oracle = Oracle(decides=lambda _message, _tick: False)
        oracle.read(log)
        expected.update({name: oracle.counts[name] for name in ("started", "acked", "expired", "redelivered")})
        # To the ledger a rejected message has ended, to the oracle it waits for its dead letter.
        expected["dead_lettered"] += oracle.counts["dead_lettered"] - oracle.counts["rejected"]
        expected["rejected"] += oracle.counts["rejected"]
    if wrong := {name: (totals[name], count) for name, count in expected.items() if totals[name] != count}:
        stage.fail(f"I10: the ledger's totals differ from the log's (ledger, log): {wrong}")


def _rows(table: Path, columns: tuple[str, ...]) -> Iterable[tuple[int, ...]]:
    found: Any = DeltaTable(str(table)).to_pyarrow_table(columns=list(columns))
    return zip(*(found[column].to_pylist() for column in columns), strict=True)
