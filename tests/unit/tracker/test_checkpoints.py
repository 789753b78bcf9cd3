"""Checkpoints that cannot be read: distinguished from other failures, put aside, never deleted."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kmq_spark.errors import KafkaClientError, StateError
from kmq_spark.failpoints import EXIT_CODE, VARIABLE
from kmq_spark.kafka.positions import Position, ResumePoint
from kmq_spark.tracker.checkpoint_folder import CheckpointFolder
from kmq_spark.tracker.checkpoints import OUT_OF_DATE_MARKERS, is_damaged, is_out_of_date

if TYPE_CHECKING:
    from pathlib import Path

SIGNED = {0: Position(70_000, 50_000, "last"), 1: Position(70_000, 50_000, "last")}
"""Committed positions after the last tracker of a queue."""


def test_damaged_state_is_distinguished_from_a_lost_broker() -> None:
    outer = RuntimeError("[STREAM_FAILED] Query terminated")
    outer.__cause__ = StateError("cannot read state: checksum")
    assert is_damaged(outer)
    assert is_damaged(RuntimeError("[CANNOT_LOAD_STATE_STORE.UNCATEGORIZED] An error occurred during loading state."))
    assert not is_damaged(KafkaClientError("cannot commit a transaction: timed out", code="_TIMED_OUT", retriable=True))
    # Spark says this of a Python worker that was killed, and its checkpoint is fine.
    assert not is_damaged(RuntimeError("Python worker exited unexpectedly (crashed): java.io.EOFException"))


def test_damaged_checkpoint_is_renamed_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in (1, 2):
        folder = tmp_path / "orders"
        (folder / "state").mkdir(parents=True)
        assert CheckpointFolder(str(folder)).rename_damaged() == str(tmp_path / f"orders.damaged-{number}")
        assert not folder.exists()
        assert (tmp_path / f"orders.damaged-{number}" / "state").is_dir()
    assert len(caplog.records) == 2  # one loud line each
    assert CheckpointFolder(str(tmp_path / "orders")).rename_damaged() is None


RENAMING = (
    "import sys\n"
    "from kmq_spark.tracker.checkpoint_folder import CheckpointFolder\n"
    "CheckpointFolder(sys.argv[1]).rename_damaged()\n"
)


def test_tracker_that_dies_behind_the_renaming_begins_with_an_empty_checkpoint(tmp_path: Path) -> None:
    """Nothing of the old folder is left at its place, and the next start renames nothing more."""
    folder = tmp_path / "orders"
    (folder / "state").mkdir(parents=True)
    environment = {**os.environ, VARIABLE: "tracker.checkpoint-renamed"}
    done = subprocess.run([sys.executable, "-c", RENAMING, str(folder)], env=environment, check=False)
    assert done.returncode == EXIT_CODE
    assert [path.name for path in tmp_path.iterdir()] == ["orders.damaged-1"]
    assert CheckpointFolder(str(folder)).rename_damaged() is None


def test_checkpoint_elsewhere_is_left_to_the_operator(caplog: pytest.LogCaptureFixture) -> None:
    assert CheckpointFolder("s3://bucket/checkpoints/orders").rename_damaged() is None
    assert "move it away" in caplog.text


def test_checkpoint_knows_its_topic_and_its_tracker(tmp_path: Path) -> None:
    folder = CheckpointFolder(str(tmp_path / "orders"))
    assert folder.topic_id() == ""
    folder.write_topic_id("first")
    assert CheckpointFolder(f"file://{tmp_path}/orders").topic_id() == "first"
    assert folder.tracker_id() == ""
    for tracker_id in ("older", "newer"):
        folder.write_tracker_id(tracker_id)
        assert folder.tracker_id() == tracker_id
    assert not folder.has_batches()
    (tmp_path / "orders" / "commits").mkdir()
    (tmp_path / "orders" / "commits" / "0").write_text("v1")
    assert folder.has_batches()
    assert folder.rename_damaged()
    assert folder.topic_id() == ""


def test_checkpoint_knows_how_far_its_newest_batch_reads(tmp_path: Path) -> None:
    """Batch 10 is newer than batch 9; other files in the folder are no batches."""
    folder = CheckpointFolder(str(tmp_path / "orders"))
    assert folder.read_to() == {}
    offsets = tmp_path / "orders" / "offsets"
    offsets.mkdir(parents=True)
    for number, at in ((9, 100), (10, 250)):
        (offsets / str(number)).write_text(f'v1\n{{"batchWatermarkMs":0}}\n{{"orders.markers":{{"0":{at},"1":7}}}}')
    (offsets / ".10.crc").write_bytes(b"x")
    assert folder.read_to() == {0: 250, 1: 7}


@pytest.mark.parametrize("text", ["", "v1", "v1\n{}\n", "v1\n{}\n[1]", 'v1\n{}\n{"t":{"x":1}}', "v9\n\x00"])
def test_offsets_of_a_checkpoint_that_cannot_be_read_are_unknown(tmp_path: Path, text: str) -> None:
    offsets = tmp_path / "orders" / "offsets"
    offsets.mkdir(parents=True)
    (offsets / "0").write_text(text)
    assert CheckpointFolder(str(tmp_path / "orders")).read_to() == {}


def test_checkpoint_is_out_of_date_where_a_rebuild_reads_less() -> None:
    """Another process has tracked the queue since. Where markers were removed, the checkpoint is the only proof."""
    resume = ResumePoint(SIGNED, starting_offsets={0: 50_000, 1: 50_000}, decide_from={0: 60_000, 1: 60_000})
    margin = OUT_OF_DATE_MARKERS // 2
    for tracker_id in ("last", ""):
        assert is_out_of_date({0: 0, 1: 0}, tracker_id, resume)
        assert is_out_of_date({0: 50_000 - margin, 1: 49_999 - margin}, tracker_id, resume)
        assert not is_out_of_date({0: 50_000 - margin, 1: 50_000 - margin}, tracker_id, resume)
        assert not is_out_of_date({0: 60_000, 1: 60_000}, tracker_id, resume)
        assert not is_out_of_date({}, tracker_id, resume)
    for proof in ({"removed": {0: (0, 5)}}, {"unproven_gaps": {0: 5}}, {"has_no_position": True}):
        kept = ResumePoint(SIGNED, {0: 50_000, 1: 50_000}, {0: 60_000, 1: 60_000}, **proof)
        assert not is_out_of_date({0: 0}, "last", kept)
        assert not is_out_of_date({0: 0}, "fenced", kept)


def test_checkpoint_is_kept_where_retention_removed_a_marker_that_a_rebuild_needs() -> None:
    """Only the checkpoint knows a message in flight whose START was removed."""
    resume = ResumePoint(SIGNED, starting_offsets={0: 50_000, 1: 50_001}, decide_from={0: 60_000, 1: 60_000})
    for tracker_id in ("last", "fenced"):
        assert not is_out_of_date({0: 0, 1: 0}, tracker_id, resume, has_failed_batch=True)


def test_checkpoint_of_a_tracker_that_was_fenced_is_out_of_date_unless_a_rebuild_reads_much_more() -> None:
    """Its last batch was not committed, and would run again first."""
    resume = ResumePoint(SIGNED, starting_offsets={0: 50_000, 1: 50_000}, decide_from={0: 90_000, 1: 90_000})
    margin = OUT_OF_DATE_MARKERS // 2
    assert is_out_of_date({0: 50_000 + margin, 1: 49_999 + margin}, "fenced", resume)
    assert not is_out_of_date({0: 50_000 + margin, 1: 50_000 + margin}, "fenced", resume)
    assert not is_out_of_date({0: 50_000 + margin, 1: 49_999 + margin}, "last", resume)
    assert not is_out_of_date({}, "fenced", resume)
    # The same for the last tracker itself, once its query has failed.
    assert is_out_of_date({0: 50_000 + margin, 1: 49_999 + margin}, "last", resume, has_failed_batch=True)
    assert not is_out_of_date({0: 50_000 + margin, 1: 50_000 + margin}, "last", resume, has_failed_batch=True)


def test_checkpoint_knows_whether_its_newest_batch_was_committed(tmp_path: Path) -> None:
    folder = CheckpointFolder(str(tmp_path / "orders"))
    assert not folder.has_failed_batch()
    for log, number, has_failed in (("offsets", 9, True), ("commits", 9, False), ("offsets", 10, True)):
        (tmp_path / "orders" / log).mkdir(parents=True, exist_ok=True)
        (tmp_path / "orders" / log / str(number)).write_text("v1")
        assert folder.has_failed_batch() == has_failed
    assert not CheckpointFolder("s3://bucket/checkpoints/orders").has_failed_batch()


def test_checkpoint_that_is_out_of_date_is_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = CheckpointFolder(str(tmp_path / "orders"))
    folder.write_topic_id("first")
    folder.remove()
    assert list(tmp_path.iterdir()) == []
    folder.remove()
    assert "cannot delete checkpoint" in caplog.text
