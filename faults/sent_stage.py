"""What the faults of senders share: a queue, processes that report events, and what went wrong."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

from faults.judged_stage import JudgedStage
from faults.processes import Child
from kmq_spark.kafka.topics import create_queue

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kmq_spark.local.broker import EmbeddedBroker

BEGIN_TIMEOUT_S = 240.0
PARTITIONS = 4


class EventChild(Child):
    """A process that prints one JSON object a line: its events."""

    def __init__(self, module: str, settings: Mapping[str, Any], folder: Path, **options: Any) -> None:  # of Child
        """Start a module of this package with its settings."""
        self._events: list[dict[str, Any]] = []
        command = [sys.executable, "-m", module, json.dumps(settings)]
        log = folder / f"{module.rpartition('.')[2]}-{time.time_ns()}.log"
        super().__init__(command, log, options.pop("environment", None), **options)

    def wait_for(self, event: str, timeout_s: float = BEGIN_TIMEOUT_S) -> dict[str, Any] | None:
        """Wait for an event; return None if the process ends before it, or if none comes in time."""
        give_up_s = time.monotonic() + timeout_s
        while time.monotonic() < give_up_s:
            is_running = self.is_running
            found = next((each for each in self._events if each["event"] == event), None)
            if found is not None or not is_running:
                return found
            time.sleep(0.01)
        return None

    def _saw(self, line: str) -> None:
        self._events.append(json.loads(line))


class SentStage(JudgedStage):
    """
    A queue, the processes that send to it, and what went wrong.

    Args:
        broker: Running.
        folder: Folder of the campaign; the stage gets one inside.
        queue: Name.

    Attributes:
        folder: Folder of this stage: logs and sources.
        children: All processes that were started, oldest first.
    """

    def __init__(self, broker: EmbeddedBroker, folder: Path, queue: str) -> None:
        """Create the queue."""
        super().__init__()
        self.broker, self.queue = broker, queue
        self.folder = folder / queue
        self.folder.mkdir(parents=True)
        create_queue(queue, bootstrap_servers=broker.bootstrap_servers, partitions=PARTITIONS)
        self.children: list[EventChild] = []

    def start(self, module: str, settings: Mapping[str, Any], **options: Any) -> EventChild:  # of Child
        """Start a process."""
        child = EventChild(module, settings, self.folder, **options)
        self.children.append(child)
        return child

    def begun(self, child: EventChild, timeout_s: float = BEGIN_TIMEOUT_S) -> dict[str, Any] | None:
        """Wait until a process knows its position. Note how long that took, or that it did not get there."""
        began = child.wait_for("began", timeout_s)
        if began is None:
            self.fail(f"S: a sender did not begin: exit code {child.exit_code}, {child.last_words()}")
        else:
            self.recovery_s.append(time.monotonic() - child.began_s)
        return began

    def close(self) -> None:
        """End every process that still runs."""
        for child in self.children:
            if child.is_running:
                child.resume()
                child.kill()
