"""
The processes of the demo: the tracker and the workers, started as a user would start them.

Rule 1: a worker is killed with SIGKILL, so it cannot clean up; the other processes are stopped with SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import IO, TYPE_CHECKING

from kmq_spark.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

STOP_TIMEOUT_S = 40.0
TRACKER_START_TIMEOUT_S = 300.0


class TrackerProcess:
    """A process that runs `kmq tracker run`, with its log in a file."""

    def __init__(self, bootstrap_servers: str, queue: str, folder: Path) -> None:
        """Start the process; `wait_ready` waits until the tracker is ready."""
        self.log = folder / "tracker.log"
        command = [
            *(sys.executable, "-m", "kmq_spark.cli.main", "tracker", "run", queue, "--events"),
            *("--bootstrap-server", bootstrap_servers, "--checkpoint-dir", str(folder / "checkpoints")),
        ]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=_environment())

    def wait_ready(self) -> None:
        """
        Wait for the first batch of the tracker.

        Raises:
            SetupError: The process ended before, or had no batch within five minutes.
        """
        first_line = next(_lines_within(self._process, TRACKER_START_TIMEOUT_S), "")
        if not first_line or json.loads(first_line).get("event") != "ready":
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])
            code = self._process.poll()
            got = f"not ready after {TRACKER_START_TIMEOUT_S:g} s" if code is None else f"exit code {code}"
            message = f"the tracker did not start: got {got}; see {self.log}\n{tail}"
            raise SetupError(message)

    def stop(self) -> None:
        """Send SIGTERM and wait; the tracker stops between two batches."""
        _stop(self._process)


class WorkerProcess:
    """A worker process, with its results in a file."""

    def __init__(self, folder: Path, number: int, arguments: Sequence[str]) -> None:
        """Start the process; *arguments* are those of `kmq_spark.demo.worker` after the results file."""
        self.number = number
        self._results = folder / f"worker-{number}.jsonl"
        command = [sys.executable, "-m", "kmq_spark.demo.worker", str(self._results), *arguments]
        with (folder / f"worker-{number}.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=_environment())

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the process (SIGKILL) and wait for it."""
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """Send SIGTERM and wait."""
        _stop(self._process)

    def events(self) -> list[dict[str, object]]:
        """Return the events in the results file so far."""
        if not self._results.exists():
            return []
        return complete_events(self._results.read_bytes())


def complete_events(written: bytes) -> list[dict[str, object]]:
    """
    Return the complete events of a results file.

    Args:
        written: Lines of JSON. The last line may be incomplete, because a write of several pages is not atomic for a
            reader.
    """
    complete, _, _ = written.rpartition(b"\n")
    return [json.loads(line) for line in complete.splitlines()]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1"}


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _lines_within(process: subprocess.Popen[bytes], timeout_s: float) -> Iterator[str]:
    """Yield the lines that a process prints, until it ends or the timeout passes."""
    pipe: IO[bytes] | None = process.stdout
    if pipe is None:
        return
    os.set_blocking(pipe.fileno(), False)
    deadline_s, rest = time.monotonic() + timeout_s, b""
    while time.monotonic() < deadline_s:
        has_ended = process.poll() is not None
        rest += pipe.read() or b""
        *lines, rest = rest.split(b"\n")
        for line in lines:
            yield line.decode()
        if has_ended:
            return
        time.sleep(0.05)
