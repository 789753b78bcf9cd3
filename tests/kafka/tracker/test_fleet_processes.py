"""Processes of `kmq tracker run --fleet`, one of which loses its JVM; the campaign kills and stops some (G6)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.kafka.conftest import Queue, wait_until
from tests.limits import ENDS_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.kafka, pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(1200)]


class Member:
    """A process of a fleet, and the events that it printed."""

    def __init__(self, name: str, arguments: list[str], environment: dict[str, str], folder: Path) -> None:
        self.name, self.log = name, folder / f"{name}-{time.time_ns()}.log"
        self.events: list[dict[str, Any]] = []
        with self.log.open("wb") as errors:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "kmq_spark.cli.main", "tracker", "run", *arguments, "--events"),
                    *("--fleet-member", name, "--driver-memory", "1g"),
                ],
                stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
                env={**os.environ, **environment},
            )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ready(self) -> set[str]:
        """Return the queues that it tracks, each after its first batch."""
        found: set[str] = set()
        for event in list(self.events):
            if event["event"] == "ready":
                found.add(event["queue"])
            elif event["event"] == "stopped":
                found.discard(event["queue"])
        return found

    def saw(self, event: str) -> bool:
        """Return whether it printed such an event."""
        return any(each["event"] == event for each in self.events)

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition while the process runs."""
        assert wait_until(lambda: condition() or self.process.poll() is not None)
        assert condition(), self.log.read_text(errors="replace")[-3000:]

    def kill(self) -> None:
        """`kill -9` of the process, its JVM and Spark's workers."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def kill_jvm(self) -> None:
        """`kill -9` of the JVM alone, as the kernel does when memory is short."""
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_java = b"java" in (folder / "cmdline").read_bytes()[:200]
                if is_java and os.getpgid(int(folder.name)) == self.process.pid:
                    os.kill(int(folder.name), signal.SIGKILL)

    def close(self) -> None:
        """End it whatever it does."""
        if self.process.poll() is None:
            self.kill()
        self._reader.join(10)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.events.append(json.loads(line))


class Fleet:
    """A fleet of one test, on two queues."""

    def __init__(self, queues: list[Queue], folder: Path) -> None:
        self.name, self.queues, self.folder = f"fleet-{time.time_ns()}", queues, folder
        self.topic = f"coordination-{self.name}"
        self._members: list[Member] = []

    def member(self, name: str) -> Member:
        """Start a process, with a checkpoint folder of its own as on a machine of its own."""
        arguments = [
            *(queue.name for queue in self.queues),
            *("--fleet", self.name, "--bootstrap-server", self.queues[0].bootstrap_servers),
            *("--checkpoint-dir", str(self.folder / f"checkpoint-{name}")),
        ]
        environment = {"KMQ_TRACKER__COORDINATION_TOPIC": self.topic, "KMQ_TRACKER__COMMIT_INTERVAL": "0.5"}
        self._members.append(Member(name, arguments, environment, self.folder))
        return self._members[-1]

    def close(self) -> None:
        """End the processes."""
        for member in self._members:
            member.close()


@pytest.fixture
def fleet(make_queue: Callable[..., Queue], tmp_path: Path) -> Iterator[Fleet]:
    """A fleet of this test."""
    made = Fleet([make_queue(), make_queue()], tmp_path)
    yield made
    made.close()


def test_process_without_a_jvm_ends_and_the_standby_takes_its_queues(fleet: Fleet) -> None:
    """With exit code 1 and one line; the queues are released, so nothing waits for 2T."""
    names = {queue.name for queue in fleet.queues}
    first, second = fleet.member("a"), fleet.member("b")
    for member in (first, second):
        member.wait(lambda: member.saw("joined"))  # noqa: B023  # called within the loop
    first.wait(lambda: len(first.ready()) == 1)
    first.kill_jvm()
    assert first.process.wait(ENDS_S) == 1
    second.wait(lambda: second.ready() == names)
    assert "\nkmq: the JVM of Spark is gone" in first.log.read_text(errors="replace")
