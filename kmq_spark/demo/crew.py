"""
Manage the worker processes of the demo: start, kill and replace them, and read their results.

Rule 1: results are read from the results files of the workers; this module does not store them.
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
    The worker processes of one queue.

    Args:
        folder: Folder for results and logs.
        arguments: Arguments of each `WorkerProcess`.
    """

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        """Create a crew without workers."""
        self._folder = folder
        self._arguments = arguments
        self._workers: list[WorkerProcess] = []

    def hire(self) -> None:
        """Start one more worker."""
        self._workers.append(WorkerProcess(self._folder, len(self._workers) + 1, self._arguments))

    def kill_one_at_work(self) -> str:
        """Kill (SIGKILL) a worker that is processing a file; return which one, or an empty text if there is none."""
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
        """Terminate all workers (SIGTERM) and wait for them."""
        for worker in self._workers:
            worker.stop()

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
        return [event for worker in self._workers for event in worker.events() if event["event"] in kinds]
