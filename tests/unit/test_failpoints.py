"""Crash points: each one is real, an unknown one is refused, and an armed one ends the process there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kmq_spark.errors import ConfigError
from kmq_spark.failpoints import EXIT_CODE, FAILPOINTS, ONCE_VARIABLE, VARIABLE, _armed

PACKAGE = Path(__file__).resolve().parents[2] / "kmq_spark"

PASS_TWICE = "\n".join(  # noqa: FLY002  # a program
    (
        "from kmq_spark.failpoints import failpoint",
        "failpoint('ticker.tick-sent')",
        "failpoint('tracker.committed'); print('once', flush=True)",
        "failpoint('tracker.committed'); print('twice', flush=True)",
    )
)


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    """Run the program with an armed point."""
    return subprocess.run(
        [sys.executable, "-c", PASS_TWICE],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
        cwd=PACKAGE.parent,
    )


def test_every_point_is_passed_somewhere_and_has_a_name() -> None:
    passed = {
        name
        for path in PACKAGE.rglob("*.py")
        if path.name != "failpoints.py"
        for call in re.findall(r"failpoint\(([^)]*)\)", path.read_text(encoding="utf-8"))
        for name in re.findall(r'"([a-z.-]+)"', call)
    }
    assert passed == set(FAILPOINTS)


def test_armed_point_ends_the_process_at_the_nth_passage() -> None:
    done = run(**{VARIABLE: "tracker.committed:2"})
    assert (done.returncode, done.stdout) == (EXIT_CODE, "once\n")


def test_armed_point_suspends_the_process_which_goes_on_when_it_is_woken() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PASS_TWICE], stdout=subprocess.PIPE, text=True, cwd=PACKAGE.parent,
        env={**os.environ, VARIABLE: "tracker.committed:1:stop"},
    )  # fmt: skip
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert (os.WIFSTOPPED(status), os.WSTOPSIG(status)) == (True, signal.SIGSTOP)
    process.send_signal(signal.SIGCONT)
    assert (process.communicate()[0], process.returncode) == ("once\ntwice\n", 0)


def test_once_file_lets_a_restarted_process_live(tmp_path: Path) -> None:
    environment = {VARIABLE: "tracker.committed", ONCE_VARIABLE: str(tmp_path / "fired")}
    assert [run(**environment).returncode for _ in range(2)] == [EXIT_CODE, 0]


@pytest.mark.parametrize("value", ["nonsense", "tracker.committed:0", "tracker.committed:x", "tracker.committed:1:go"])
def test_wrong_value_is_refused_with_what_to_do(value: str) -> None:
    with pytest.raises(ConfigError, match=f"got '{value}' in KMQ_FAILPOINT; expected `name`, `name:nth`"):
        _armed({VARIABLE: value})
