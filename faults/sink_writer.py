"""
A process that writes numbered rows of files to a queue, by a streaming query that ends when all are written.

    python -m faults.sink_writer '{"bootstrap_servers": …, "queue": …, "rows": …, "checkpoint": …, "kind": "ours"}'

Of the kind `ours` it uses `exactly_once_sink`, of the kind `spark` Spark's own Kafka sink. It prints one JSON object a
line: `began` when the query runs, `ended` when it is over.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812  # the field's name for it

from kmq_spark.local.jars import jar_paths
from kmq_spark.sink import exactly_once_sink
from kmq_spark.spark.session import build_session, session_settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

SLOTS = 4
ROWS_PER_TRANSACTION = 500
"""A batch is many transactions, so that a kill is likely to fall between two of them."""

CLUSTER = "local-cluster[2,1,1024]"
"""Two executors, each a process of its own with one core."""

SETTINGS = {
    "spark.executor.memory": "512m",
    "spark.sql.shuffle.partitions": str(SLOTS),
    # Two attempts of one task at a time.
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.5",
    # Killed executors must not end the query.
    "spark.deploy.maxExecutorRetries": "-1",
    "spark.task.maxFailures": "50",
    "spark.stage.maxConsecutiveAttempts": "50",
}


def _say(event: str) -> None:
    sys.stdout.write(json.dumps({"event": event}) + "\n")
    sys.stdout.flush()


def _writer(frame: DataFrame, options: dict[str, Any]) -> DataStreamWriter:
    if options["kind"] == "ours":
        return frame.writeStream.foreachBatch(
            exactly_once_sink(
                options["queue"],
                sink_id="rows",
                value="value",
                key=F.substring("value", 1, 8),
                bootstrap_servers=options["bootstrap_servers"],
                slots=SLOTS,
                rows_per_transaction=ROWS_PER_TRANSACTION,
            )
        )
    return (
        frame.repartition(SLOTS)
        .select(F.substring("value", 1, 8).alias("key"), "value")
        .writeStream.format("kafka")
        .option("kafka.bootstrap.servers", options["bootstrap_servers"])
        .option("topic", options["queue"])
    )


def main(text: str) -> None:
    """Write every row that is not written yet."""
    options: dict[str, Any] = json.loads(text)
    settings = session_settings(jar_paths("spark"), "1g") | SETTINGS
    spark = build_session("kmq-faults-sink", master=options.get("master", CLUSTER), settings=settings)
    frame = spark.readStream.format("text").option("maxFilesPerTrigger", "1").load(options["rows"])
    writer = _writer(frame, options).option("checkpointLocation", options["checkpoint"])
    query = writer.trigger(availableNow=True).start()
    _say("began")
    query.awaitTermination()
    _say("ended")
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
