"""The report of the fault campaign: a flood of one violation does not hide another one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from faults.checker import Violation
from faults.report import FaultResult, add_rows, listed_violations, write_results

if TYPE_CHECKING:
    from pathlib import Path


def test_each_invariant_is_reported() -> None:
    violations = [Violation("I1", f"message {number} is open") for number in range(1_000)]
    violations.append(Violation("I4", "two copies"))
    assert listed_violations(violations, most=2) == [
        "I1: message 0 is open",
        "I1: message 1 is open",
        "I1: and 998 more",
        "I4: two copies",
    ]


def test_results_have_all_invariants_and_their_folder_is_made(tmp_path: Path) -> None:
    result = FaultResult("F2", "a fault")
    result.violations = [Violation("I1", "open")] * 1_000 + [Violation("I12", "not fenced")]
    write_results([result], tmp_path / "new", seed=1, machine="here")
    (fault,) = json.loads((tmp_path / "new" / "results.json").read_text())["faults"]
    assert fault["violations"] == 1_001
    assert "I12: not fenced" in fault["found"]
    assert "- F2: I12: not fenced" in (tmp_path / "new" / "results.md").read_text()


def test_row_says_by_how_much_its_bounds_were_longer(tmp_path: Path) -> None:
    """A fault of two scenarios has the larger one."""
    scenarios = [FaultResult("F4", "a", patience=1.25), FaultResult("F4", "b", patience=1.5), FaultResult("F5", "c")]
    write_results(scenarios, tmp_path, seed=9, machine="here")
    patience = [fault["patience"] for fault in json.loads((tmp_path / "results.json").read_text())["faults"]]
    assert patience == [1.5, 1.0]
    page = (tmp_path / "results.md").read_text()
    assert "| F4 | a; b | 0 | 0 | - | - | 1.5 | 9 |" in page
    assert "| F5 | c | 0 | 0 | - | - | 1 | 9 |" in page


def test_row_of_a_run_apart_replaces_the_stored_one_and_has_a_note(tmp_path: Path) -> None:
    whole, apart = tmp_path / "whole", tmp_path / "apart"
    write_results([FaultResult("F2", "a", injections=3), FaultResult("S4", "old", 5)], whole, seed=1, machine="here")
    write_results([FaultResult("S4", "new", injections=8)], apart, seed=17, machine="here")
    add_rows(whole, apart, "2026-11-23")
    total = json.loads((whole / "results.json").read_text())
    kept, added = total["faults"]
    assert (kept["id"], kept["notes"], added["what"], total["injections"]) == ("F2", [], "new", 11)
    assert added["notes"] == ["run apart from the others, 2026-11-23, seed 17"]
    assert "- S4: run apart from the others, 2026-11-23, seed 17" in (whole / "results.md").read_text()
