"""
Processes of the campaign: they may be killed, paused, armed with a crash point, and given a false clock.

Rule 1: signals go to process groups of our own children alone.
Rule 2: what a process says it prints, a JSON object a line: its standard output is its event file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from faults.events import SUFFIX, EventFile, parsed, steady_s
from faults.evidence import TRACKER, WORKER, Process
from faults.waits import Interval
from kmq_spark.failpoints import ONCE_VARIABLE, VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from faults.clocks import FalseClock
    from faults.worker import Profile

READY_TIMEOUT_S = 480.0
BEGIN_TIMEOUT_S = 240.0
"""For a process to begin; it takes a second on an idle machine."""

STOP_TIMEOUT_S = 100.0
"""
A consumer leaves its group within 15 s, or goes on leaving in the background; with the classic protocol the client may
then hold the end of the process up until the group's rebalance is over, a minute at most.
"""

POLL_S = 0.05
WATCH_S = 1.0
"""Between two looks at the memory of processes."""

CLOCK_WATCH_S, CLOCK_STEP_S, READING_S = 0.05, 0.02, 0.002
"""Between two looks at the machine's clock; what is a step; how long a reading of both clocks may take."""

NEVER_MS = 2**62
CANARY = "canary-7f3a9c51"
"""A secret among the settings of every client; no client needs it, and nothing may show it (I14)."""

SECRET, JAVA_SECRET = {"sasl.password": CANARY}, {"ssl.key.password": CANARY}


def now_ms() -> int:
    """Return epoch milliseconds."""
    return time.time_ns() // 1_000_000


def kmq(*arguments: str) -> list[str]:
    """Return a call of the command line."""
    return [sys.executable, "-m", "kmq_spark.cli.main", *arguments]


class Child:
    """
    A process of our own. Its event file and its log (stderr) lie in *folder* and have its name.

    *failpoint* is `name[:nth]` at which it ends, or `name:nth:stop` at which it is suspended.
    """

    kind = ""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        name: str,
        *,
        environment: Mapping[str, str] | None = None,
        failpoint: str = "",
        clock: FalseClock | None = None,
    ) -> None:
        variables = {**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})}
        self._once = folder / f"{name}.once"
        if failpoint:
            # Once: a tracker whose Python worker has ended starts again.
            variables |= {VARIABLE: failpoint, ONCE_VARIABLE: str(self._once)}
        if clock is not None:
            variables |= clock.environment()
        self.name, self.log = name, folder / f"{name}.log"
        self.is_ended_by_us, self.is_hung = bool(failpoint) and not failpoint.endswith(":stop"), False
        self.ended_at_ms: int | None = None
        self.woke_ms: list[int] = []
        self.python_mib = self.jvm_mib = 0
        self.began_s, self._ended_s = time.monotonic(), 0.0
        said = folder / f"{name}{SUFFIX}"
        with said.open("ab") as stdout, self.log.open("ab") as stderr:
            # A group of its own, so that a signal reaches the JVM and Spark's workers too.
            self._process = subprocess.Popen(
                command, stdout=stdout, stderr=stderr, env=variables, start_new_session=True
            )
        self._said, self._rest, self._lock = said.open("rb"), b"", threading.Lock()
        self._events: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)

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
        """How long it has run."""
        return (self._ended_s or time.monotonic()) - self.began_s

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return what it has said so far, of one kind, each with when it was seen."""
        with self._lock:
            # Of a process that was ended, all is read.
            if not self._said.closed:
                *lines, self._rest = (self._rest + self._said.read()).split(b"\n")
                for event in filter(None, map(parsed, lines)):
                    self._events[event["event"]].append({"seen_ms": now_ms(), "seen_s": time.monotonic(), **event})
            return self._events[kind]

    def until(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until something is so, or this process has ended; return whether it is so."""
        give_up_s = time.monotonic() + timeout_s
        while not is_done():
            if not self.is_running or time.monotonic() > give_up_s:
                return is_done()
            time.sleep(POLL_S)
        return True

    def wait_for(self, kind: str, timeout_s: float = BEGIN_TIMEOUT_S, count: int = 1) -> bool:
        """Wait until it has said something *count* times; return whether it has."""
        return self.until(lambda: len(self.events(kind)) >= count, timeout_s)

    def wait(self, timeout_s: float) -> int | None:
        """Wait for its end; return its exit code, None where it has not ended in time."""
        give_up_s = time.monotonic() + timeout_s
        while self.is_running and time.monotonic() < give_up_s:
            self.events("")
            time.sleep(POLL_S)
        self.look()
        return self.exit_code

    def kill(self) -> None:
        """`kill -9`."""
        self.is_ended_by_us = True
        self._signal(signal.SIGKILL)
        self._process.wait()
        self.look()

    def pause(self) -> None:
        """`kill -STOP`."""
        self._signal(signal.SIGSTOP)

    def suspended(self, timeout_s: float) -> bool:
        """Wait until it has suspended itself at its crash point, suspend what it started, and return whether it has."""
        is_there = self.until(self._once.exists, timeout_s)
        if is_there:
            time.sleep(POLL_S)
            self.pause()
        return is_there and self.is_running

    def resume(self) -> None:
        """`kill -CONT`."""
        self.woke_ms.append(now_ms())
        self._signal(signal.SIGCONT)

    def stop(self) -> int | None:
        """Ask it to end, and wait; kill it where it does not."""
        self._signal(signal.SIGTERM)
        if self.wait(STOP_TIMEOUT_S) is None:
            self.kill()
            self.is_hung = True
        return self.exit_code

    def end(self) -> None:
        """End it at once, whatever it does, and let go of its file."""
        if self.is_running:
            self.resume()
            self.kill()
        self.events("")
        with self._lock:  # other threads look at it
            self._said.close()

    def last_words(self) -> str:
        """Return the last line that it logged."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def has_said(self, words: str) -> bool:
        """Return whether it has logged these words; Spark may log more after them."""
        return words in self.log.read_text(errors="replace")

    def look(self) -> None:
        """Note what it takes, what it has said, and when it has ended."""
        if self.is_running:
            uses = processes_of(self.group)
            jvm_mib = sum(use.resident_mib for use in uses if use.is_jvm)
            self.jvm_mib = max(self.jvm_mib, jvm_mib)
            self.python_mib = max(self.python_mib, sum(use.resident_mib for use in uses) - jvm_mib)
        elif self.ended_at_ms is None:
            self.ended_at_ms, self._ended_s = now_ms(), time.monotonic()
        self.events("")

    def as_evidence(self) -> Process:
        """Return how it ended, and when it was resumed."""
        log = self.log.read_text(errors="replace") if self.log.exists() else ""
        how = self.exit_code, self.is_ended_by_us, self.is_hung
        return Process(self.kind, self.name, *how, log, self.python_mib, self.jvm_mib, self.woke_ms)

    def _signal(self, number: signal.Signals) -> None:
        if self.is_running:
            os.killpg(self._process.pid, number)


class Tracker(Child):
    """`kmq tracker run` with small transactions, so that a batch is often cut into several; None: its own default."""

    kind = TRACKER

    def __init__(
        self,
        queues: Sequence[str],
        bootstrap_servers: str,
        folder: Path,
        name: str,
        *,
        checkpoint: Path | None = None,
        max_transaction_messages: int | None = 100,
        fleet: tuple[str, str] | None = None,
        extra: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        self.checkpoint = checkpoint or folder / "checkpoint"
        command = kmq("tracker", "run", *queues, "--events", "--bootstrap-server", bootstrap_servers)
        command += ["--checkpoint-dir", str(self.checkpoint), "--driver-memory", "1g"]
        settings = {
            "KMQ_TRACKER__STATE_PARTITIONS": "2",
            "KMQ_TRACKER__COMMIT_INTERVAL": "1",
            "KMQ_KAFKA__EXTRA": json.dumps(SECRET | dict(extra or {})),
            "KMQ_KAFKA__SPARK_EXTRA": json.dumps(JAVA_SECRET | dict(extra or {})),
        }
        if max_transaction_messages is not None:
            settings["KMQ_TRACKER__MAX_TRANSACTION_MESSAGES"] = str(max_transaction_messages)
        if fleet is not None:
            command += ["--fleet", fleet[0], "--fleet-member", fleet[1]]
            settings["KMQ_TRACKER__COORDINATION_TOPIC"] = f"{fleet[0]}.coordination"
        super().__init__(command, folder, f"tracker-{name}", environment=settings, **options)

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> float:
        """Wait until it tracks; return the seconds since it was started, -1 where it ended before."""
        if not self.wait_for("ready", timeout_s):
            return -1
        return float(self.events("ready")[0]["seen_s"]) - self.began_s

    def statuses(self, queue: str) -> dict[int, dict[str, Any]]:
        """Return the status of each markers partition, printed at its end; empty where it was killed or fenced."""
        ended = self.events("ended")
        partitions = ended[-1].get("queues", {}).get(queue, {}).get("partitions", {}) if ended else {}
        return {int(partition): values for partition, values in partitions.items()}

    def restarts(self) -> int:
        """Return how often its query was started again."""
        return self.log.read_text(errors="replace").count("restarting in")

    def presence(self) -> Interval | None:
        """Return from when on, and until when, it did its work; None where it never got so far."""
        ready = self.events("ready")
        return Interval(ready[0]["seen_ms"], self.ended_at_ms or NEVER_MS) if ready else None


class Worker(Child):
    """A consumer process, see `faults.worker`."""

    kind = WORKER

    def __init__(self, profile: Profile, folder: Path, **options: Any) -> None:
        self.logical_queue = profile.logical_queue
        command = [sys.executable, "-m", "faults.worker", profile.to_json()]
        super().__init__(command, folder, profile.name, **options)

    def stop(self) -> int | None:
        """Ask it to end once it has begun, and wait: an interpreter that still starts dies of the signal."""
        self.wait_for("began")
        return super().stop()

    def wait_working(self, deliveries: int = 1, timeout_s: float = BEGIN_TIMEOUT_S) -> bool:
        """Wait until its handlers were given *deliveries* messages; return whether they were."""
        return self.wait_for("delivered", timeout_s, deliveries)

    def held(self) -> int:
        """Return how many messages it said last that it holds."""
        said = self.events("held")
        return int(said[-1]["count"]) if said else 0


class Use(NamedTuple):
    """What a process takes: resident memory in MiB, open files, threads."""

    pid: int
    parent: int
    command: str
    resident_mib: int
    files: int
    threads: int

    @property
    def is_jvm(self) -> bool:
        """Whether it is one of Java's."""
        return "java" in self.command[:200]


def processes_of(group: int) -> list[Use]:
    """Return the processes of a session, without those that end meanwhile and Java's copies that run a program next."""
    found: dict[int, Use] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # What a child starts may have a group of its own; the session stays.
            if os.getsid(int(folder.name)) == group:
                status = dict(
                    line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line
                )
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                mib, files = int(status["VmRSS"].split()[0]) // 1024, len(list((folder / "fd").iterdir()))
                pid, parent, threads = int(folder.name), int(status["PPid"]), int(status["Threads"])
                found[pid] = Use(pid, parent, command, mib, files, threads)
        except (OSError, IndexError, KeyError):
            continue
    return [
        use
        for use in found.values()
        if not use.is_jvm or use.parent not in found or found[use.parent].command != use.command
    ]


class Watch(threading.Thread):
    """Looks every second at the processes that run, and more often at the machine's clock, which somebody may set."""

    def __init__(self, children: Callable[[], Sequence[Child]], events: EventFile) -> None:
        super().__init__(name="watch", daemon=True)
        self._children, self._events, self._stopping = children, events, threading.Event()

    def run(self) -> None:
        """Look; called by `start`."""
        ahead_s, since_s, watched_s = _clock_ahead_s(), steady_s(), steady_s()
        while not self._stopping.wait(CLOCK_WATCH_S):
            if abs((now_ahead_s := _clock_ahead_s()) - ahead_s) > CLOCK_STEP_S:
                ahead_s = now_ahead_s
                self._events.write("clock set", since=since_s, ahead=ahead_s)
            since_s = steady_s()
            if since_s - watched_s >= WATCH_S:
                watched_s = since_s
                for child in self._children():
                    child.look()

    def stop(self) -> None:
        """Look no more."""
        self._stopping.set()
        self.join()


def _clock_ahead_s() -> float:
    """Return how far the wall clock is ahead of the monotonic one, read at the same moment."""
    while True:
        before_s, wall_s, after_s = steady_s(), time.time(), steady_s()
        if after_s - before_s < READING_S:
            return wall_s - before_s
