"""Every crash point is crossed by a test, in the quick tiers or in the slow one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from kmq_spark.failpoints import FAILPOINTS
from tests.crossings import REPORT_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")


def test_every_crash_point_is_crossed_by_a_test(tmp_path: Path) -> None:
    """The list is walked; a test that says that it crosses a point fails where the point does not fire in it."""
    report = tmp_path / "crossings.json"
    files = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.crosses" in path.read_text("utf-8") and path != Path(__file__)
    ]
    command = [*PYTEST, "--collect-only", "-p", "tests.crossings", *files]
    environment = {**os.environ, REPORT_VARIABLE: str(report)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    crossed: dict[str, str] = json.loads(report.read_text())
    assert sorted(set(FAILPOINTS) - set(crossed)) == []
    assert sorted(set(crossed) - set(FAILPOINTS)) == []


PROGRAM = """
import pytest
from kmq_spark.failpoints import EXIT_CODE
import os, subprocess, sys

def passed(point):
    program = f"from kmq_spark.failpoints import failpoint; failpoint({point!r})"
    environment = {**os.environ, "KMQ_FAILPOINT": "tracker.batch"}
    return subprocess.run([sys.executable, "-c", program], env=environment).returncode

@pytest.mark.crosses("tracker.batch")
def test_right():
    assert passed("tracker.batch") == EXIT_CODE

@pytest.mark.crosses("tracker.batch")
def test_wrong():
    assert passed("tracker.committed") == 0
"""


def test_test_whose_point_does_not_fire_fails(tmp_path: Path) -> None:
    """The same test with another point: it passes by itself, and fails for what it says of itself."""
    (tmp_path / "test_points.py").write_text(PROGRAM)
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text("utf-8"))
    command = [*PYTEST, "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "test_points.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "2 passed, 1 error" in done.stdout, done.stdout
    assert "crash points that did not fire: tracker.batch" in done.stdout
