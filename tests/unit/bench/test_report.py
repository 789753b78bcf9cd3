"""The figures in the pages are those of bench/results.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.ratios import ratios
from bench.report import BEGIN, END, with_figures, with_summary

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


def test_only_what_lies_between_the_two_lines_is_replaced() -> None:
    page = with_figures(f"before\n{BEGIN}\na stale figure\n{END}\nafter\n", RESULTS)
    assert page.startswith(f"before\n{BEGIN}\n")
    assert page.endswith(f"{END}\nafter\n")
    assert "stale" not in page


@pytest.mark.parametrize("page", ["no line", f"{BEGIN} the last line is missing", f"{END} {BEGIN}"])
def test_a_page_without_a_place_for_the_figures_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="no place for the figures"):
        with_figures(page, RESULTS)


def test_cpu_is_shown_by_class_and_a_missing_class_is_a_dash() -> None:
    cpu = {
        "share": {"client": 1.1, "broker": 0.6, "sum": 1.7},
        "batch": {"client": 0.8, "broker": 0.2, "spark": 0.4, "workers": 0.1, "sum": 1.5},
    }
    case = RESULTS["throughput"][0] | {"cpu_us_per_message": cpu}
    page = with_figures(PAGE, RESULTS | {"throughput": [case], "ratios": {}})
    assert "| share consumer, explicit | 1.10 | 0.60 | \N{EN DASH} | \N{EN DASH} | 1.70 |" in page
    assert "| ours, one `ack()` a batch | 0.80 | 0.20 | 0.40 | 0.10 | 1.50 |" in page
