"""A ledger that Spark has written, read without Spark: the same results, and no JVM."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F  # noqa: N812  # the field's name for it

from kmq_spark import ledger
from kmq_spark.core.markers import MessageId, Outcome, Release
from kmq_spark.ledger.reader import read_rows
from kmq_spark.ledger.sample import write_sample
from kmq_spark.ledger.schema import TABLES, Location
from kmq_spark.ledger.sources import marker_rows, message_rows
from kmq_spark.testing.builders import end, keep_alive, log, start
from kmq_spark.wire.codec import encode_marker
from tests.limits import ENDS_S
from tests.spark.ledger.test_ledger import SAMPLE_ENDS_AT_MS, records

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyspark.sql import SparkSession

    from kmq_spark.wire.headers import Headers

pytestmark = [pytest.mark.spark]

ROOT = Path(__file__).parents[3]


def answered_by_spark(spark: SparkSession, view: str) -> list[str]:
    """Return the rows of a view as text, in an order of their own; ages pass while the engines are asked."""
    return _as_text([row.asDict() for row in ledger.read_view(spark, view).collect()])


def _as_text(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return sorted(
        repr({name: _plain(value) for name, value in row.items() if name not in {"age_ms", "overdue_ms"}})
        for row in rows
    )


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    return [_plain(each) for each in value] if isinstance(value, list) else value


CHANGES = (
    ("found", "a", 5), ("joined", "b", None), ("released", "a", 5), ("claimed", "b", 13), ("lapsed", "b", 13),
    ("claimed", "a", 15), ("found", "a", 15), ("claimed", "a", 17),
)  # fmt: skip
"""Changes of a group, one a second: a claim from before the log, a lapse, and a claim that is found once more."""


def append_odd_rows(spark: SparkSession, location: Location) -> None:
    """Add what the made-up hour lacks: every other end of a lease, hostile keys and headers, what is no marker."""
    markers = log(
        start(message_offset=0, count=7, at_ms=1_000, lease_ms=5_000),
        keep_alive(message_offset=1, at_ms=3_000, lease_ms=0, release=Release.FAILED),
        keep_alive(message_offset=1, at_ms=3_100, lease_ms=9_000, release=Release.GIVEN_BACK),
        keep_alive(message_offset=2, at_ms=3_000, lease_ms=60_000, release=Release.GIVEN_BACK),
        keep_alive(message_offset=3, at_ms=3_000, lease_ms=0, release=Release.GIVEN_BACK, never_handed_out=True),
        keep_alive(message_offset=4, at_ms=4_000, lease_ms=5_000),
        start(message_offset=5, at_ms=4_500, lease_ms=5_000),
        end(message_offset=6, at_ms=6_400, outcome=Outcome.REDELIVERED),
        end(message_offset=6, at_ms=7_000, outcome=Outcome.EXPIRED, reason="late"),
        start(message_offset=20, at_ms=5_000, lease_ms=0, never_handed_out=True, due_at_ms=9_000),
    )
    encoded: list[Any] = [(each.appended_at_ms, encode_marker(each.marker), []) for each in markers if each.marker]
    odd = marker_rows(records(spark, *encoded, (9_000, b"\xff", [])), "odd", "billing")
    headers: Headers = [
        ("kmq-not-before-ms", b"5000"), ("kmq-delay-ms", b"3500"), ("kmq-ttl-ms", b"60000"),
        ("kmq-logical-queue", b"emails"),
    ]  # fmt: skip
    sent = message_rows(records(spark, *[(1_000 + number, b"v", headers) for number in range(21)]), "odd")
    keys = F.when(F.col("message_offset") == 1, F.lit(b"\xff\xfeZo\xc3\xab")).when(
        F.col("message_offset") > 1, F.col("key")
    )
    changes = spark.createDataFrame(
        [
            (group, 10 + number, datetime.fromtimestamp(10 + number, UTC), *change)
            for group in ("kmq.fleet.odd", "g")
            for number, change in enumerate(CHANGES)
        ],
        "coordination_group string, record_offset bigint, appended_at timestamp, change string, client_id string, "
        "epoch bigint",
    ).selectExpr(
        "if(coordination_group = 'g', null, 'odd') AS queue", "if(coordination_group = 'g', null, '') AS group_name",
        "to_date(appended_at) AS change_date", "3 AS coordination_partition", "record_offset", "0 AS change_index",
        "appended_at", "coordination_group", "change", "client_id", "'odd' AS resource", "epoch",
    )  # fmt: skip
    for table, rows in (
        ("markers", odd),
        ("messages", sent.withColumn("key", keys)),
        ("coordination", changes),
    ):
        rows.write.format("delta").mode("append").save(location.path(table))


@pytest.fixture(scope="module")
def location(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Location:
    """The made-up hour with odd rows, opened in Spark."""
    folder = tmp_path_factory.mktemp("reader") / "ledger"
    write_sample(spark, str(folder), SAMPLE_ENDS_AT_MS)
    append_odd_rows(spark, Location(str(folder)))
    return ledger.open_ledger(spark, str(folder))


def test_duckdb_answers_what_spark_answers(spark: SparkSession, location: Location) -> None:
    """Every view and table, row by row: both engines run the same SQL text."""
    for view in (*ledger.VIEWS, *TABLES):
        expected = answered_by_spark(spark, view)
        assert expected
        assert _as_text(read_rows(location, view, limit=10**9)) == expected, view


def test_ownership_is_one_row_per_claim_with_how_it_ended(location: Location) -> None:
    """A claim that was found again is one claim; the last one is held."""
    found = read_rows(location, "ownership", queue="odd", limit=99)
    assert [(row["owner"], row["epoch"], row["ended_by"], row["held_ms"], row["is_begin_known"]) for row in found] == [
        ("a", 5, "released", 2_000, False),
        ("b", 13, "lapsed", 1_000, True),
        ("a", 15, "replaced", 2_000, True),
        ("a", 17, None, None, True),
    ]
    assert {row["coordination_group"] for row in found} == {"kmq.fleet.odd"}
    # Those of the group `g` that is no fleet, and the two of the made-up hour.
    assert len(read_rows(location, "ownership", limit=99)) == 4 + 4 + 2


@pytest.mark.parametrize(
    ("queue", "place"),
    [
        ("odd", MessageId(0, 1)),
        ("odd@billing", MessageId(0, 6)),
        ("orders", MessageId(1, 66)),
        ("odd", MessageId(9, 9)),
    ],
)
def test_duckdb_returns_the_story_that_spark_returns(
    spark: SparkSession, location: Location, queue: str, place: MessageId
) -> None:
    """In the same order, for each copy of the message."""
    expected = ledger.story(spark, queue, *place).drop("queue", "origin_partition", "origin_offset", "step").collect()
    found = read_rows(location, "message_story", queue=queue, message=place, limit=99)
    assert [_as_text([row]) for row in found] == [_as_text([row.asDict()]) for row in expected]
    assert bool(expected) == (place != MessageId(9, 9))


def test_queue_and_limit_choose_rows(spark: SparkSession, location: Location) -> None:
    """A user's own SQL runs on the same views."""
    assert len(read_rows(location, "deliveries", queue="odd", limit=3)) == 3
    assert read_rows(location, "deliveries", queue="odd@else", limit=3) == []
    with ledger.connect(location.folder) as connection:
        found = connection.execute("SELECT count(*) FROM deliveries WHERE outcome = 'LEASE_EXPIRED'").fetchall()
    assert found == [(sum("'LEASE_EXPIRED'" in row for row in answered_by_spark(spark, "deliveries")),)]


def test_show_needs_no_java(location: Location, tmp_path: Path) -> None:
    """`ledger show` runs on a machine without a JVM."""
    done = subprocess.run(
        [sys.executable, "-m", "kmq_spark.cli.main", "ledger", "show", "totals", "-o", "json"],
        capture_output=True, text=True, check=False, timeout=ENDS_S, cwd=Path(location.folder).parent,
        env={"PYTHONPATH": str(ROOT), "PATH": str(tmp_path), "JAVA_HOME": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)[0]["missing"] == 0
