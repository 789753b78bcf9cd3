"""Evidence of a fault campaign: what is kept is what is judged, and nothing that fails there ends the campaign."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faults.checker import Verdict, Violation
from faults.clocks import Epoch, MovableClock
from faults.conservation import Status
from faults.evidence import FACTS, RECORDS, RawRecord, RecordFile, keep_rest, read_records
from faults.judge import judge, main
from tests.unit.fault_seeds_1_to_6 import dead_letter_without_a_cause
from tests.unit.fault_story import QUEUE, Story

if TYPE_CHECKING:
    from pathlib import Path

TOPICS = ["q.markers", "q", "q.dlq"]

RAW = st.builds(
    RawRecord,
    topic=st.sampled_from(TOPICS),
    partition=st.integers(0, 9),
    offset=st.integers(0, 2**62),
    timestamp_type=st.integers(0, 2),
    timestamp_ms=st.integers(-1, 2**42),
    key=st.none() | st.binary(),
    value=st.none() | st.binary(),
    headers=st.lists(st.tuples(st.text(), st.none() | st.binary())).map(tuple),
)


@given(record=RAW)
def test_line_holds_the_record(record: RawRecord) -> None:
    """Bytes, absent values and headers that repeat come back as they were."""
    assert RawRecord.from_line(record.to_line()) == record


def keep(story: Story, source: Path, target: Path, **more: Any) -> None:
    """Write a story as the evidence of a stage."""
    kept = RecordFile(target / RECORDS)
    for record in story.records():
        kept.keep(record)
    kept.close()
    (source / "all.events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in story.events))
    (source / "worker.log").write_text("all is well\n")
    status = Status.of(story.status().to_dict())
    facts = {
        "queue": QUEUE,
        "max_deliveries": 2,
        "is_drained": True,
        "injections": 1,
        "injected_markers": [],
        "hostile_markers": [],
        "sessions": story.sessions,
        "reported": {0: (0, status._asdict())},
        "bounds": asdict(story.bounds),
        "clock_epochs": None,
        "failures": [],
        "processes": [
            {"kind": "WorkerChild", "log": "worker.log", "exit_code": 0, "is_ended_by_us": False, "ended_at_ms": None}
        ],
        **more,
    }
    keep_rest(target, source, facts, {})


def broken_story() -> Story:
    """Return a story with a dead letter without a cause in it."""
    story = Story()
    dead_letter_without_a_cause(story)
    return story


@pytest.mark.parametrize("story", [Story(), broken_story()], ids=["right", "broken"])
def test_kept_evidence_is_judged_as_the_run_was(story: Story, tmp_path: Path) -> None:
    """The verdict that is made again is the one of the run: violations, waits and counts."""
    (tmp_path / "stage").mkdir()
    keep(story, tmp_path / "stage", tmp_path / "kept" / "stage")
    verdict: Verdict = story.verdict()
    assert judge(tmp_path / "kept" / "stage") == verdict
    assert main([str(tmp_path / "kept")]) == bool(verdict.violations)


def test_failures_of_the_run_are_violations_again(tmp_path: Path) -> None:
    """What the scenario itself saw counts as it did."""
    keep(Story(), tmp_path, tmp_path / "kept", failures=["I9: 3 messages are open", "the tracker ended"])
    expected = [Violation("I9", "3 messages are open"), Violation("harness", "the tracker ended")]
    assert judge(tmp_path / "kept").violations == expected


def test_moved_clock_is_corrected_again(tmp_path: Path) -> None:
    """True times are made from how far the clock was ahead, and since when: a redelivery by a step is no early one."""
    keep(Story(), tmp_path, tmp_path / "kept", clock_epochs=[Epoch(0, 0), Epoch(5_000, 1_000)])
    assert judge(tmp_path / "kept").counts["due_by_a_step_ahead"] == 2
    assert MovableClock.moved([Epoch(0, 0), Epoch(5_000, 1_000)]).true_times_ms([1_000, 6_100]) == [1_000, 5_100]


def test_evidence_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    """A file where a folder should be, facts that are no JSON: the campaign continues."""
    (tmp_path / "file").write_text("")
    kept = RecordFile(tmp_path / "file" / RECORDS)
    kept.keep(RawRecord("q", 0, 0, 2, 1, None, None))
    kept.close()
    keep_rest(tmp_path / "file", tmp_path, {}, {})
    keep_rest(tmp_path / "kept", tmp_path, {"key that is no text": {(1, 2): 3}}, {})
    broken = RecordFile(tmp_path / RECORDS)
    for headers in ((("bad", "text"),), ()):
        broken.keep(RawRecord("q", 0, 0, 2, 1, None, None, headers))  # type: ignore[arg-type]  # as a client might
    broken.close()
    assert list(read_records(tmp_path / "none")) == []


def test_folder_without_evidence_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong folder is not a verdict."""
    assert main([str(tmp_path)]) == 2
    assert "no evidence" in capsys.readouterr().err
    assert not (tmp_path / FACTS).exists()
