"""
Write the ledger under `spark-submit`. Takes the arguments of `kmq ledger run`.

    ./spark-submit.sh jobs/ledger.py --config conf/local.toml --once orders
"""

from __future__ import annotations

import sys

from kmq_spark.cli.main import app

if __name__ == "__main__":
    app(["ledger", "run", *sys.argv[1:]])
