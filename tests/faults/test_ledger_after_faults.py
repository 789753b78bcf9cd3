"""After a fault run three counts of every lease agree: the topics' own, the tracker's, and the ledger's (I10)."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from faults.conservation import IN_FLIGHT, NAMES, read_account
from faults.leases import read_leases
from faults.load import finished_messages, write_record
from faults.on_trackers import BUSY
from faults.topics import Dump, read_dump
from kmq_spark.config import load_settings
from kmq_spark.failpoints import EXIT_CODE
from kmq_spark.ledger.reader import read_rows
from kmq_spark.ledger.schema import Location
from kmq_spark.ledger.service import LedgerService
from tests.limits import COMES_S, ENDS_S

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from faults.campaign import Campaign
    from faults.stage import Stage

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(900)]

SENT, SPOILT, HELD, EXPIRED, OTHERS = 1_500, 3, 20, 30, 50
COUNTED = ("started", "taken_over", IN_FLIGHT, *NAMES.values())


def kmq(stage: Stage, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    command = [sys.executable, "-m", "kmq_spark.cli.main", *arguments, "--bootstrap-server", stage.bootstrap_servers]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ENDS_S)
    assert done.returncode in {0, 3}, done.stderr  # 3: the tracker is late, since it is off
    return done


def break_things(stage: Stage) -> None:
    """`kill -9` of consumers and of trackers, at random and around a commit, while messages flow."""
    stage.send(rate=0, count=EXPIRED, ttl_s=0.01).join()
    write_record(stage, b"\xff no marker", 0, times=SPOILT)
    stage.send(rate=30, count=SENT)
    stage.worker("healthy", mode="run", work_ms=5, raised=0.1, rejected=0.1)
    for number, point in enumerate(("tracker.committed:2", "")):
        busy = stage.worker(f"busy-{number}")
        tracker = stage.tracker(failpoint=point, once_file=str(stage.folder / f"once-{number}"))
        if point:
            assert tracker.wait(ENDS_S) == EXIT_CODE, tracker.last_words()
        else:
            assert tracker.wait_ready(COMES_S) > 0, tracker.last_words()
            time.sleep(3)
            tracker.kill()
        busy.kill()
        stage.injected("kill -9 of tracker and consumer", point=point)


def leave_some_in_flight(stage: Stage) -> None:
    """A consumer takes messages under a long lease and is killed; wait until the tracker has read that."""
    stage.send(rate=0, count=HELD).join()
    holder = stage.worker("holder", forgotten=1.0, lease_ms=600_000)
    assert holder.wait_working(HELD, COMES_S)
    holder.kill()
    stage.injected("kill -9 of a consumer that holds")
    give_up_s = time.monotonic() + COMES_S
    while any(row["next"] != row["end"] for row in status_rows(stage)) and time.monotonic() < give_up_s:
        time.sleep(0.5)


def counted(dump: Dump, stage: Stage) -> Counter[str]:
    """Return what the topics say."""
    sessions = stage.sessions()
    found = Counter(
        sent=sum(record.previous is None for record in dump.messages),
        dead_letters=len(dump.dead_letters),
        unreadable_markers=sum(logged.marker is None for log in dump.markers.values() for logged in log),
    )
    for partition, log in dump.markers.items():
        found += read_account(log, read_leases(partition, log, sessions)).totals()
    return found


def write_ledger(spark: SparkSession, folder: Path, *stages: Stage) -> None:
    """Write what is there, as `kmq ledger run --once` does."""
    flags = {
        "kafka": {"bootstrap_servers": stages[0].bootstrap_servers},
        "ledger": {"dir": str(folder)},
    }
    LedgerService(spark, [stage.queue for stage in stages], load_settings(None, flags), once=True).run()


def differences(folder: Path, stage: Stage, expected: Counter[str]) -> dict[str, tuple[int, int]]:
    """Return where the ledger's totals are not the topics' own: of each, the ledger's count and theirs."""
    (total,) = read_rows(Location(str(folder)), "totals", queue=stage.queue, limit=2)
    names = (*COUNTED, "sent", "dead_letters", "unreadable_markers")
    found = {name: (total[name], expected[name]) for name in names if total[name] != expected[name]}
    return found | ({"missing": (total["missing"], 0)} if total["missing"] else {})


def lose_an_ack(spark: SparkSession, folder: Path, stage: Stage) -> None:
    """Take one END out of the ledger."""
    name = Location(str(folder)).sql_name("markers")
    ended = f"queue = '{stage.queue}' AND kind = 'END' AND outcome = 'ACKED'"
    (row,) = spark.sql(f"SELECT * FROM {name} WHERE {ended} LIMIT 1").collect()  # noqa: S608  # our own
    place = " AND ".join(f"{column} = {row[column]}" for column in ("marker_partition", "marker_offset"))
    spark.sql(f"DELETE FROM {name} WHERE {ended} AND {place}")  # noqa: S608  # our own


def status_rows(stage: Stage) -> list[dict[str, Any]]:
    """Return what `kmq tracker status` says, a row a markers partition."""
    rows: list[dict[str, Any]] = json.loads(kmq(stage, "tracker", "status", stage.queue, "-o", "json").stdout)
    return rows


def test_ledger_counts_what_the_topics_and_the_tracker_count_after_faults(
    campaign: Campaign, spark: SparkSession, tmp_path: Path
) -> None:
    """Consumers and the tracker killed with `kill -9`: acked, rejected, expired, redelivered, dead and open agree."""
    stage, other = campaign.stage("ledger", **BUSY, poison=0.04), campaign.stage("ledger-other")
    finished_messages(other, OTHERS)
    break_things(stage)
    with stage.tracking():
        stage.drain()
        leave_some_in_flight(stage)
    # Some are left on purpose; everything else of the verdict holds.
    verdict = stage.verdict(is_drained=False)
    assert verdict.violations == []
    dump = read_dump(stage.queue, stage.bootstrap_servers)
    expected = counted(dump, stage)
    # Else it proves nothing: a kind of which there is none agrees by itself.
    assert all(expected[name] for name in COUNTED if name != "taken_over"), expected
    assert (expected[IN_FLIGHT], expected["expired"], expected["unreadable_markers"]) == (HELD, EXPIRED, SPOILT)
    assert sum(each.status.in_flight for each in stage.reported().values()) == HELD
    assert sum(row["in_flight"] for row in status_rows(stage)) == HELD

    folder = tmp_path / "ledger"
    write_ledger(spark, folder, stage, other)
    assert differences(folder, stage, expected) == {}
    assert differences(folder, other, Counter(sent=OTHERS, started=OTHERS, acked=OTHERS)) == {}

    lose_an_ack(spark, folder, stage)
    by_the_ledger, by_the_topics = differences(folder, stage, expected)["acked"]
    assert by_the_ledger < by_the_topics
