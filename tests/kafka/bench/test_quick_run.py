"""The benchmarks run: no figure is judged here, `make bench-guard` does that."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.run import PARTS

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(2700)]

ROOT = Path(__file__).resolve().parents[3]
LONGEST_S = 2400
WRITTEN = ["README.md", "performance.md", "results.json"]


def test_every_part_of_the_benchmarks_runs_to_its_end() -> None:
    """With small sizes, into a folder of their own; what is stored of the last real run stays."""
    stored = (ROOT / "bench" / "results.json").read_bytes()
    done = subprocess.run(
        [sys.executable, "-m", "bench.run", "--quick"],
        capture_output=True, text=True, check=False, timeout=LONGEST_S, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [name for name in PARTS if not re.search(rf"  {name}, \d+ s: \{{", done.stderr)] == []
    written = re.search(r"^written to (.+)$", done.stderr, re.MULTILINE)
    assert written is not None
    folder = Path(written[1])
    try:
        assert sorted(file.name for file in folder.iterdir()) == WRITTEN
    finally:
        shutil.rmtree(folder)
    assert (ROOT / "bench" / "results.json").read_bytes() == stored
