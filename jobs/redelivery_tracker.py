"""
Run the redelivery tracker under `spark-submit` or as a Databricks job. Takes the arguments of `kmq tracker run`.

    ./spark-submit.sh jobs/redelivery_tracker.py --config conf/local.toml orders emails
"""

from __future__ import annotations

from kmq_spark.cli.tracker import run_submitted

if __name__ == "__main__":
    run_submitted()
