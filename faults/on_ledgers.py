"""Faults of the ledger: killed around Delta's commits, and other jobs at work on its tables."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException

from faults.processes import READY_TIMEOUT_S, Child
from faults.topics import read_dump
from kmq_spark.ledger.reader import read_rows
from kmq_spark.ledger.schema import DEAD_LETTERS, MARKERS, MESSAGES, Location

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from faults.campaign import Campaign
    from faults.stage import Stage

POLL_S = 0.001
COMMIT_TIMEOUT_S = 60.0
ALL_ROWS = 10**9

PLACES = {
    MARKERS: ("marker_partition", "marker_offset", "range_index"),
    MESSAGES: ("queue_partition", "message_offset"),
    DEAD_LETTERS: ("dead_letter_partition", "dead_letter_offset"),
}


class LedgerChild(Child):
    """
    `kmq ledger run` of one queue.

    Args:
        stage: Queue.
        folder: Folder of the tables.
        options: More of the command.
    """

    def __init__(self, stage: Stage, folder: Path, *options: str) -> None:
        """Start it."""
        command = [
            *(sys.executable, "-m", "kmq_spark.cli.main", "ledger", "run", stage.queue, "--events"),
            *("--bootstrap-server", stage.bootstrap_servers, "--driver-memory", "512m"),
            *options,
        ]
        self._patience = stage.patience
        log = stage.folder / f"ledger-{time.time_ns()}.log"
        super().__init__(command, log, {"KMQ_LEDGER__DIR": str(folder), "KMQ_LEDGER__INTERVAL": "0.5"})

    def wait_for(self, pattern: str, folder: Path) -> bool:
        """Wait until there is one more file of a pattern; return whether there is."""
        before, give_up_s = len(list(folder.glob(pattern))), time.monotonic() + COMMIT_TIMEOUT_S * self._patience
        while time.monotonic() < give_up_s and self.is_running:
            if len(list(folder.glob(pattern))) > before:
                return True
            time.sleep(POLL_S)
        return False

    def wait_ready(self) -> float:
        """Wait until its queries run; return the seconds since it was started, -1 where it ended before."""
        give_up_s = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < give_up_s and self.is_running:
            if any('"ready"' in line for line in self.lines):
                return time.monotonic() - self.began_s
            time.sleep(0.1)
        return -1


def killed(campaign: Campaign) -> Stage:
    """F17: the ledger killed before Delta's commit, and between that and Spark's own; no row lost or doubled."""
    stage = campaign.stage("f17-ledger")
    folder = stage.folder / "ledger"
    # A data file that no commit names yet; a commit that Spark's commit log does not have yet.
    patterns = {"data written": "*/*/*.parquet", "Delta's commit": "*/_delta_log/*.json"}
    with stage.tracking():
        stage.send(rate=campaign.rate(60))
        stage.worker("crew")
        for number in range(campaign.scaled(6, least=2)):
            what = list(patterns)[number % len(patterns)]
            ledger = _started(stage, folder)
            # The tables' own first commits are behind it.
            if ledger.wait_for(patterns[what], folder):
                ledger.kill()
                stage.injected("kill -9 of the ledger", after=what)
            else:
                stage.fail(f"F17: no commit of the ledger in time: {ledger.last_words()}")
                ledger.kill()
        stage.drain()
    _must_be_whole(stage, folder)
    return stage


def compacted(campaign: Campaign) -> Stage:
    """F19: OPTIMIZE and VACUUM of another job beside the ledger; redelivery goes on, no row is lost or doubled."""
    stage = campaign.stage("f19")
    folder = stage.folder / "ledger"
    location = Location(str(folder))
    refused: Counter[str] = Counter()
    with stage.tracking():
        stage.send(rate=campaign.rate(60))
        stage.worker("crew")
        ledger = _started(stage, folder)
        ledger.wait_for("*/_delta_log/*.json", folder)
        for number in range(campaign.scaled(3, least=1)):
            for table in PLACES:
                for statement in ("OPTIMIZE {}", "VACUUM {} RETAIN 168 HOURS"):
                    try:
                        campaign.spark().sql(statement.format(location.sql_name(table))).collect()
                    except PySparkException as error:
                        # The other job's own conflict, which is its to repeat; the ledger's rows are what is judged.
                        refused[type(error).__name__] += 1
                    stage.injected(statement.partition(" ")[0], table=table, round=number)
            time.sleep(1)
        if not ledger.is_running:
            stage.fail(f"F19: the ledger ended: {ledger.last_words()}")
        ledger.stop()
        stage.drain()
    if refused:
        stage.notes.append(f"the other job was refused: {dict(refused)}")
    _must_be_whole(stage, folder)
    return stage


def _started(stage: Stage, folder: Path) -> LedgerChild:
    ledger = LedgerChild(stage, folder)
    stage.adopt(ledger)
    took_s = ledger.wait_ready()
    if took_s < 0:
        stage.fail(f"the ledger did not get ready: {ledger.last_words()}")
    else:
        stage.recovery_s.append(took_s)
    return ledger


def _must_be_whole(stage: Stage, folder: Path) -> None:
    """
    I10: when everything is written, each record of the topics is in its table once, and nothing else is.

    A marker has a row for each of its ranges, so a TICK has none; an unreadable one has one row.
    """
    last = LedgerChild(stage, folder, "--once")
    stage.adopt(last)
    if last.wait(READY_TIMEOUT_S) != 0:
        stage.fail(f"I10: the ledger did not write what is there: {last.exit_code}, {last.last_words()}")
        last.kill()
        return
    dump = read_dump(stage.queue, stage.bootstrap_servers)
    there: dict[str, Iterator[tuple[int, ...]]] = {
        MARKERS: (
            (partition, one.marker_offset, index)
            for partition, log in dump.markers.items()
            for one in log
            for index in range(1 if one.marker is None else len(one.marker.ranges))
        ),
        MESSAGES: (tuple(record.place) for record in dump.messages),
        DEAD_LETTERS: (tuple(record.place) for record in dump.dead_letters),
    }
    for table, columns in PLACES.items():
        rows: list[dict[str, Any]] = read_rows(Location(str(folder)), table, limit=ALL_ROWS)
        written: Counter[tuple[int, ...]] = Counter(tuple(row[column] for column in columns) for row in rows)
        expected = Counter(there[table])
        lost, doubled = expected - written, written - expected
        if lost or doubled:
            stage.fail(
                f"I10: table {table} lacks {len(lost)} records of {len(expected)}, and has {len(doubled)} too many"
            )
