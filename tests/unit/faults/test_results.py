"""The results of the fault campaign: a row for each fault, and a flood of one violation does not hide another one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from faults.campaign import Pace
from faults.evidence import Violation
from faults.run import Result, listed, write_results
from faults.stage import Judged

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from faults.campaign import Campaign


def test_each_invariant_is_listed() -> None:
    violations = [Violation("I1", f"message {number} is open") for number in range(1_000)]
    assert listed([*violations, Violation("I4", "two copies")], most=2) == [
        "I1: message 0 is open",
        "I1: message 1 is open",
        "I1: and 998 more",
        "I4: two copies",
    ]


def test_pace_is_the_mean_of_a_time_within_its_bounds() -> None:
    pace = Pace(1.0)
    pace._seen = [(0.0, 0.5), (10.0, 1.2), (11.0, 2.0), (12.0, 9.0)]
    # (1.2 + 2 + 9) / 3 = 4.07, at most 3; (0.5 + 1.2 + 2 + 9) / 4 = 3.18; behind the last look its own value counts
    assert [pace.since(at_s) for at_s in (0.0, 10.0, 20.0)] == [3.0, 3.0, 3.0]
    pace._seen = [(0.0, 0.5), (10.0, 1.2), (11.0, 2.0)]
    # the mean of the last two is 1.6, that of all three 1.23
    assert [pace.since(at_s) for at_s in (10.0, 0.0)] == [1.6, 1.23]
    pace._seen = [(0.0, 0.5)]
    assert pace.since(0.0) == 1.0


class _NoCampaign:
    """As much of a campaign as a result needs."""

    pace = Pace(1.5)

    def end_stages(self) -> None:
        """Nothing runs."""


def test_row_adds_up_the_scenarios_of_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that breaks off is a violation, and so is what a scenario itself saw."""
    campaign: Campaign = _NoCampaign()  # type: ignore[assignment]  # enough of one

    def works(_campaign: Campaign) -> Judged:
        """F0: this works."""
        stage = Judged.__new__(Judged)
        stage.injections, stage.notes, stage.recovery_s, stage.protocols = 3, ["a note"], [7.04], {"classic"}
        stage.failures = ["I9: 3 messages are open", "the tracker ended"]
        return stage

    def breaks_off(_campaign: Campaign) -> None:
        """F0: this breaks off."""
        raise RuntimeError("a defect")

    monkeypatch.setattr("faults.run.logger.exception", lambda *_: None)
    result = Result("F0", seed=9)
    for scenario in (works, breaks_off):
        result.run(scenario, campaign)
    write_results([result.row()], tmp_path, "0.1,K=0.2")
    (row,) = json.loads((tmp_path / "results.json").read_text())["faults"]
    assert (row["what"], row["injections"], row["violations"], row["patience"]) == (
        "this works; this breaks off",
        3,
        3,
        1.5,
    )
    assert row["found"] == [
        "I9: 3 messages are open",
        "harness: the tracker ended",
        "harness: broke off: RuntimeError('a defect')",
    ]
    page = (tmp_path / "results.md").read_text()
    assert "| F0 | this works; this breaks off | 3 | 3 | - | 7 | 1.5 | 9 |" in page
    assert "- F0: a note" in page
