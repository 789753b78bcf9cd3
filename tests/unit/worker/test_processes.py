"""Handler processes without a queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kmq_spark.errors import KmqError
from kmq_spark.worker import processes
from kmq_spark.worker.child import Start
from tests.limits import COMES_S

if TYPE_CHECKING:
    from pathlib import Path


def test_process_that_dies_in_each_start_ends_the_run_after_ten(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before any was ready, and whatever it prints."""
    monkeypatch.setattr(processes, "LONGEST_PAUSE_S", 0.01)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "dying_at_once.py").write_text("import os; print('x' * 1_000_000, flush=True); os._exit(7)\n")
    handlers = processes.HandlerProcesses(Start("dying_at_once:handle", False, 20, None), 1, 600)  # noqa: FBT003  # a tuple
    handlers.start()
    with pytest.raises(KmqError, match="ended with exit code 7 in its start, 10 times; see their output"):
        handlers.wait_ready(COMES_S)
    assert "exit code 7" in handlers.health()
    handlers.close()
    assert capfd.readouterr().out.count("x") == 10_000_000
