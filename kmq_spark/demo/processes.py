"""The processes of the demo: the tracker and the workers, started as a user would start them."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING

from kmq_spark.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

STOP_TIMEOUT_S = 40.0
TRACKER_START_TIMEOUT_S = 300.0


class TrackerProcess:
    """A process that runs `kmq tracker run`, with its log in a file."""

    def __init__(self, bootstrap_servers: str, queue: str, folder: Path) -> None:
        self.log = folder / "tracker.log"
        command = [
            *(sys.executable, "-m", "kmq_spark.cli.main", "tracker", "run", queue, "--events"),
            *("--bootstrap-server", bootstrap_servers, "--checkpoint-dir", str(folder / "checkpoints")),
        ]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=_environment())

    def wait_ready(self) -> None:
        """Wait for the first batch of the tracker; raise a `SetupError` if there is none within five minutes."""
        output = self._process.stdout
        assert output is not None
        is_there, _, _ = select.select([output], [], [], TRACKER_START_TIMEOUT_S)
        line = output.readline() if is_there else b""
        if not line or json.loads(line).get("event") != "ready":
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])
            code = self._process.poll()
            got = f"not ready after {TRACKER_START_TIMEOUT_S:g} s" if code is None else f"exit code {code}"
            message = f"the tracker did not start: got {got}; see {self.log}\n{tail}"
            raise SetupError(message)

    def stop(self) -> None:
        """Send SIGTERM and wait; the tracker stops between two batches."""
        _stop(self._process)


class Crew:
    """The worker processes of one queue, with one file of results each; *arguments* follow it on the command line."""

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        self._folder, self._arguments = folder, arguments
        self._workers: list[tuple[subprocess.Popen[bytes], Path]] = []

    def hire(self) -> None:
        """Start one more worker."""
        name = f"worker-{len(self._workers) + 1}"
        results = self._folder / f"{name}.jsonl"
        command = [sys.executable, "-m", "kmq_spark.demo.worker", str(results), *self._arguments]
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=_environment())
        self._workers.append((process, results))

    def kill_one_at_work(self) -> str:
        """Kill (SIGKILL) a worker that is processing a file; return which one, or an empty text if there is none."""
        for number, (process, results) in enumerate(self._workers, 1):
            if process.poll() is not None:
                continue
            events = _events(results)
            open_files = {str(event["path"]) for event in events if event["event"] == "begun"}
            open_files -= {str(event["path"]) for event in events if event["event"] != "begun"}
            if open_files:
                process.kill()
                process.wait()
                return f"worker {number} (pid {process.pid}) while it parsed {min(open_files)}"
        return ""

    def stop(self) -> None:
        """Terminate all workers (SIGTERM) and wait for them."""
        for process, _ in self._workers:
            _stop(process)

    def counts(self) -> dict[str, int]:
        """Return the number of definitions of each file."""
        return {str(event["path"]): int(str(event["definitions"])) for event in self._ended("counted")}

    def rejected(self) -> set[str]:
        """Return the files that were rejected."""
        return {str(event["path"]) for event in self._ended("rejected")}

    def done_count(self) -> int:
        """Return the number of files that are counted or rejected."""
        return len({event["path"] for event in self._ended("counted", "rejected")})

    def repeated_count(self) -> int:
        """Return the number of files with several results: a killed worker may have written a result but no ack."""
        done = Counter(event["path"] for event in self._ended("counted", "rejected"))
        return sum(count > 1 for count in done.values())

    def _ended(self, *kinds: str) -> list[dict[str, object]]:
        return [event for _, results in self._workers for event in _events(results) if event["event"] in kinds]


def _events(results: Path) -> list[dict[str, object]]:
    return complete_events(results.read_bytes()) if results.exists() else []


def complete_events(written: bytes) -> list[dict[str, object]]:
    """Return the events of a results file; its last line may be incomplete, as a large write is not atomic."""
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
