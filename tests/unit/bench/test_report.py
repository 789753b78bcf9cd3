"""The figures in the pages are those of bench/results.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.ratios import ratios
from bench.report import with_figures, with_summary

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "performance.md").read_text("utf-8")
README = (ROOT / "README.md").read_text("utf-8")
RESULTS: dict[str, Any] = json.loads((ROOT / "bench" / "results.json").read_text("utf-8"))


def test_figures_of_the_page_are_the_stored_ones() -> None:
    assert with_figures(PAGE, RESULTS) == PAGE, "run .venv/bin/python -m bench.run --render"


def test_figures_of_the_readme_are_the_stored_ones() -> None:
    assert with_summary(README, RESULTS) == README, "run .venv/bin/python -m bench.run --render"


def test_stored_ratios_are_those_of_the_stored_medians() -> None:
    assert ratios(RESULTS["throughput"]) == RESULTS["ratios"]
