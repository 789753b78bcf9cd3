"""
Copy rows into a queue under `spark-submit` or as a Databricks job: `kmq enqueue`, whose arguments it takes.

    ./spark-submit.sh jobs/enqueue.py orders --from delta:/data/jobs --sink-id jobs --checkpoint-dir checkpoints/jobs
"""

from __future__ import annotations

from kmq_spark.cli.enqueue import run_submitted

if __name__ == "__main__":
    run_submitted()
