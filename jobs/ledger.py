"""
Write the ledger under `spark-submit` or as a Databricks job. Takes the arguments of `kmq ledger run`.

    ./spark-submit.sh jobs/ledger.py --config conf/local.toml --once orders
"""

from __future__ import annotations

from kmq_spark.cli.ledger import run_submitted

if __name__ == "__main__":
    run_submitted()
