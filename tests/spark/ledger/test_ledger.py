"""The ledger's rows and views on a real Delta table: what is written, what queries return, what is refused."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from chispa import assert_df_equality

from kmq_spark import ledger
from kmq_spark.core.fold import LoggedMarker, PartitionState, Rules, fold
from kmq_spark.core.markers import MarkerType, Outcome, Release
from kmq_spark.errors import ConfigError, LedgerError
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.topics import QueueLayout
from kmq_spark.ledger.sample import (
    HOUR_MS,
    LEASE_MS,
    MAX_DELIVERIES,
    MINUTE_MS,
    PARTITIONS,
    TRACKER_DOWN_MS,
    sample_hour,
    write_sample,
)
from kmq_spark.ledger.sample_fleet import HEARTBEAT_MS
from kmq_spark.ledger.schema import VERSION, VERSION_PROPERTY, Location
from kmq_spark.ledger.service import streams_of
from kmq_spark.ledger.sources import dead_letter_rows, marker_rows, message_rows
from kmq_spark.ledger.tables import check_tables, create_tables
from kmq_spark.testing.builders import end, keep_alive, log, start, tick
from kmq_spark.wire.codec import decode_marker, encode_marker
from kmq_spark.wire.headers import Headers

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark]

RECORD_SCHEMA = (
    "key binary, value binary, partition int, offset bigint, timestamp timestamp, "
    "headers array<struct<key: string, value: binary>>"
)
"""The columns of Spark's Kafka source that a ledger uses."""

ROOT = Path(__file__).parents[3]

SAMPLE_ENDS_AT_MS = 1_750_000_000_000


@pytest.fixture(scope="module")
def sample(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Location:
    """The made-up hour, opened."""
    folder = tmp_path_factory.mktemp("sample") / "ledger"
    write_sample(spark, str(folder), SAMPLE_ENDS_AT_MS)
    return ledger.open_ledger(spark, str(folder))


def records(spark: SparkSession, *rows: tuple[int, bytes | None, Headers]) -> DataFrame:
    """Return records of one partition as Kafka's source does: append time in ms, value, headers."""
    values = [
        (b"k", value, 0, offset, datetime.fromtimestamp(at_ms / 1_000, UTC), headers)
        for offset, (at_ms, value, headers) in enumerate(rows)
    ]
    return spark.createDataFrame(values, RECORD_SCHEMA)


def deliveries_of(spark: SparkSession, *markers: LoggedMarker) -> list[Any]:
    """Return what the view `deliveries` makes of a log."""
    rows: list[Any] = [
        (each.appended_at_ms, encode_marker(each.marker), []) for each in log(*markers) if each.marker is not None
    ]
    marker_rows(records(spark, *rows), "orders", "").createOrReplaceTempView("handmade")
    from kmq_spark.ledger.queries import view_sql  # noqa: PLC0415  # used here alone

    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW handmade_events AS {view_sql('marker_events', {'markers': 'handmade'})}"
    )
    query = view_sql("deliveries", {"marker_events": "handmade_events"})
    return spark.sql(query).orderBy("message_offset", "lease_number").collect()


def test_marker_row_is_one_range_and_a_tick_is_none(spark: SparkSession) -> None:
    """A marker of two ranges is two rows, an unreadable marker is a row with an error, TICKs are left out."""
    two_ranges = encode_marker(start(ranges=[(3, 4), (9, 1)], delivery_count=2).marker)  # type: ignore[arg-type]
    ticking = encode_marker(tick().marker)  # type: ignore[arg-type]
    rows = marker_rows(records(spark, (1_000, two_ranges, []), (1_001, ticking, []), (1_002, b"\xff", [])), "q", "g")
    found = rows.selectExpr(
        "queue", "group_name", "marker_offset", "range_index", "kind", "first_offset", "message_count",
        "delivery_count",         "redeliver_after_ms", "error is not null as is_unreadable",
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


def test_dead_letter_of_an_unreadable_marker_is_distinguished_from_one_of_a_message(spark: SparkSession) -> None:
    marker: Headers = [
        ("__dlq.errors.topic", b"q.markers"),
        ("__dlq.errors.partition", b"1"),
        ("__dlq.errors.offset", b"5"),
    ]
    message: Headers = [
        ("kmq-origin", b"0:1"), ("kmq-previous", b"0:2"), ("kmq-attempts-ms", b"1000,x,2000"),
        ("__dlq.errors.topic", b"q"), ("__dlq.errors.message", b"no"),
    ]  # fmt: skip
    rows = dead_letter_rows(records(spark, (1_000, b"", marker), (2_000, b"", message)), "q", "").collect()
    assert [(row["is_marker"], row["source_offset"], row["reason"]) for row in rows] == [
        (True, 5, None),
        (False, 2, "no"),
    ]
    assert len(rows[1]["attempts_at"]) == 2


def test_each_way_a_lease_can_end_has_a_name(spark: SparkSession) -> None:
    """A marker after the end of a lease does not change how it ended."""
    rows = deliveries_of(
        spark,
        start(message_offset=0, count=9, at_ms=1_000, lease_ms=5_000),
        end(message_offset=0, at_ms=2_000),
        keep_alive(message_offset=1, at_ms=3_000, lease_ms=0, release=Release.FAILED),
        keep_alive(message_offset=2, at_ms=3_000, lease_ms=60_000, release=Release.GIVEN_BACK),
        keep_alive(message_offset=3, at_ms=3_000, lease_ms=0, release=Release.GIVEN_BACK, never_handed_out=True),
        end(message_offset=4, at_ms=2_500, outcome=Outcome.REJECTED, reason="no"),
        keep_alive(message_offset=5, at_ms=4_000, lease_ms=5_000),
        start(message_offset=6, at_ms=4_500, lease_ms=5_000),
        end(message_offset=7, at_ms=6_400, outcome=Outcome.REDELIVERED),
        end(message_offset=7, at_ms=7_000),
        start(message_offset=20, at_ms=5_000, lease_ms=0, never_handed_out=True, due_at_ms=9_000),
    )
    found = {(row["message_offset"], row["lease_number"]): row for row in rows}
    outcomes = [found[offset, 1]["outcome"] for offset in (0, 1, 2, 3, 4, 5, 6, 7, 8, 20)]
    assert outcomes == [
        *(
            "ACKED",
            "FAILED",
            "RELEASED",
            "RETURNED",
            "REJECTED",
            "IN_FLIGHT",
            "TAKEN_OVER",
            "LEASE_EXPIRED",
            "IN_FLIGHT",
        ),
        "DEFERRED",
    ]
    assert found[6, 2]["outcome"] == "IN_FLIGHT"
    assert (found[0, 1]["held_ms"], found[1, 1]["held_ms"]) == (1_000, 2_000)
    # Silence is held to the deadline, 1_000 + 5_000; the tracker came 400 ms after it; the ack came too late.
    assert (found[7, 1]["held_ms"], found[7, 1]["late_ms"], found[7, 1]["settled_as"]) == (5_000, 400, "REDELIVERED")
    assert (found[5, 1]["renewals"], found[5, 1]["deadline_at"].timestamp()) == (1, 9.0)
    assert found[20, 1]["deadline_at"].timestamp() == 9.0


def test_what_was_started_is_all_accounted_for(spark: SparkSession, sample: Location) -> None:
    """The messages in flight are those of the tracker's own fold of the same log."""
    (total,) = ledger.totals(spark, "orders").collect()
    hour = sample_hour()
    in_flight = 0
    for partition in range(PARTITIONS):
        markers = [
            LoggedMarker(record.offset, record.at_ms, decode_marker(record.value))
            for record in hour.records["markers"]
            if record.partition == partition
        ]
        in_flight += fold(PartitionState.empty(), markers, Rules(max_deliveries=MAX_DELIVERIES)).status.in_flight
    copies = [record for record in hour.records["messages"] if "kmq-origin" in dict(record.headers)]
    assert total["missing"] == 0
    assert total["in_flight"] == in_flight > 0
    assert total["sent"] == len(hour.records["messages"]) - len(copies)
    assert total["redelivered"] == len(copies)
    assert total["dead_letters"] == len(hour.records["dead_letters"])
    assert total["started"] == sum(
        decode_marker(record.value).type is MarkerType.START for record in hour.records["markers"]
    )


def test_story_is_the_same_whichever_copy_is_named(spark: SparkSession, sample: Location) -> None:
    """From the first copy to the dead letter, in order of time."""
    worst = ledger.hottest_poison(spark, "orders").first()
    assert worst is not None
    assert (worst["deliveries"], worst["silent"], worst["last_outcome"]) == (5, 5, "LEASE_EXPIRED")
    assert worst["reason"] == "delivered 5 times, the limit"
    events = ledger.story(spark, "orders", worst["origin_partition"], worst["origin_offset"]).collect()
    last_copy = [row for row in events if row["event"] == "sent again"][-1]
    assert events == ledger.story(spark, "orders", last_copy["queue_partition"], last_copy["message_offset"]).collect()
    names = [row["event"] for row in events]
    assert names == ["sent", "started", *["redelivered", "sent again", "started"] * 4, "dead-lettered", "dead letter"]
    assert [row["at"] for row in events] == sorted(row["at"] for row in events)


def test_questions_answer_what_the_hour_was_made_of(spark: SparkSession, sample: Location) -> None:
    slowest = ledger.slowest_handlers(spark).first()
    hours = ledger.redeliveries_by_hour(spark).collect()
    stuck = ledger.stuck_now(spark, "orders").collect()
    assert slowest is not None
    assert slowest["consumer_id"] == "worker-3"
    assert sum(row["redelivered"] for row in hours) == ledger.totals(spark).collect()[0]["redelivered"]
    assert all(row["early"] == 0 for row in hours)
    assert max(row["late_max_ms"] for row in hours) > 60_000  # the tracker was away for two minutes
    assert stuck
    assert {row["why"] for row in stuck} == {"past its deadline"}  # the hour ended long ago
    assert all(row["age_ms"] > LEASE_MS for row in stuck)
    assert ledger.deliveries(spark, "orders@billing").count() == 0


@pytest.mark.slow  # three of Delta's own jobs over every table
def test_maintenance_deletes_old_days_and_puts_files_together(spark: SparkSession, tmp_path: Path) -> None:
    """Whole days are deleted, today and thirty days are kept, and the kept days have one file each."""
    location = Location(str(tmp_path))
    create_tables(spark, location)
    name = location.sql_name("messages")
    for days_ago in (31, 30, 0, 0):
        values = f"('q', date_sub(current_date(), {days_ago}), 1)"
        spark.sql(f"INSERT INTO {name} (queue, sent_date, message_offset) VALUES {values}")  # noqa: S608  # our own
    done = {each.table: each for each in ledger.maintain(spark, location, keep_days=30, vacuum_hours=168)}
    assert done["messages"] == ledger.Maintained("messages", 1, 2, 1)
    assert done["markers"] == ledger.Maintained("markers", 0, 0, 0)
    assert spark.table(name).count() == 3


def test_place_that_holds_something_else_is_refused_and_left_alone(spark: SparkSession, tmp_path: Path) -> None:
    """No ledger, other files, another Delta table: each has its own error with the repair."""
    with pytest.raises(LedgerError, match=r"no ledger at .*; correct --ledger-dir or --catalog, or create one with"):
        ledger.open_ledger(spark, str(tmp_path / "nothing"))
    with pytest.raises(LedgerError, match=r"no ledger at .*; correct --ledger-dir or --catalog, or create one with"):
        ledger.connect(str(tmp_path / "nothing"))
    (tmp_path / "files" / "markers").mkdir(parents=True)
    (tmp_path / "files" / "markers" / "notes.txt").write_text("mine")
    with pytest.raises(LedgerError, match=r"is not a Delta table: got other files in .*; choose another --ledger-dir"):
        create_tables(spark, Location(str(tmp_path / "files")))
    spark.range(1).write.format("delta").save(str(tmp_path / "theirs" / "markers"))
    with pytest.raises(LedgerError, match=r"is not part of a ledger: .* has no property kmq.ledger.version"):
        create_tables(spark, Location(str(tmp_path / "theirs")))
    with pytest.raises(LedgerError, match=r"is not part of a ledger: .* has no property kmq.ledger.version"):
        ledger.connect(str(tmp_path / "theirs"))
    with pytest.raises(ConfigError, match="location of the ledger is ambiguous"):
        Location("a", "b")
    with pytest.raises(ConfigError, match="ledger catalog is not allowed"):
        Location(catalog="main.kmq`; DROP")


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


@pytest.mark.slow  # several ledgers, made and altered
def test_older_schema_is_reported_and_upgraded_on_request(spark: SparkSession, tmp_path: Path) -> None:
    """Existing rows are kept, with null in new columns; a newer schema is never changed."""
    location = Location(str(tmp_path))
    create_tables(spark, location)
    name = location.sql_name("dead_letters")
    spark.sql(f"ALTER TABLE {name} SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')")
    spark.sql(f"ALTER TABLE {name} DROP COLUMN reason")
    spark.sql(f"ALTER TABLE {name} SET TBLPROPERTIES ('{VERSION_PROPERTY}' = '0')")
    with pytest.raises(LedgerError, match=r"of an older schema: .*; run `kmq ledger maintain --upgrade`"):
        create_tables(spark, location)
    assert ledger.upgrade_tables(spark, location) == ["dead_letters.reason"]
    check_tables(spark, location)
    # Its columns have other names in the files now, which delta-rs says it cannot read.
    with pytest.raises(LedgerError, match=r"cannot read .* without Spark: got .*; use `--engine spark`"):
        ledger.connect(location.folder)
    spark.sql(f"ALTER TABLE {name} SET TBLPROPERTIES ('{VERSION_PROPERTY}' = '9')")
    with pytest.raises(LedgerError, match=r"of a newer schema: got version 9 .*; upgrade kmq-spark"):
        ledger.connect(location.folder)
    with pytest.raises(LedgerError, match=r"of a newer schema: got version 9 .*; upgrade kmq-spark"):
        check_tables(spark, location)


def test_ledger_of_a_version_without_coordination_is_upgraded(spark: SparkSession, tmp_path: Path) -> None:
    """Its readers say what to do; `run` creates the table by itself."""
    location = Location(str(tmp_path))
    create_tables(spark, location)
    shutil.rmtree(tmp_path / "coordination")
    for read in (lambda: ledger.connect(str(tmp_path)), lambda: check_tables(spark, location)):
        with pytest.raises(LedgerError, match=r"ledger is of an older schema: .*; run `kmq ledger maintain --upgrade`"):
            read()
    assert ledger.upgrade_tables(spark, location) == ["coordination"]
    shutil.rmtree(tmp_path / "coordination")
    create_tables(spark, location)
    check_tables(spark, location)


def test_messages_of_a_queue_are_read_once_however_many_groups_there_are() -> None:
    layouts = [QueueLayout(QueueTopics("orders"), 4, 4), QueueLayout(QueueTopics("orders", "billing"), 4, 4)]
    assert [stream.name for stream in streams_of(layouts)] == [
        *("messages/orders", "markers/orders", "dead_letters/orders"),
        *("markers/orders@billing", "dead_letters/orders@billing"),
    ]


def test_other_process_of_the_fleet_claims_the_queue_2t_after_the_last_heartbeat(
    spark: SparkSession, sample: Location
) -> None:
    """The tracker's process dies at minute 44. The claim of the other one begins before its tracker decides again."""
    began_at_ms = SAMPLE_ENDS_AT_MS - HOUR_MS
    first, second = ledger.ownership(spark, "orders").orderBy("epoch").collect()
    assert [(row["owner"], row["ended_by"], row["is_begin_known"]) for row in (first, second)] == [
        ("host-1", "lapsed", True),
        ("host-2", None, True),
    ]
    assert {row["coordination_group"] for row in (first, second)} == {"kmq.fleet.production"}
    lapsed_at_ms, claimed_at_ms = (
        round(at.timestamp() * 1_000) - began_at_ms for at in (first["until_at"], second["from_at"])
    )
    died_at_ms, back_at_ms = TRACKER_DOWN_MS
    # The last heartbeat was at most T/3 before the death.
    assert died_at_ms - HEARTBEAT_MS // 3 + 2 * HEARTBEAT_MS <= lapsed_at_ms < claimed_at_ms <= back_at_ms
    assert first["held_ms"] > lapsed_at_ms - MINUTE_MS


def test_sample_hour_is_the_same_every_time() -> None:
    assert sample_hour().records == sample_hour().records
    assert max(record.at_ms for record in sample_hour().records["markers"]) < HOUR_MS


@pytest.mark.slow  # every question of the ledger, drawn
def test_notebook_runs_from_its_first_cell_to_its_last(
    spark: SparkSession, sample: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a given ledger; each of its four plots is drawn and has no early or missing data."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("KMQ_LEDGER", sample.folder)
    notebook = json.loads((ROOT / "notebooks" / "ledger.ipynb").read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)  # noqa: S102  # our own notebook
    drawn = [len(names["plt"].figure(number).axes) for number in names["plt"].get_fignums()]
    names["plt"].close("all")
    assert drawn == [1, 2, 2, 1]
    assert (names["early"], names["totals"][0]["missing"]) == (0, 0)
    assert len(names["redelivered"]) > 200
    assert names["dead"].letters.sum() == len(sample_hour().records["dead_letters"])
