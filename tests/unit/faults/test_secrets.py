"""I14: where the secret of the campaign's clients turns up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from faults.evidence import FACTS
from faults.secrets import CANARY, leaking

if TYPE_CHECKING:
    from pathlib import Path


def test_file_that_holds_the_secret_is_named(tmp_path: Path) -> None:
    """Wherever it lies; the facts hold the workers' settings and are left out."""
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "metadata").write_bytes(b"\x00" + CANARY.encode())
    (tmp_path / "tracker.log").write_text(f"cannot connect with {CANARY}\n")
    (tmp_path / "worker.log").write_text("cannot connect with ***\n")
    (tmp_path / FACTS).write_text(CANARY)
    assert list(leaking(tmp_path)) == ["checkpoint/metadata", "tracker.log"]
