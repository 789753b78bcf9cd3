"""
A Spark job that sends the rows of JSON files to a queue, each once, however often it dies and is run again.

    pip install 'kmq-spark[spark]'
    python enqueue_from_spark.py jobs localhost:9092 /data/jobs /data/checkpoint      # or spark-submit

It ends when all files that are there are sent. Run it again when there are new ones. On a cluster, PYSPARK_PYTHON names
a Python of the executors that has kmq-spark.
"""

from __future__ import annotations

import os
import sys

from pyspark.sql import SparkSession

from kmq_spark.sink import exactly_once_sink


def enqueue(queue: str, servers: str, folder: str, checkpoint: str) -> None:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = SparkSession.builder.appName("enqueue").getOrCreate()
    rows = spark.readStream.schema("customer string, what string, urgent boolean").json(folder)
    jobs = rows.selectExpr("customer", "to_json(struct(*)) AS payload", "if(urgent, 0, 60) AS wait_s")
    sink = exactly_once_sink(
        queue, sink_id="jobs", bootstrap_servers=servers, value="payload", key="customer", delay="wait_s"
    )
    stream = jobs.writeStream.foreachBatch(sink).option("checkpointLocation", checkpoint)
    stream.trigger(availableNow=True).start().awaitTermination()


if __name__ == "__main__":
    enqueue(*sys.argv[1:])
