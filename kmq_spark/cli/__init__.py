"""The `kmq` command: noun, then verb, with Kafka's manners."""

from __future__ import annotations

import sys

_EXTRAS = {
    "typer": "cli", "rich": "cli", "prometheus_client": "cli", "pyspark": "spark", "py4j": "spark", "pandas": "spark",
    "pyarrow": "spark", "delta": "spark", "duckdb": "ledger", "deltalake": "ledger",
    "watchfiles": "worker",
}  # fmt: skip
"""Which extra of this package installs a module."""


def main() -> None:
    """Run `kmq`. Without a package that a command needs, the one line says which extra has it."""
    try:
        from kmq_spark.cli.main import app  # what it needs may be missing

        app(prog_name="kmq")
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in _EXTRAS:
            raise
        what = f"module {module!r} is not installed: run `pip install 'kmq-spark[{_EXTRAS[module]}]'`"
        sys.exit(f"kmq: {what}, or kmq-spark[all] for all commands")
    except KeyboardInterrupt:
        sys.exit(130)  # as a shell says it; the modules were still being loaded
