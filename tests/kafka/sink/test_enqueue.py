"""`kmq enqueue`: files, tables and topics into a queue, each row once, run after run."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from kmq_spark.errors import ConfigError, KmqError, SinkError, TopicError
from kmq_spark.failpoints import ONCE_VARIABLE, VARIABLE
from kmq_spark.sink.enqueue import Columns, Enqueuer, Source
from kmq_spark.spark.restarts import FIRST_BACKOFF_S
from tests.kafka.commands import no_process_outlives_its_test, start  # noqa: F401  # a fixture
from tests.kafka.conftest import Queue, read_all, seen
from tests.limits import ENDS_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.kafka]


def copy(spark: SparkSession, source: Source, columns: Columns, to: Queue, folder: Path, **options: Any) -> int:
    """Copy what is there; return how many rows."""
    options = {"sink_id": "copy", "slots": 2, "checkpoint_dir": str(folder / "checkpoint"), **options}
    enqueuer = Enqueuer(
        spark, source, columns, to.name, is_continuous=False, bootstrap_servers=to.bootstrap_servers, **options
    )
    enqueuer.run()
    return enqueuer.rows


def test_rows_of_a_delta_table_become_json_messages_once(spark: SparkSession, queue: Queue, tmp_path: Path) -> None:
    table = str(tmp_path / "jobs")
    spark.sql("select 1 as id, 'anna' as customer, true as extra").write.format("delta").save(table)
    source, columns = Source("delta", table), Columns(chosen=("id", "customer"), key="id")
    assert copy(spark, source, columns, queue, tmp_path) == 1
    assert copy(spark, source, columns, queue, tmp_path) == 0
    spark.sql("select 2 as id, 'bert' as customer, true as extra").write.format("delta").mode("append").save(table)
    assert copy(spark, source, columns, queue, tmp_path) == 1
    found = {record.key(): json.loads(record.value()) for record in read_all(queue.bootstrap_servers, queue.name)}
    assert found == {b"1": {"id": 1, "customer": "anna"}, b"2": {"id": 2, "customer": "bert"}}


def test_change_feed_gives_inserted_and_updated_rows(spark: SparkSession, queue: Queue, tmp_path: Path) -> None:
    table = str(tmp_path / "jobs")
    spark.sql(f"create table delta.`{table}` (id int, state string) using delta "
              "tblproperties (delta.enableChangeDataFeed = true)")  # fmt: skip
    spark.sql(f"insert into delta.`{table}` values (1, 'new'), (2, 'new')")  # noqa: S608  # a folder of the test
    source = Source("delta", table, changes=True)
    assert copy(spark, source, Columns(), queue, tmp_path) == 2
    spark.sql(f"update delta.`{table}` set state = 'done' where id = 1")  # noqa: S608  # as above
    spark.sql(f"delete from delta.`{table}` where id = 2")  # noqa: S608  # as above
    assert copy(spark, source, Columns(), queue, tmp_path) == 1
    assert sorted(seen(queue)) == [
        b'{"id":1,"state":"done"}', b'{"id":1,"state":"new"}', b'{"id":2,"state":"new"}',
    ]  # fmt: skip


def test_topic_is_copied_with_keys_and_values_as_they_are(
    spark: SparkSession, make_queue: Callable[..., Queue], tmp_path: Path
) -> None:
    source_queue, queue = make_queue(), make_queue()
    source_queue.send("a", "b", key=b"\x00k")
    options = {"kafka.bootstrap.servers": queue.bootstrap_servers, "kafka.isolation.level": "read_committed"}
    source = Source("kafka", source_queue.name, options=options)
    assert copy(spark, source, Columns(value="value", key="key"), queue, tmp_path) == 2
    assert sorted((r.key(), r.value()) for r in read_all(queue.bootstrap_servers, queue.name)) == [
        (b"\x00k", b"a"), (b"\x00k", b"b"),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["json", "csv", "text"])
def test_files_are_copied(spark: SparkSession, queue: Queue, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "1").write_text({"json": '{"a": "x"}\n', "csv": "a\nx\n", "text": "x\n"}[kind])
    columns = Columns(value="value") if kind == "text" else Columns()
    assert copy(spark, Source(kind, str(folder)), columns, queue, tmp_path) == 1
    assert seen(queue) == [b"x" if kind == "text" else b'{"a":"x"}']


def test_missing_column_is_reported_with_those_that_there_are(
    spark: SparkSession, queue: Queue, tmp_path: Path
) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "1").write_text("x\n")
    with pytest.raises(ConfigError, match="source has no column 'valeu': got value; name one of these"):
        copy(spark, Source("text", str(tmp_path / "files")), Columns(value="valeu"), queue, tmp_path)


def test_refused_batch_is_reported_in_our_words(spark: SparkSession, queue: Queue, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "1").write_text("x" * 2_000_000)
    with pytest.raises(SinkError, match=r"^1 row\(s\) cannot be sent .* larger than max_message_bytes"):
        copy(spark, Source("text", str(tmp_path / "files")), Columns(value="value"), queue, tmp_path)
    assert seen(queue) == []


def test_row_that_is_too_large_goes_to_the_dead_letter_topic_where_asked(
    spark: SparkSession, queue: Queue, tmp_path: Path
) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "1").write_text("x" * 2_000_000 + "\nsmall\n")
    source = Source("text", str(tmp_path / "files"))
    assert copy(spark, source, Columns(value="value"), queue, tmp_path, oversize="dead-letter") == 2
    assert seen(queue) == [b"small"]
    assert len(read_all(queue.bootstrap_servers, f"{queue.name}.dlq")) == 1


def test_missing_queue_is_reported_at_once(spark: SparkSession, bootstrap_servers: str, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "1").write_text("x\n")
    with pytest.raises(TopicError, match="run `kmq queue create not-there`"):
        copy(
            spark, Source("text", str(tmp_path / "files")), Columns(value="value"),
            Queue("not-there", bootstrap_servers), tmp_path,
        )  # fmt: skip


def test_query_that_fails_is_started_again_up_to_the_limit(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker is away; the first start of the tracker's query fails likewise."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "1").write_text("x\n")
    nowhere = Queue("not-there", "127.0.0.1:1")
    with pytest.raises(KmqError, match=r"failed 2 times in a row: got KafkaClientError: .*no row is lost or sent"):
        copy(
            spark, Source("text", str(tmp_path / "files")), Columns(value="value"), nowhere, tmp_path,
            restart_limit=1, timeout=0.5,
        )  # fmt: skip
    assert [record.action for record in caplog.records if hasattr(record, "action")].count("restart") == 1


@pytest.mark.slow
def test_command_goes_on_after_a_failed_query_and_writes_every_row_once(queue: Queue, tmp_path: Path) -> None:
    """A Python worker dies; in local mode one failed task fails the query."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "1.txt").write_text("".join(f"{number}\n" for number in range(100)))
    once = tmp_path / "once"
    command = start(
        queue.bootstrap_servers, "enqueue", queue.name, "--from", f"text:{tmp_path / 'files'}", "--value", "value",
        "--sink-id", "copy", "--checkpoint-dir", str(tmp_path / "checkpoint"), "--trigger", "available-now",
        env={**os.environ, VARIABLE: "sink.rows-sent", ONCE_VARIABLE: str(once)},
    )  # fmt: skip
    _, output = command.communicate(timeout=ENDS_S)
    assert (command.returncode, once.exists()) == (0, True), output
    assert f"starting again in {FIRST_BACKOFF_S:g} s (1 of 20)".encode() in output
    assert sorted(map(int, seen(queue))) == list(range(100))


@pytest.mark.parametrize("text", ["", "delta", "delta:", "mysql:x", "/data"])
def test_source_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"source is not allowed: got .*, kind:place with one of delta"):
        Source.parse(text)


def test_change_feed_of_files_is_refused() -> None:
    with pytest.raises(ConfigError, match="source has no change feed: got 'json:x'"):
        Source.parse("json:x", changes=True)


@pytest.mark.slow
def test_command_copies_what_is_there_and_goes_on_with_the_next_run(queue: Queue, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    for number, written in ((1, b"1 rows enqueued"), (2, b"1 rows enqueued"), (3, b"0 rows enqueued")):
        if number < 3:
            (tmp_path / "files" / f"{number}.json").write_text(json.dumps({"id": number, "extra": True}))
        command = start(
            queue.bootstrap_servers, "enqueue", queue.name, "--from", f"json:{tmp_path / 'files'}", "--columns", "id",
            "--sink-id", "copy", "--checkpoint-dir", str(tmp_path / "checkpoint"), "--trigger", "available-now",
        )  # fmt: skip
        _, output = command.communicate(timeout=ENDS_S)
        assert (command.returncode, written in output) == (0, True), output
    assert seen(queue) == [b'{"id":1}', b'{"id":2}']
