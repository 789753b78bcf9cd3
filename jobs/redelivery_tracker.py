"""
Run the redelivery tracker under `spark-submit` or as a Databricks job: `kmq tracker run`, whose arguments it takes.

    ./spark-submit.sh jobs/redelivery_tracker.py --config conf/local.toml orders emails
"""

from __future__ import annotations

from kmq_spark.cli.tracker import run_submitted

if __name__ == "__main__":
    run_submitted()
