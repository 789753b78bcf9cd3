"""The shape of the code: what a module may import, and what each file says of itself."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(
    path
    for folder in ("kmq_spark", "jobs", "tests")
    for path in (ROOT / folder).rglob("*.py")
    if not path.name.endswith("_pb2.py")
)
CORE = sorted((ROOT / "kmq_spark" / "core").rglob("*.py"))

HEAVY = ("pyspark", "pandas", "pyarrow", "confluent_kafka", "delta")
IMPURE = {"logging", "time", "datetime", "os", "socket", "threading", "random", "pathlib", "subprocess"}


def name_of(path: Path) -> str:
    """Return a path as the reader knows it."""
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize(
    "module",
    [
        "kmq_spark",
        "kmq_spark.errors",
        "kmq_spark.core.fold",
        "kmq_spark.wire.codec",
        "kmq_spark.ledger",
    ],
)
def test_import_loads_neither_spark_nor_a_kafka_client(module: str) -> None:
    """In a fresh interpreter: a producer must not pay for Spark, nor a test of the rules for either."""
    program = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", CORE, ids=name_of)
def test_core_has_no_clock_no_log_and_no_input_or_output(path: Path) -> None:
    """The rules are a function of their arguments."""
    imported, called = set(), set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and [alias.name for alias in node.names] != ["timedelta"]:  # no clock
            imported.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.add(node.func.id)
    assert not imported & IMPURE
    assert not called & {"print", "open", "input"}


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_file_states_what_it_is_for(path: Path) -> None:
    """A docstring at its head, and postponed annotations where there is code."""
    tree = ast.parse(path.read_text("utf-8"))
    if not tree.body:
        return
    assert ast.get_docstring(tree)
    has_code = len(tree.body) > 1
    assert not has_code or "from __future__ import annotations" in path.read_text("utf-8")


def test_no_long_running_process_asks_the_coordinator_of_a_group_by_the_admin_client() -> None:
    """Such a request may abort the process when the connection breaks (issue 4605 of librdkafka)."""
    calls = {"list_consumer_group_offsets", "alter_consumer_group_offsets", "describe_consumer_groups"}
    found = {
        path.name
        for path in (ROOT / "kmq_spark").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in calls
    }
    assert found == {"cluster.py"}  # `kmq doctor` and `kmq queue describe`, which look once
