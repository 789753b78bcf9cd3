"""
The demo's workers as a crew: hired, killed at work, replaced, and asked what they did.

Rule 1: what a worker did is read from its results file; nothing of it is kept here.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kmq_spark.demo.processes import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class Crew:
    """
    Worker processes of one queue.

    Args:
        folder: Where results and logs go.
        arguments: Of `WorkerProcess`, for each of them.
    """

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        """Start without anybody."""
        self._folder = folder
        self._arguments = arguments
        self._workers: list[WorkerProcess] = []

    def hire(self) -> None:
        """Start one more worker."""
        self._workers.append(WorkerProcess(self._folder, len(self._workers) + 1, self._arguments))

    def kill_one_at_work(self) -> str:
        """`kill -9` a worker that is in the middle of a file; say which and what, or nothing where none is."""
        for worker in self._workers:
            if not worker.is_running:
                continue
            events = worker.events()
            open_files = {str(event["path"]) for event in events if event["event"] == "begun"}
            open_files -= {str(event["path"]) for event in events if event["event"] != "begun"}
            if open_files:
                worker.kill()
                return f"worker {worker.number} (pid {worker.pid}) while it parsed {min(open_files)}"
        return ""

    def stop(self) -> None:
        """Ask all of them to stop, and wait."""
        for worker in self._workers:
            worker.stop()

    def counts(self) -> dict[str, int]:
        """Return the definitions counted, by file."""
        return {str(event["path"]): int(str(event["definitions"])) for event in self._ended("counted")}

    def rejected(self) -> set[str]:
        """Return the files that were rejected."""
        return {str(event["path"]) for event in self._ended("rejected")}

    def done_count(self) -> int:
        """Return how many files are counted or rejected."""
        return len({event["path"] for event in self._ended("counted", "rejected")})

    def repeated_count(self) -> int:
        """Return how many files were done twice: a killed worker's result may be written and its ack not."""
        done = Counter(event["path"] for event in self._ended("counted", "rejected"))
        return sum(count > 1 for count in done.values())

    def _ended(self, *kinds: str) -> list[dict[str, object]]:
        return [event for worker in self._workers for event in worker.events() if event["event"] in kinds]
