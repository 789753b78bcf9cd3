"""
A process that writes numbered rows of files to a queue, by a streaming query that ends when all are written.

    python -m faults.sink_writer '{"bootstrap_servers": …, "queue": …, "rows": …, "checkpoint": …}'

It prints events: `began` when the query runs, `ended` when it is over.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pyspark.sql import functions as F  # noqa: N812  # the field's name for it

from faults.events import EventFile
from kmq_spark.local.jars import jar_paths
from kmq_spark.sink import exactly_once_sink
from kmq_spark.spark.session import build_session, session_settings

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


def main(text: str) -> None:
    """Write every row that is not written yet."""
    options: dict[str, Any] = json.loads(text)
    events, settings = EventFile.of_this_process(), session_settings(jar_paths("spark"), "1g") | SETTINGS
    spark = build_session("kmq-faults-sink", master=CLUSTER, settings=settings)
    frame = spark.readStream.format("text").option("maxFilesPerTrigger", "1").load(options["rows"])
    sink = exactly_once_sink(
        options["queue"],
        sink_id="rows",
        value="value",
        key=F.substring("value", 1, 8),
        bootstrap_servers=options["bootstrap_servers"],
        slots=SLOTS,
        rows_per_transaction=ROWS_PER_TRANSACTION,
    )
    writer = frame.writeStream.foreachBatch(sink).option("checkpointLocation", options["checkpoint"])
    query = writer.trigger(availableNow=True).start()
    events.write("began")
    query.awaitTermination()
    events.write("ended")
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
