"""Spark to a queue, exactly once: batch jobs, streaming queries that are repeated, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F  # noqa: N812  # the field's name for it

from kmq_spark.errors import ConfigError, SinkError, TopicError
from kmq_spark.sink import exactly_once_sink, write_queue
from tests.kafka.conftest import Queue, read_all, seen, sender_of
from tests.kafka.operator.test_commands import kmq

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.kafka]


def write(frame: DataFrame, to: Queue, /, run_id: str = "1", **options: Any) -> Any:  # noqa: ANN401  # passed through
    """Write a frame with a column `v`."""
    options = {"sink_id": "jobs", "value": "v", "slots": 3, **options}
    return write_queue(frame, to.name, run_id=run_id, bootstrap_servers=to.bootstrap_servers, **options)


def numbers(spark: SparkSession, count: int) -> DataFrame:
    """Return a frame with the texts 0, 1, 2 and so on."""
    return spark.range(count).select(F.col("id").cast("string").alias("v"))


def test_batch_job_writes_every_row_once_and_a_repeated_run_nothing(spark: SparkSession, queue: Queue) -> None:
    """Equal rows are messages of their own, also where they are more than a transaction takes."""
    frame = numbers(spark, 1_000).union(spark.range(150).select(F.lit("same").alias("v")))
    first = write(frame, queue, rows_per_transaction=100)
    assert (first.rows, first.written, first.skipped) == (1_150, 1_150, 0)
    again = write(frame.repartition(7), queue, rows_per_transaction=77)
    assert (again.rows, again.written, again.skipped) == (1_150, 0, 1_150)
    assert Counter(seen(queue)) == {b"same": 150, **{b"%d" % number: 1 for number in range(1_000)}}
    assert write(frame, queue, run_id="2").written == 1_150
    assert Counter(Counter(seen(queue)).values()) == {2: 1_000, 300: 1}


def test_columns_become_key_headers_logical_queue_delay_and_ttl(spark: SparkSession, queue: Queue) -> None:
    frame = spark.createDataFrame(
        [("a", b"k", {"x": "1", "b": None}, "emails", 1.5, 60), ("b", None, None, None, None, None)],
        "v string, k binary, h map<string,string>, q string, d double, t int",
    )
    write(frame, queue, key="k", headers="h", logical_queue="q", delay="d", ttl=F.col("t"))
    records = {record.value(): record for record in read_all(queue.bootstrap_servers, queue.name)}
    assert records[b"a"].key() == b"k"
    headers = records[b"a"].headers()
    assert headers[:2] == [("b", None), ("x", b"1")]
    assert {("kmq-logical-queue", b"emails"), ("kmq-delay-ms", b"1500"), ("kmq-ttl-ms", b"60000")} <= set(headers)
    names = {name for name, _ in records[b"b"].headers()}
    assert (records[b"b"].key(), names) == (None, {"kmq-producer", "kmq-generation", "kmq-sequence"})


def test_slots_are_listed_as_producers_and_number_their_messages(spark: SparkSession, queue: Queue) -> None:
    write(numbers(spark, 300), queue)
    listed = json.loads(kmq(queue.bootstrap_servers, "producer", "list", queue.name, "-o", "json").stdout)
    assert [each["id"] for each in listed] == ["jobs.slot-0", "jobs.slot-1", "jobs.slot-2"]
    senders = [sender_of(record) for record in read_all(queue.bootstrap_servers, queue.name)]
    assert sorted(senders) == sorted(f"{each['id']} 1 {n + 1}" for each in listed for n in range(each["sequence"]))


class Query:
    """A streaming query over files, a file a batch, that writes to a queue and may fail behind the sink."""

    def __init__(self, spark: SparkSession, queue: Queue, folder: Path) -> None:
        self._spark, self._queue, self._folder = spark, queue, folder
        self._files = folder / "files"
        self._files.mkdir()
        self._number = 0

    def add(self, *values: str) -> None:
        """Add a file: the next batch."""
        self._number += 1
        (self._files / f"{self._number:03}.txt").write_text("\n".join(values) + "\n")

    def run(self, fail_behind_batch: int = -1, checkpoint: str = "checkpoint", **options: Any) -> None:
        """Write what is there; fail behind the sink in one batch, before Spark takes note of it."""
        options = {"sink_id": "files", "slots": 3, "value": "value", **options}
        sink = exactly_once_sink(self._queue.name, bootstrap_servers=self._queue.bootstrap_servers, **options)

        def write_batch(batch: DataFrame, number: int) -> None:
            sink(batch, number)
            if number == fail_behind_batch:
                raise RuntimeError("boom")

        query = (
            self._spark.readStream.format("text")
            .option("maxFilesPerTrigger", 1)
            .load(str(self._files))
            .writeStream.foreachBatch(write_batch)
            .option("checkpointLocation", str(self._folder / checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()


@pytest.fixture
def query(spark: SparkSession, queue: Queue, tmp_path: Path) -> Query:
    """A query with two files."""
    made = Query(spark, queue, tmp_path)
    made.add("a", "b", "c")
    made.add("d", "e")
    return made


def test_repeated_batch_of_a_streaming_query_is_written_once(query: Query, queue: Queue) -> None:
    for _ in range(2):
        with pytest.raises(StreamingQueryException, match="boom"):
            query.run(fail_behind_batch=1)
    query.run()
    query.add("f")
    query.run()
    assert sorted(seen(queue)) == [b"a", b"b", b"c", b"d", b"e", b"f"]


def test_new_checkpoint_or_number_of_slots_is_refused_with_the_choices(query: Query, queue: Queue) -> None:
    """Batch numbers begin at 0 again: comparing them would skip rows in silence."""
    query.run()
    query.add("f")
    with pytest.raises(StreamingQueryException, match=r"by another query.*continue_from_batch.*another sink_id"):
        query.run(checkpoint="new")
    with pytest.raises(StreamingQueryException, match=r"number of slots of slot \d of sink files .*: got 4, it has 3"):
        query.run(slots=4)
    assert len(seen(queue)) == 5
    query.run(checkpoint="newer", continue_from_batch=2)
    query.add("g")
    query.run(checkpoint="newer", continue_from_batch=2)
    assert sorted(seen(queue)) == [b"a", b"b", b"c", b"d", b"e", b"f", b"g"]


def test_older_copy_of_a_checkpoint_is_refused(query: Query, queue: Queue, tmp_path: Path) -> None:
    """The source is rewound: its next batches have numbers that the slots have committed."""
    query.run()
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "older")
    for value in ("f", "g"):
        query.add(value)
        query.run()
    with pytest.raises(StreamingQueryException, match=r"is ahead of the query: got batch 2, it has committed batch 3"):
        query.run(checkpoint="older")
    query.run()
    assert sorted(seen(queue)) == [b"a", b"b", b"c", b"d", b"e", b"f", b"g"]


def test_batch_that_comes_again_with_other_rows_is_refused(query: Query, queue: Queue) -> None:
    """As with the time of the attempt in a column."""
    first, second = (F.concat("value", F.lit(text)) for text in (" 06:11", " 06:12"))
    with pytest.raises(StreamingQueryException, match="boom"):
        query.run(fail_behind_batch=0, value=first, slots=1)
    with pytest.raises(StreamingQueryException, match=r"batch 0 came again with other rows .* make the query determ"):
        query.run(value=second, slots=1)
    assert {value.partition(b" ")[2] for value in seen(queue)} == {b"06:11"}


def test_frame_that_does_not_fit_is_refused(spark: SparkSession, queue: Queue) -> None:
    frames: list[tuple[str, dict[str, Any], str]] = [
        ("'x' as other", {}, "frame has no column 'v' for value: got other"),
        ("1 as v", {}, r"column of value has the wrong type: got IntegerType\(\), binary or string; use to_json"),
        ("'x' as v, 'soon' as d", {"delay": "d"}, "column of delay has the wrong type"),
        ("'x' as v", {"sink_id": "a.slot-1"}, "producer name is reserved"),
        ("'x' as v", {"run_id": ""}, "run_id is not allowed"),
    ]
    for columns, options, message in frames:
        with pytest.raises(ConfigError, match=message):
            write(spark.sql(f"select {columns}"), queue, **options)
    assert seen(queue) == []


def test_batch_with_a_row_that_cannot_be_sent_is_refused_before_anything_is_written(
    spark: SparkSession, queue: Queue
) -> None:
    batches: list[tuple[str, dict[str, Any], str]] = [
        ("if(id = 3, null, 'x') as v", {}, r"1 row\(s\) cannot be sent to .*: value is null"),
        (
            "if(id = 3, repeat('x', 2000000), 'x') as v", {},
            "larger than max_message_bytes 1048576: got one of 2000064 bytes, key None, value b'xxx",
        ),
        ("'x' as v, if(id = 3, 'a b', null) as q", {"logical_queue": "q"}, "logical queue is not 1 to 200 of"),
        ("'x' as v, if(id = 3, 0.0, null) as t", {"ttl": "t"}, "ttl is not more than 0"),
        ("'x' as v, map('kmq-origin', 'x') as h", {"headers": "h"}, "header name is null or begins with kmq-"),
    ]  # fmt: skip
    for columns, options, message in batches:
        with pytest.raises(SinkError, match=message):
            write(spark.sql(f"select {columns} from range(10)"), queue, **options)  # noqa: S608  # the table above
    assert seen(queue) == []


def test_missing_queue_is_reported_with_the_command(spark: SparkSession, bootstrap_servers: str) -> None:
    with pytest.raises(TopicError, match="run `kmq queue create not-there`"):
        write(numbers(spark, 1), Queue("not-there", bootstrap_servers))


def test_files_become_messages_as_the_document_shows(spark: SparkSession, queue: Queue, tmp_path: Path) -> None:
    """The code of docs/producing.md: files of JSON, with an explicit schema."""
    text = (Path(__file__).parents[3] / "docs" / "producing.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "readStream.schema" in block]
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "1.json").write_text(
        '{"what": "mail", "id": 7, "customer": "anna", "unknown": 1}\n{"id": 8, "customer": "bert"}\n'
    )
    for written, own in (
        ("/data/jobs", f"{tmp_path}/jobs"), ("checkpoints/jobs", f"{tmp_path}/checkpoint"),
        ("localhost:9092", queue.bootstrap_servers), ('"orders"', repr(queue.name)),
    ):  # fmt: skip
        assert written in code
        code = code.replace(written, own)
    names: dict[str, Any] = {"spark": spark, "exactly_once_sink": exactly_once_sink}
    exec(code.replace(".start()", ".start().awaitTermination()"), names)  # noqa: S102  # of the document
    assert {record.key(): record.value() for record in read_all(queue.bootstrap_servers, queue.name)} == {
        b"anna": b'{"id":7,"customer":"anna","what":"mail"}', b"bert": b'{"id":8,"customer":"bert"}',
    }  # fmt: skip


def test_frame_that_is_no_batch_of_a_query_is_refused(spark: SparkSession, queue: Queue) -> None:
    sink: Callable[..., None] = exactly_once_sink(
        queue.name, sink_id="x", value="v", bootstrap_servers=queue.bootstrap_servers
    )
    with pytest.raises(SinkError, match="frame is no batch of a streaming query"):
        sink(numbers(spark, 1), 0)
