"""
Trackers and workers as processes that may be killed, paused, armed with a crash point, and given a false clock.

Rule 1: signals go to process ids of our own children alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from faults.events import read_events
from faults.secrets import JAVA_SECRET, SECRET
from faults.waits import Interval
from kmq_spark.core.state import Status
from kmq_spark.failpoints import ONCE_VARIABLE, VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from faults.clocks import FalseClock
    from faults.worker import Profile

READY_TIMEOUT_S = 480.0
STOP_TIMEOUT_S = 100.0
"""
A consumer leaves its group within 15 s, or goes on leaving in the background; with the classic protocol the client may
then hold the end of the process up until the group's rebalance is over, a minute at most.
"""

BEGIN_TIMEOUT_S = 240.0
"""For a worker to start; it takes a second on an idle machine."""
POLL_S = 0.05
NEVER_MS = 2**62
PEAK_S = 1.0
"""Between two looks at the memory of processes."""


class Memory(NamedTuple):
    """Resident memory of a process and of all that it started, MiB: its JVM, and everything else."""

    python_mib: int = 0
    jvm_mib: int = 0

    def most(self, other: Memory) -> Memory:
        """Return the larger of each."""
        return Memory(max(self.python_mib, other.python_mib), max(self.jvm_mib, other.jvm_mib))


class Child:
    """
    A process of our own.

    Attributes:
        is_ended_by_us: Whether it was killed, or armed to end by itself.
        is_hung: Whether it did not end when it was asked to, so that it was killed.
        peak: The most memory that was seen.
        ended_at_ms: When it was seen to have ended, epoch milliseconds; None while it runs.

    Args:
        command: What to run.
        log: Where its stderr goes, appended.
        settings: More environment variables.
        failpoint: `name[:nth]` at which it ends; empty for none.
        once_file: See `kmq_spark.failpoints`.
        clock: A wrong wall clock; None for the machine's.
    """

    ended_at_ms: int | None = None
    _ended_s: float | None = None
    is_hung: bool = False

    def __init__(
        self,
        command: list[str],
        log: Path,
        settings: Mapping[str, str] | None,
        *,
        failpoint: str = "",
        once_file: str = "",
        clock: FalseClock | None = None,
    ) -> None:
        """Start it."""
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(settings or {})}
        if failpoint:
            environment |= {VARIABLE: failpoint, ONCE_VARIABLE: once_file}
        if clock is not None:
            environment |= clock.environment()
        self.log = log
        self.began_s = time.monotonic()
        with log.open("ab") as stderr:
            # A group of its own, so that a signal reaches the JVM and Spark's workers too.
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=stderr, env=environment, start_new_session=True
            )
        self.lines: list[str] = []
        self.peak = Memory()
        self.is_ended_by_us = bool(failpoint)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    @property
    def group(self) -> int:
        """The process group of it and of all that it started."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """As a shell gives it: 128 + n for signal n; None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def lived_s(self) -> float:
        """How long it has run, seconds."""
        return (self._ended_s or time.monotonic()) - self.began_s

    def wait(self, timeout_s: float) -> int | None:
        """Wait for its end; return its exit code, None where it has not ended in time."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        self._note_end()
        return self.exit_code

    def kill(self) -> None:
        """`kill -9`."""
        self.is_ended_by_us = True
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._note_end()

    def pause(self) -> None:
        """`kill -STOP`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """`kill -CONT`."""
        self._signal(signal.SIGCONT)

    def stop(self) -> int | None:
        """Ask it to end, and wait; kill it where it does not."""
        self._signal(signal.SIGTERM)
        if self.wait(STOP_TIMEOUT_S) is None:
            self.is_hung = True
            self.kill()
        return self.exit_code

    def last_words(self) -> str:
        """Return the last line that it wrote."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def _signal(self, number: signal.Signals) -> None:
        if self.is_running:
            os.killpg(self._process.pid, number)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self.lines.append(line.decode(errors="replace"))
                self._saw(self.lines[-1])
        self._note_end()

    def _note_end(self) -> None:
        self.ended_at_ms = self.ended_at_ms or time.time_ns() // 1_000_000
        self._ended_s = self._ended_s or time.monotonic()

    def _saw(self, line: str) -> None:
        """Look at a line as it comes."""


class TrackerChild(Child):
    """
    `kmq tracker run` of one queue.

    Args:
        bootstrap_servers: Broker.
        queue: Queue.
        folder: Folder of the queue: logs, and checkpoints unless *checkpoint_dir* says otherwise.
        checkpoint_dir: Where Spark keeps its state.
        max_deliveries: Limit.
        max_transaction_messages: A small number by default, so that a batch is often cut into several transactions;
            None for the tracker's own default.
        options: See `Child`.
    """

    _ready_at_ms: int | None = None
    _ready_s: float | None = None

    def __init__(
        self,
        bootstrap_servers: str,
        queue: str,
        folder: Path,
        *,
        checkpoint_dir: Path | None = None,
        max_deliveries: int = 3,
        max_transaction_messages: int | None = 100,
        **options: Any,
    ) -> None:
        """Start it; `wait_ready` waits until it tracks."""
        self._queue, self.checkpoint_dir = queue, checkpoint_dir or folder / "checkpoint"
        command = [
            *(sys.executable, "-m", "kmq_spark.cli.main", "tracker", "run", queue, "--events"),
            *("--bootstrap-server", bootstrap_servers, "--checkpoint-dir", str(self.checkpoint_dir)),
            *("--max-deliveries", str(max_deliveries), "--driver-memory", "1g"),
        ]
        log = folder / f"tracker-{time.time_ns()}.log"
        settings = {
            "KMQ_TRACKER__STATE_PARTITIONS": "2",
            "KMQ_TRACKER__COMMIT_INTERVAL_MS": "1000",
            "KMQ_KAFKA__EXTRA": json.dumps(SECRET),
            "KMQ_KAFKA__SPARK_EXTRA": json.dumps(JAVA_SECRET),
        }
        if max_transaction_messages is not None:
            settings["KMQ_TRACKER__MAX_TRANSACTION_MESSAGES"] = str(max_transaction_messages)
        super().__init__(command, log, settings, **options)

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> float:
        """Wait until it is ready; return the seconds since it was started, -1 where it ended before."""
        give_up_s = time.monotonic() + timeout_s
        while self._ready_s is None and self.is_running and time.monotonic() < give_up_s:
            time.sleep(POLL_S)
        return -1 if self._ready_s is None else self._ready_s - self.began_s

    def statuses(self) -> dict[int, Status]:
        """Return the status of each markers partition, printed at its end; empty where it was killed or fenced."""
        self.wait(0)
        self._reader.join(STOP_TIMEOUT_S)
        for line in reversed(self.lines):
            event = json.loads(line) if line.startswith("{") else {}
            if event.get("event") == "ended":
                partitions = event["queues"][self._queue]["partitions"]
                return {int(partition): Status.from_dict(values) for partition, values in partitions.items()}
        return {}

    def presence(self) -> Interval | None:
        """Return from when on, and until when, it did its work; None where it never got so far."""
        return None if self._ready_at_ms is None else Interval(self._ready_at_ms, self.ended_at_ms or NEVER_MS)

    def _saw(self, line: str) -> None:
        if self._ready_at_ms is None and line.startswith("{") and json.loads(line).get("event") == "ready":
            self._ready_at_ms, self._ready_s = time.time_ns() // 1_000_000, time.monotonic()


class WorkerChild(Child):
    """
    A consumer process.

    Args:
        profile: What it does.
        options: See `Child`.
    """

    def __init__(self, profile: Profile, folder: Path, **options: Any) -> None:
        """Start it."""
        self._folder = folder
        self.name, self.logical_queue = profile.name, profile.logical_queue
        command = [sys.executable, "-m", "faults.worker", profile.to_json()]
        super().__init__(command, folder / f"{profile.name}.log", None, **options)

    def stop(self) -> int | None:
        """Ask it to end once it has begun, and wait: an interpreter that still starts dies of the signal."""
        give_up_s = time.monotonic() + BEGIN_TIMEOUT_S
        while self.is_running and not any(self.events()) and time.monotonic() < give_up_s:
            time.sleep(POLL_S)
        return super().stop()

    def wait_working(self, deliveries: int = 1, timeout_s: float = BEGIN_TIMEOUT_S) -> bool:
        """Wait until it was given *deliveries* messages; return whether it was."""
        give_up_s = time.monotonic() + timeout_s
        while time.monotonic() < give_up_s and self.is_running:
            if self.delivered_count() >= deliveries:
                return True
            time.sleep(POLL_S)
        return False

    def wait_holding(self, count: int, timeout_s: float) -> bool:
        """Wait until it holds *count* messages, those fetched ahead included; return whether it does."""
        give_up_s = time.monotonic() + timeout_s
        while time.monotonic() < give_up_s and self.is_running:
            if self.held_count() >= count:
                return True
            time.sleep(10 * POLL_S)
        return False

    def was_given_since(self, monotonic_s: float) -> bool:
        """Return whether a handler was given a message since an instant."""
        return any(event["event"] == "delivered" and event["monotonic"] >= monotonic_s for event in self.events())

    def held_count(self) -> int:
        """Return how many messages it said last that it holds."""
        counts = [int(event["count"]) for event in self.events() if event["event"] == "held"]
        return counts[-1] if counts else 0

    def delivered_count(self) -> int:
        """Return how many messages its handlers were given."""
        return sum(event["event"] == "delivered" for event in self.events())

    def events(self) -> Iterator[dict[str, Any]]:
        """Return what it wrote down."""
        return read_events(self._folder, f"{self.name}-*")


class ProcessUse(NamedTuple):
    """What a process takes: resident memory in MiB, open files, threads."""

    pid: int
    is_jvm: bool
    resident_mib: int
    files: int
    threads: int


def processes_of(group: int) -> list[ProcessUse]:
    """Return the processes of a group, those that end meanwhile left out."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(folder.name)) == group:
                found.append(_use_of(folder))
        except (OSError, IndexError, KeyError):
            continue
    return found


def memory_of(group: int) -> Memory:
    """Return what a group takes now."""
    uses = processes_of(group)
    jvm_mib = sum(use.resident_mib for use in uses if use.is_jvm)
    return Memory(sum(use.resident_mib for use in uses) - jvm_mib, jvm_mib)


class PeakWatch(threading.Thread):
    """
    Looks every second at the memory of the processes that run.

    Args:
        children: Returns them.
    """

    def __init__(self, children: Callable[[], Sequence[Child]]) -> None:
        """Keep the argument; `start` begins to look."""
        super().__init__(name="peak-watch", daemon=True)
        self._children = children
        self._stopping = threading.Event()

    def run(self) -> None:
        """Look; called by `start`."""
        while not self._stopping.wait(PEAK_S):
            for child in self._children():
                if child.is_running:
                    child.peak = child.peak.most(memory_of(child.group))

    def stop(self) -> None:
        """Look no more."""
        self._stopping.set()


def _use_of(folder: Path) -> ProcessUse:
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
    return ProcessUse(
        pid=int(folder.name),
        is_jvm=b"java" in (folder / "cmdline").read_bytes()[:200],
        resident_mib=int(status["VmRSS"].split()[0]) // 1024,
        files=len(list((folder / "fd").iterdir())),
        threads=int(status["Threads"]),
    )
