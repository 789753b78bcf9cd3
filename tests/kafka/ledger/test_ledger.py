"""The ledger written from a real broker: its counts are the topics' own, whatever happens to its process."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from faults.topics import Dump, read_dump
from kmq_spark.config import Settings, load_settings
from kmq_spark.core.markers import MarkerType, Outcome
from kmq_spark.errors import LedgerError, TopicError
from kmq_spark.kafka.settings import marker_producer_config
from kmq_spark.ledger.reader import read_rows
from kmq_spark.ledger.schema import Location
from kmq_spark.ledger.service import LedgerService
from kmq_spark.ledger.tables import exclusive
from tests.kafka.stage import Stage, receive_all
from tests.limits import COMES_S, ENDS_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from tests.kafka.conftest import Queue

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.slow]

ALL_ROWS = 10**9


def ledger_settings(bootstrap_servers: str, folder: Path, **values: Any) -> Settings:
    """Return settings of a ledger that writes what is there and ends."""
    flags = {"dir": str(folder), **values}
    return load_settings(None, {"kafka": {"bootstrap_servers": bootstrap_servers}, "ledger": flags})


def write_ledger(spark: SparkSession, queue: str, settings: Settings) -> dict[str, int]:
    """Write what is there; return the rows that were new."""
    service = LedgerService(spark, [queue], settings, once=True)
    service.run()
    assert service.rows is not None
    return service.rows


def kmq(*arguments: str, folder: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `kmq ledger` to its end, in a folder."""
    return subprocess.run(
        [sys.executable, "-m", "kmq_spark.cli.main", "ledger", *arguments],
        capture_output=True, text=True, check=False, timeout=ENDS_S, cwd=folder, env={**os.environ, **environment},
    )  # fmt: skip


def work_through(stage: Stage) -> None:
    """Sixty messages: most are acknowledged, some rejected, some given back, some left until their lease runs out."""
    stage.send(*[f"m{number}" for number in range(60)])
    with stage.tracking(), stage.consumer(lease=1) as consumer:
        first = receive_all(consumer, 60)
        for number, message in enumerate(first):
            if number % 10 == 0:
                message.reject(f"no {number % 20}")
            elif number % 10 == 1:
                message.release()
            elif number % 10 > 2:
                message.ack()
        # As they come: those that were given back come about a lease before those whose lease ran out.
        assert len(receive_all(consumer, 9, ack=True)) == 9
        assert len(receive_all(consumer, 3)) == 3
        time.sleep(1.8)  # the last three fall due again


def spoil(stage: Stage, count: int) -> None:
    """Write records to the markers topic that are no markers."""
    from confluent_kafka import Producer  # noqa: PLC0415  # used here alone

    producer = Producer(marker_producer_config(stage.bootstrap_servers, extra={}))
    for _ in range(count):
        producer.produce(stage.layout.topics.markers_topic, b"\xff\xff", partition=0)
    producer.flush(10)


def check_against_topics(folder: Path, dump: Dump) -> None:
    """Every row stands for one record of the topics, and each record has its rows."""
    location = Location(str(folder))
    logged = [
        (partition, each.marker_offset, index)
        for partition, markers in dump.markers.items()
        for each in markers
        if each.marker is None or each.marker.type is not MarkerType.TICK
        for index in range(1 if each.marker is None else len(each.marker.ranges))
    ]
    rows = read_rows(location, "markers", limit=ALL_ROWS)
    places = [(row["marker_partition"], row["marker_offset"], row["range_index"]) for row in rows]
    assert Counter(places) == Counter(logged)
    messages = read_rows(location, "messages", limit=ALL_ROWS)
    assert len(messages) == len(dump.messages)
    assert {(r.place, r.origin, r.previous) for r in dump.messages} == {
        (
            (row["queue_partition"], row["message_offset"]),
            (row["origin_partition"], row["origin_offset"]),
            None if row["previous_offset"] is None else (row["previous_partition"], row["previous_offset"]),
        )
        for row in messages
    }
    dead = read_rows(location, "dead_letters", limit=ALL_ROWS)
    assert Counter(row["reason"] for row in dead) == Counter(
        (record.header("__dlq.errors.message") or b"").decode() for record in dump.dead_letters
    )


def check_totals(folder: Path, dump: Dump) -> None:
    """The view comes out even, and says what the topics say."""
    (total,) = read_rows(Location(str(folder)), "totals", limit=9)
    markers = [each.marker for logged in dump.markers.values() for each in logged if each.marker is not None]
    assert Outcome.REDELIVERED in {marker.outcome for marker in markers if marker.type is MarkerType.END}
    assert (total["sent"], total["missing"], total["unreadable_markers"]) == (60, 0, 2)
    assert total["redelivered"] == sum(record.previous is not None for record in dump.messages)
    assert total["rejected"] + total["dead_lettered"] == len(dump.dead_letters)


def kill_in_mid_write(stage: Stage, folder: Path) -> None:
    """Start a ledger that writes four records a batch, and `kill -9` it after its third."""
    log = folder.with_suffix(".log")
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "kmq_spark.cli.main", "ledger", "run", stage.queue),
                *("--bootstrap-server", stage.bootstrap_servers, "--once"),
            ],
            stderr=stderr, start_new_session=True,
            env={**os.environ, "KMQ_LEDGER__DIR": str(folder), "KMQ_LEDGER__MAX_RECORDS_PER_BATCH": "4"},
        )  # fmt: skip
    third_commit = folder / "messages" / "_delta_log" / f"{3:020}.json"
    until = time.monotonic() + COMES_S
    while not third_commit.exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, log.read_text()


def forget(checkpoints: Path) -> None:
    """Take the newest commit from the messages' checkpoint, of which Delta knows, and the other checkpoints whole."""
    (commits,) = (checkpoints / "messages").rglob("commits")
    newest = max((file for file in commits.iterdir() if file.name.isdecimal()), key=lambda file: int(file.name))
    newest.unlink()
    (commits / f".{newest.name}.crc").unlink(missing_ok=True)
    shutil.rmtree(checkpoints / "markers")
    shutil.rmtree(checkpoints / "dead_letters")


def test_signal_to_the_process_group_ends_the_ledger_cleanly(queue: Queue, tmp_path: Path) -> None:
    """As systemd and a terminal send it: the JVM ends after the process, so that the rows are counted."""
    log = tmp_path / "ledger.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "kmq_spark.cli.main", "ledger", "run", queue.name, "--events"),
                *("--bootstrap-server", queue.bootstrap_servers),
            ],
            stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True, cwd=tmp_path,
        )  # fmt: skip
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["event"] == "ready", log.read_text()
    os.killpg(process.pid, signal.SIGTERM)
    last, _ = process.communicate(timeout=ENDS_S)
    assert process.returncode == 0, log.read_text()
    ended = json.loads(last)
    assert (ended["event"], ended["rows"] is not None) == ("ended", True)
    assert "Error" not in log.read_text()


@pytest.mark.long  # the campaign's F19 kills it too
def test_ledger_holds_every_record_once_though_its_process_is_killed_and_its_checkpoint_lost(
    stage: Stage, spark: SparkSession, tmp_path: Path
) -> None:
    """
    `kill -9` in mid-write; a batch that Delta has and Spark's commit log has not; no checkpoint at all.

    After each of them a run to the end leaves the topics' own counts.
    """
    spoil(stage, 2)
    work_through(stage)
    dump = read_dump(stage.queue, stage.bootstrap_servers)
    folder = tmp_path / "ledger"
    kill_in_mid_write(stage, folder)
    settings = ledger_settings(stage.bootstrap_servers, folder)
    assert write_ledger(spark, stage.queue, settings)["messages"] > 0
    check_against_topics(folder, dump)

    forget(folder / "_checkpoints")
    assert write_ledger(spark, stage.queue, settings) == {}
    check_against_topics(folder, dump)
    check_totals(folder, dump)


def test_ledger_in_a_catalog_has_tables_of_a_schema(queue: Queue, spark: SparkSession, tmp_path: Path) -> None:
    """As on Databricks: no folder is named."""
    queue.send("a", "b")
    schema = "kmq_ledger_test"
    spark.sql(f"CREATE SCHEMA {schema} LOCATION '{tmp_path / 'warehouse'}'")
    try:
        settings = ledger_settings(
            queue.bootstrap_servers, tmp_path, catalog=f"spark_catalog.{schema}", checkpoint_dir=str(tmp_path / "c")
        )
        assert write_ledger(spark, queue.name, settings) == {"messages": 2}
        assert spark.sql(f"SELECT count(*) FROM {schema}.messages").collect()[0][0] == 2  # noqa: S608  # our own
    finally:
        spark.sql(f"DROP SCHEMA {schema} CASCADE")


def test_queue_that_does_not_exist_is_one_line_before_a_jvm_is_started(bootstrap_servers: str, tmp_path: Path) -> None:
    place = ("--bootstrap-server", bootstrap_servers)
    # Where no Java can be found.
    done = kmq("run", "not-there", *place, folder=tmp_path, JAVA_HOME=str(tmp_path), PATH=str(tmp_path))
    assert done.returncode == 1
    assert "topic 'not-there' does not exist; run `kmq queue create not-there`" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "ledger").exists()


def test_two_processes_do_not_write_one_ledger_on_a_disk(queue: Queue, spark: SparkSession, tmp_path: Path) -> None:
    """Renames on a local disk do not keep two writers apart."""
    settings = ledger_settings(queue.bootstrap_servers, tmp_path)
    with exclusive(Location(str(tmp_path))), pytest.raises(LedgerError, match="is in use: another process"):
        write_ledger(spark, queue.name, settings)


def test_records_that_are_gone_stop_the_ledger_with_what_to_do(
    make_queue: Callable[..., Queue], spark: SparkSession, tmp_path: Path
) -> None:
    """A topic that was made anew is shorter than the checkpoint says."""
    from confluent_kafka.admin import AdminClient  # noqa: PLC0415  # used here alone

    from kmq_spark.kafka.topics import create_queue_topics  # noqa: PLC0415  # as above

    queue = make_queue()
    queue.send("a", "b", "c")
    settings = ledger_settings(queue.bootstrap_servers, tmp_path)
    assert write_ledger(spark, queue.name, settings) == {"messages": 3}
    admin = AdminClient({"bootstrap.servers": queue.bootstrap_servers})
    for future in admin.delete_topics([queue.name], operation_timeout=10).values():
        future.result()
    with pytest.raises(TopicError, match="does not exist"):
        write_ledger(spark, queue.name, settings)
    time.sleep(0.5)
    create_queue_topics(queue.name, bootstrap_servers=queue.bootstrap_servers, partitions=1)
    queue.send("d")
    with pytest.raises(LedgerError) as raised:
        write_ledger(spark, queue.name, settings)
    assert re.search(
        r"were removed before the ledger read them, or the topic was deleted and created again: .*; to continue",
        str(raised.value),
    )
