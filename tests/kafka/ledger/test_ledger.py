"""The ledger written from a real broker; the campaign kills it, and compares its rows with the topics (F19)."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kmq_spark.config import Settings, load_settings
from kmq_spark.errors import LedgerError, TopicError
from kmq_spark.kafka.topics import create_queue_topics
from kmq_spark.ledger.schema import Location
from kmq_spark.ledger.service import LedgerService
from kmq_spark.ledger.tables import exclusive
from tests.kafka.conftest import delete_topics
from tests.limits import ENDS_S

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.kafka.conftest import Queue

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.slow]


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


def test_ledger_goes_on_without_its_checkpoints_and_stops_with_what_to_do_where_records_are_gone(
    queue: Queue, spark: SparkSession, tmp_path: Path
) -> None:
    """Without checkpoints no row is written twice. A topic that was made anew is shorter than the checkpoint says."""
    queue.send("a", "b", "c")
    settings = ledger_settings(queue.bootstrap_servers, tmp_path)
    assert write_ledger(spark, queue.name, settings) == {"messages": 3}
    shutil.rmtree(tmp_path / "_checkpoints")
    queue.send("d")
    assert write_ledger(spark, queue.name, settings) == {"messages": 1}
    delete_topics(queue.bootstrap_servers, queue.name)
    with pytest.raises(TopicError, match="does not exist"):
        write_ledger(spark, queue.name, settings)
    create_queue_topics(queue.name, bootstrap_servers=queue.bootstrap_servers, partitions=1)
    queue.send("e")
    with pytest.raises(LedgerError) as raised:
        write_ledger(spark, queue.name, settings)
    assert re.search(
        r"were removed before the ledger read them, or the topic was deleted and created again: .*; to continue",
        str(raised.value),
    )


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
