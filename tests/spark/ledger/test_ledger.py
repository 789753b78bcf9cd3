"""A ledger on real Delta tables: the rows that Spark writes, what DuckDB answers, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from chispa import assert_df_equality
from pyspark.sql import functions as F  # noqa: N812  # the field's name for it

from kmq_spark import ledger
from kmq_spark.core.markers import MessageId, Outcome, Release
from kmq_spark.errors import ConfigError, LedgerError
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.topics import QueueLayout
from kmq_spark.ledger.reader import VIEWS, read_rows
from kmq_spark.ledger.schema import TABLES, VERSION, VERSION_PROPERTY, Location
from kmq_spark.ledger.service import streams_of
from kmq_spark.ledger.sources import dead_letter_rows, marker_rows, message_rows
from kmq_spark.ledger.tables import Maintained, check_tables, create_tables, maintain
from kmq_spark.wire.codec import encode_marker
from tests.builders import end, keep_alive, log, start, tick
from tests.limits import ENDS_S

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from kmq_spark.wire.headers import Headers

pytestmark = [pytest.mark.spark]

RECORD_SCHEMA = (
    "key binary, value binary, partition int, offset bigint, timestamp timestamp, "
    "headers array<struct<key: string, value: binary>>"
)
"""The columns of Spark's Kafka source that a ledger uses."""

ROOT = Path(__file__).parents[3]


def records(spark: SparkSession, *rows: tuple[int, bytes | None, Headers]) -> DataFrame:
    """Return records of one partition as Kafka's source does: append time in ms, value, headers."""
    values = [
        (b"k", value, 0, offset, datetime.fromtimestamp(at_ms / 1_000, UTC), headers)
        for offset, (at_ms, value, headers) in enumerate(rows)
    ]
    return spark.createDataFrame(values, RECORD_SCHEMA)


LEASES = log(
    start(message_offset=0, count=9, at_ms=1_000, lease_ms=5_000),
    end(message_offset=0, at_ms=2_000),
    keep_alive(message_offset=1, at_ms=3_000, lease_ms=0, release=Release.FAILED),
    keep_alive(message_offset=1, at_ms=3_100, lease_ms=9_000, release=Release.GIVEN_BACK),
    keep_alive(message_offset=2, at_ms=3_000, lease_ms=60_000, release=Release.GIVEN_BACK),
    keep_alive(message_offset=3, at_ms=3_000, lease_ms=0, release=Release.GIVEN_BACK, never_handed_out=True),
    end(message_offset=4, at_ms=2_500, outcome=Outcome.REJECTED, reason="no"),
    keep_alive(message_offset=5, at_ms=4_000, lease_ms=5_000),
    start(message_offset=6, at_ms=4_500, lease_ms=5_000),
    end(message_offset=7, at_ms=6_400, outcome=Outcome.REDELIVERED),
    end(message_offset=7, at_ms=7_000, outcome=Outcome.EXPIRED, reason="late"),
    start(message_offset=20, at_ms=5_000, lease_ms=0, never_handed_out=True, due_at_ms=9_000),
    start(message_offset=9, at_ms=7_000, lease_ms=5_000, delivery_count=2),
    end(message_offset=9, at_ms=12_500, outcome=Outcome.DEAD_LETTERED, reason="delivery limit reached: 2 of 2"),
)
"""Every way a lease ends; message 9 is the second copy of message 7."""

COPIES: dict[int, Headers] = {9: [("kmq-origin", b"0:7"), ("kmq-previous", b"0:7"), ("kmq-delivery-count", b"1")]}


@pytest.fixture(scope="module")
def location(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Location:
    """A ledger of the group `orders@billing`: its leases, 21 messages, a record that is no marker, a dead letter."""
    location = Location(str(tmp_path_factory.mktemp("ledger") / "ledger"))
    create_tables(spark, location)
    encoded: list[Any] = [(each.appended_at_ms, encode_marker(each.marker), []) for each in LEASES if each.marker]
    markers = marker_rows(records(spark, *encoded, (13_000, b"\xff", [])), "orders", "billing")
    sent = message_rows(records(spark, *[(900 + n, b"v", COPIES.get(n, [])) for n in range(21)]), "orders")
    keys = F.when(F.col("message_offset") == 1, F.lit(b"\xff\xfe")).otherwise(F.col("key"))
    letter = [*COPIES[9][:1], ("kmq-previous", b"0:9"), ("__dlq.errors.message", b"delivery limit reached: 2 of 2")]
    dead = dead_letter_rows(records(spark, (12_500, b"v", letter)), "orders", "billing")
    for table, rows in (("markers", markers), ("messages", sent.withColumn("key", keys)), ("dead_letters", dead)):
        rows.write.format("delta").mode("append").save(location.path(table))
    return location


def test_marker_row_is_one_range_and_a_tick_is_none(spark: SparkSession) -> None:
    """A marker of two ranges is two rows, an unreadable marker is a row with an error, TICKs are left out."""
    two_ranges = encode_marker(start(ranges=[(3, 4), (9, 1)], delivery_count=2).marker)  # type: ignore[arg-type]
    ticking = encode_marker(tick().marker)  # type: ignore[arg-type]
    rows = marker_rows(records(spark, (1_000, two_ranges, []), (1_001, ticking, []), (1_002, b"\xff", [])), "q", "g")
    found = rows.selectExpr(
        "queue", "subscription", "marker_offset", "range_index", "kind", "first_offset", "message_count",
        "delivery_count", "redeliver_after_ms", "error is not null as is_unreadable",
    )  # fmt: skip
    expected = spark.createDataFrame(
        [
            ("q", "g", 0, 0, "START", 3, 4, 2, 5_000, False),
            ("q", "g", 0, 1, "START", 9, 1, 2, 5_000, False),
            ("q", "g", 2, 0, None, None, None, None, None, True),
        ],
        found.schema,
    )
    assert_df_equality(found, expected, ignore_row_order=True, ignore_nullable=True)


def test_hostile_headers_are_null_and_never_an_error(spark: SparkSession) -> None:
    """Invalid numbers, positions out of bounds, bytes that are not UTF-8."""
    hostile: Headers = [
        ("kmq-origin", b"99999:5"), ("kmq-previous", b"1:"), ("kmq-delivery-count", b"-3"), ("kmq-ttl-ms", b"9" * 40),
        ("kmq-first-sent-ms", b"999999999999999999"), ("kmq-logical-queue", b"\xff\xfe"), ("kmq-delay-ms", None),
        ("kmq-producer", None), ("kmq-generation", b"one"), ("kmq-sequence", b"-1"),
    ]  # fmt: skip
    good: Headers = [
        ("kmq-origin", b"0:1"),
        ("kmq-origin", b"2:7"),
        ("kmq-previous", b"2:9"),
        ("kmq-delivery-count", b"4"),
        ("kmq-producer", b"copier"),
        ("kmq-generation", b"2"),
        ("kmq-sequence", b"17"),
    ]
    bad_row, good_row = message_rows(records(spark, (1_000, b"x", hostile), (2_000, b"four", good)), "q").collect()
    assert [bad_row[name] for name in ("previous_partition", "delivery_count", "ttl_ms", "delay_ms")] == [None] * 4
    assert (bad_row["origin_partition"], bad_row["origin_offset"], bad_row["is_first_copy"]) == (0, 0, True)
    sender = ("producer_id", "producer_generation", "producer_sequence")
    assert [[row[name] for name in sender] for row in (bad_row, good_row)] == [[None] * 3, ["copier", 2, 17]]
    assert bad_row["logical_queue"] == "\ufffd\ufffd"
    assert bad_row["first_sent_at"] == bad_row["sent_at"]
    assert (good_row["origin_partition"], good_row["origin_offset"], good_row["previous_offset"]) == (2, 7, 9)
    assert (good_row["delivery_count"], good_row["value_bytes"], good_row["is_first_copy"]) == (4, 4, False)


def test_dead_letter_has_its_source_its_reason_and_its_attempts(spark: SparkSession) -> None:
    headers: Headers = [
        ("kmq-origin", b"0:1"), ("kmq-previous", b"0:2"), ("kmq-attempts-ms", b"1000,x,2000"),
        ("__dlq.errors.message", b"no"),
    ]  # fmt: skip
    (row,) = dead_letter_rows(records(spark, (2_000, b"", headers)), "q", "").collect()
    assert (row["source_offset"], row["reason"], len(row["attempts_at"])) == (2, "no", 2)


def test_each_way_a_lease_can_end_has_a_name(location: Location) -> None:
    """A marker after the end of a lease does not change how it ended."""
    rows = read_rows(location, "deliveries", limit=99)
    found = {(row["message_offset"], row["lease_number"]): row for row in rows}
    assert {offset: found[offset, 1]["outcome"] for offset, number in found if number == 1} == {
        0: "ACKED", 1: "FAILED", 2: "RELEASED", 3: "RETURNED", 4: "REJECTED", 5: "IN_FLIGHT", 6: "TAKEN_OVER",
        7: "LEASE_EXPIRED", 8: "IN_FLIGHT", 9: "LEASE_EXPIRED", 20: "DEFERRED",
    }  # fmt: skip
    assert found[6, 2]["outcome"] == "IN_FLIGHT"
    assert (found[0, 1]["held_ms"], found[1, 1]["held_ms"]) == (1_000, 2_000)
    # Silence is held to the deadline, 1_000 + 5_000; the tracker came 400 ms after it; the late END does not count.
    assert (found[7, 1]["held_ms"], found[7, 1]["late_ms"], found[7, 1]["settled_as"]) == (5_000, 400, "REDELIVERED")
    assert (found[5, 1]["renewals"], found[5, 1]["deadline_at"].timestamp()) == (1, 9.0)
    assert found[20, 1]["deadline_at"].timestamp() == 9.0


def test_questions_answer_what_the_leases_were(location: Location) -> None:
    (total,) = read_rows(location, "totals", queue="orders@billing", limit=9)
    # 9 messages of the first START, the second START of message 6, the deferral, and the copy; one was taken over.
    assert (total["started"], total["taken_over"], total["deferred"], total["missing"]) == (11, 1, 1, 0)
    assert (total["sent"], total["dead_letters"], total["unreadable_markers"]) == (20, 1, 1)
    worst = read_rows(location, "hottest_poison", limit=9)[0]
    assert (worst["origin_offset"], worst["deliveries"], worst["silent"], worst["key"]) == (7, 2, 2, "k")
    assert worst["reason"] == "delivery limit reached: 2 of 2"
    (hour,) = read_rows(location, "redeliveries_by_hour", limit=9)
    assert (hour["redelivered"], hour["early"], hour["late_max_ms"]) == (1, 0, 400)
    stuck = read_rows(location, "stuck_now", limit=99)
    assert {(row["message_offset"], row["why"]) for row in stuck} >= {
        (5, "past its deadline"),
        (8, "past its deadline"),
    }
    (slowest,) = read_rows(location, "slowest_handlers", limit=9)
    assert (slowest["handled"], slowest["failed"], slowest["max_ms"]) == (3, 1, 2_000)


@pytest.mark.parametrize("copy", [7, 9])
def test_story_is_the_same_whichever_copy_is_named(location: Location, copy: int) -> None:
    """From the first copy to the dead letter, in order of time."""
    rows = read_rows(location, "message_story", queue="orders@billing", message=MessageId(0, copy), limit=99)
    assert sorted(row["event_at"] for row in rows) == [row["event_at"] for row in rows]
    assert sorted(row["event"] for row in rows) == sorted(
        ["sent", "started", "redelivered", "sent again", "expired", "started", "dead-lettered", "dead letter"]
    )
    assert read_rows(location, "message_story", queue="orders@else", message=MessageId(0, copy), limit=1)[0][
        "event"
    ] == ("sent")


def test_queue_and_limit_choose_rows(location: Location) -> None:
    """A user's own SQL runs on the same views; every view and table can be asked."""
    assert all(read_rows(location, name, limit=1) for name in (*VIEWS, *TABLES))
    assert len(read_rows(location, "deliveries", queue="orders", limit=3)) == 3
    assert read_rows(location, "deliveries", queue="orders@else", limit=3) == []
    with pytest.raises(ConfigError, match=r"unknown view: got 'nope'; expected one of marker_events"):
        read_rows(location, "nope", limit=1)
    with ledger.connect(location.folder) as connection:
        found = connection.execute("SELECT count(*) FROM deliveries WHERE outcome = 'LEASE_EXPIRED'").fetchall()
        keys = connection.execute("SELECT DISTINCT key FROM messages ORDER BY key").fetchall()
    assert (found, keys) == ([(2,)], [("0xfffe",), ("k",)])


def test_show_needs_no_java(location: Location, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kmq_spark.cli.main", "ledger", "show", "totals", "-o", "json"],
        capture_output=True, text=True, check=False, timeout=ENDS_S, cwd=Path(location.folder).parent,
        env={"PYTHONPATH": str(ROOT), "PATH": str(tmp_path), "JAVA_HOME": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)[0]["missing"] == 0


@pytest.mark.slow  # three of Delta's own jobs over every table
def test_maintenance_deletes_old_days_and_puts_files_together(spark: SparkSession, tmp_path: Path) -> None:
    """Whole days are deleted, today and thirty days are kept, and the kept days have one file each."""
    location = Location(str(tmp_path))
    create_tables(spark, location)
    name = location.sql_name("messages")
    for days_ago in (31, 30, 0, 0):
        values = f"('q', date_sub(current_date(), {days_ago}), 1)"
        spark.sql(f"INSERT INTO {name} (queue, sent_date, message_offset) VALUES {values}")  # noqa: S608  # our own
    done = {each.table: each for each in maintain(spark, location, keep_days=30)}
    assert done["messages"] == Maintained("messages", 1, 2, 1)
    assert done["markers"] == Maintained("markers", 0, 0, 0)
    assert spark.table(name).count() == 3


def test_place_that_holds_something_else_is_refused_and_left_alone(spark: SparkSession, tmp_path: Path) -> None:
    """No ledger, other files, another Delta table, another version: each has its own error with the repair."""
    with pytest.raises(LedgerError, match=r"no ledger at .*; correct \[ledger\] dir or catalog, or create"):
        check_tables(spark, Location(str(tmp_path / "nothing")))
    with pytest.raises(LedgerError, match=r"no ledger at .*; correct \[ledger\] dir or catalog, or create"):
        ledger.connect(str(tmp_path / "nothing"))
    (tmp_path / "files" / "markers").mkdir(parents=True)
    (tmp_path / "files" / "markers" / "notes.txt").write_text("mine")
    with pytest.raises(LedgerError, match=r"is not a Delta table: got other files in .*; choose another"):
        create_tables(spark, Location(str(tmp_path / "files")))
    spark.range(1).write.format("delta").save(str(tmp_path / "theirs" / "markers"))
    with pytest.raises(LedgerError, match=r"is not part of a ledger: .* has no property kmq.ledger.version"):
        create_tables(spark, Location(str(tmp_path / "theirs")))
    with pytest.raises(LedgerError, match=r"is not part of a ledger: .* has no property kmq.ledger.version"):
        ledger.connect(str(tmp_path / "theirs"))
    newer = Location(str(tmp_path / "theirs")).sql_name("markers")
    spark.sql(f"ALTER TABLE {newer} SET TBLPROPERTIES ('{VERSION_PROPERTY}' = '9')")
    with pytest.raises(LedgerError, match=rf"has another version: got 9 of .*; expected {VERSION}; read it with"):
        ledger.connect(str(tmp_path / "theirs"))
    with pytest.raises(ConfigError, match="location of the ledger is ambiguous"):
        Location("a", "b")
    with pytest.raises(ConfigError, match="location of the ledger is not allowed"):
        Location(catalog="main.kmq`; DROP")


def test_table_with_renamed_columns_is_an_error_and_no_partial_result(
    spark: SparkSession, location: Location, tmp_path: Path
) -> None:
    """Its columns have other names in the files."""
    mapped = Location(str(tmp_path / "ledger"))
    shutil.copytree(location.folder, mapped.folder)
    name = mapped.sql_name("dead_letters")
    spark.sql(f"ALTER TABLE {name} SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')")
    with pytest.raises(LedgerError, match=r"cannot read .*: got a table with column mapping"):
        ledger.connect(mapped.folder)


def test_table_of_another_format_is_refused_though_it_has_the_ledgers_property(
    spark: SparkSession, tmp_path: Path
) -> None:
    """As `CREATE TABLE … LIKE … USING parquet` makes it, in a catalog."""
    schema = "kmq_ledger_of_another_format"
    spark.sql(f"CREATE SCHEMA {schema} LOCATION '{tmp_path}'")
    try:
        location = Location(catalog=f"spark_catalog.{schema}")
        spark.sql(
            f"CREATE TABLE {location.sql_name('markers')} (queue string) USING parquet "
            f"TBLPROPERTIES ('{VERSION_PROPERTY}' = '{VERSION}')"
        )
        with pytest.raises(LedgerError, match=r"is not part of a ledger: .* has no property kmq.ledger.version"):
            create_tables(spark, location)
    finally:
        spark.sql(f"DROP SCHEMA {schema} CASCADE")


def test_messages_of_a_queue_are_read_once_however_many_subscriptions_there_are() -> None:
    layouts = [QueueLayout(QueueTopics("orders"), 4, 4), QueueLayout(QueueTopics("orders", "billing"), 4, 4)]
    assert [stream.name for stream in streams_of(layouts)] == [
        *("messages/orders", "markers/orders", "dead_letters/orders"),
        *("markers/orders@billing", "dead_letters/orders@billing"),
    ]
