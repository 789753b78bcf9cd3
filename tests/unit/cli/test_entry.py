"""The command `kmq` where not all of its packages are installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT = """
import importlib.abc, sys

missing = sys.argv[1]

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from kmq_spark.cli import main
sys.argv[:] = ["kmq", *sys.argv[2:]]
main()
"""


@pytest.mark.parametrize(
    ("module", "command", "extra"),
    [
        ("typer", ["--help"], "cli"),
        ("pyspark", ["demo"], "spark"),
        ("duckdb", ["ledger", "show", "deliveries"], "ledger"),
        ("watchfiles", ["worker", "shop:handle", "orders", "--reload"], "worker"),
    ],
)
def test_package_that_is_missing_is_one_line_with_its_extra(module: str, command: list[str], extra: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, module, *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"pip install 'kmq-spark[{extra}]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_ctrl_c_while_modules_load_ends_without_a_stack() -> None:
    interrupted = WITHOUT.replace("ModuleNotFoundError", "KeyboardInterrupt").replace(", name=name", "")
    done = subprocess.run(
        [sys.executable, "-c", interrupted, "typer", "--help"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, "")
