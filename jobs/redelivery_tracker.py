"""
Run the redelivery tracker under `spark-submit`. Takes the arguments of `kmq tracker run`.

    ./spark-submit.sh jobs/redelivery_tracker.py --config conf/local.toml orders
"""

from __future__ import annotations

import sys

from kmq_spark.cli.main import app

if __name__ == "__main__":
    app(["tracker", "run", *sys.argv[1:]])
