"""
The demo itself: set the stage, send, kill, wait, count, and tell it in a few lines.

Rule 1: what is printed was measured in this run; the table comes from the topics (`audit.py`), from nobody's counters.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kmq_spark.demo.audit import Audit, audit
from kmq_spark.demo.processes import TrackerProcess, WorkerProcess
from kmq_spark.demo.source_files import BROKEN_FILES, count_directly, standard_library
from kmq_spark.kafka.producer import QueueProducer
from kmq_spark.kafka.topics import QueueLayout, create_queue
from kmq_spark.local.broker import EmbeddedBroker

if TYPE_CHECKING:
    from pathlib import Path

PARTITIONS = 4
WORK_TIMEOUT_S = 150.0
SETTLE_TIMEOUT_S = 30.0


@dataclass(slots=True)
class Outcome:
    """
    What the demo found.

    Attributes:
        audit: From the topics.
        is_same_count: Whether the workers' counts equal the direct ones, file by file.
        is_same_rejects: Whether the rejected files are the ones that cannot be parsed.
    """

    audit: Audit
    is_same_count: bool
    is_same_rejects: bool

    @property
    def is_right(self) -> bool:
        """Nothing lost, nothing early, and the same result as without a queue."""
        return not self.audit.lost and not self.audit.early and self.is_same_count and self.is_same_rejects

    def summary(self) -> dict[str, object]:
        """Return the last line of the demo."""
        return {
            "sent": len(self.audit.sent),
            "acked": len(self.audit.acked),
            "redelivered": self.audit.redelivered,
            "rejected": len(self.audit.rejected),
            "lost": len(self.audit.lost),
            "early": self.audit.early,
            "lateness_ms": {"p50": self.audit.percentile(50), "p99": self.audit.percentile(99)},
        }


class Demo:
    """
    One run.

    Args:
        folder: Logs, results and checkpoint.
        workers: Worker processes at work at a time.
        kills: How many of them are killed.
        lease_ms: How long a worker holds a message.
    """

    def __init__(self, folder: Path, *, workers: int, kills: int, lease_ms: int) -> None:
        """Keep the wishes."""
        self._folder = folder
        self._worker_count = workers
        self._kills = kills
        self._lease_ms = lease_ms
        self._out = Console(stderr=True, highlight=False)
        self._workers: list[WorkerProcess] = []

    def run(self, bootstrap_server: str | None) -> Outcome:
        """Play the demo; an embedded broker is started where none is given."""
        with ExitStack() as stack:
            files = self._files()
            if bootstrap_server is None:
                began_s = time.monotonic()
                broker = stack.enter_context(EmbeddedBroker(extra={"group.consumer.session.timeout.ms":"6000","group.consumer.min.session.timeout.ms":"5000","group.consumer.heartbeat.interval.ms":"1000","group.consumer.min.heartbeat.interval.ms":"1000"}))
                bootstrap_server = broker.bootstrap_servers
                self._say(f"broker    Kafka 4.3.1 on {bootstrap_server}, ready in {time.monotonic() - began_s:.1f} s")
            # A queue of its own, so that a broker with a past can be used.
            layout = create_queue(
                f"kmq-demo-{int(time.time())}", bootstrap_servers=bootstrap_server, partitions=PARTITIONS
            )
            self._start_tracker(stack, bootstrap_server, layout)
            self._send(bootstrap_server, layout, files)
            self._work(stack, bootstrap_server, layout, set(files))
            return self._compare(bootstrap_server, layout, files)

    def _say(self, text: str) -> None:
        self._out.print(text, soft_wrap=True)

    def _files(self) -> dict[str, bytes]:
        files = standard_library()
        size_mb = sum(map(len, files.values())) / 1e6
        self._say(f"input     {len(files)} .py files of this Python's standard library, {size_mb:.0f} MB")
        if not any("badsyntax" in path or "bad_coding" in path for path in files):
            self._say(f"          it ships no broken ones, so {len(BROKEN_FILES)} of our own are added")
            files |= BROKEN_FILES
        return files

    def _start_tracker(self, stack: ExitStack, bootstrap_server: str, layout: QueueLayout) -> None:
        began_s = time.monotonic()
        tracker = TrackerProcess(bootstrap_server, layout.topics.queue, self._folder)
        stack.callback(tracker.stop)
        tracker.wait_ready()
        self._say(f"tracker   one Spark streaming job, ready in {time.monotonic() - began_s:.1f} s")

    def _send(self, bootstrap_server: str, layout: QueueLayout, files: dict[str, bytes]) -> None:
        began_s = time.monotonic()
        with QueueProducer(layout.topics.queue, bootstrap_servers=bootstrap_server) as producer:
            for path, content in files.items():
                producer.send(content, key=path)
        self._say(f"sent      {len(files)} messages, one a file, in {time.monotonic() - began_s:.1f} s")

    def _work(self, stack: ExitStack, bootstrap_server: str, layout: QueueLayout, paths: set[str]) -> None:
        """Let workers work; kill one each time another share of the files is done, and start a new one in its place."""

        def hire() -> None:
            number = len(self._workers) + 1
            worker = WorkerProcess(bootstrap_server, layout.topics.queue, self._folder, number, self._lease_ms)
            stack.callback(worker.stop)
            self._workers.append(worker)

        for _ in range(self._worker_count):
            hire()
        kill_at = [len(paths) * share // (self._kills + 1) for share in range(1, self._kills + 1)]
        deadline_s = time.monotonic() + WORK_TIMEOUT_S
        columns = (TextColumn("work     "), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._out, disable=not self._out.is_terminal) as progress:
            bar = progress.add_task("work", total=len(paths))
            while len(done := self._done()) < len(paths):
                progress.update(bar, completed=len(done))
                if kill_at and len(done) >= kill_at[0] and self._kill_one():
                    kill_at.pop(0)
                    hire()
                if time.monotonic() > deadline_s:
                    self._say(f"          gave up after {WORK_TIMEOUT_S:g} s with {len(paths) - len(done)} files open")
                    break
                time.sleep(0.1)
            progress.update(bar, completed=len(done))
        for worker in self._workers:
            worker.stop()

    def _kill_one(self) -> bool:
        """Kill a worker that is in the middle of a file; return False where none is."""
        for worker in self._workers:
            if not worker.is_running:
                continue
            open_files = {event["path"] for event in worker.events() if event["event"] == "begun"}
            open_files -= {event["path"] for event in worker.events() if event["event"] != "begun"}
            if open_files:
                worker.kill()
                self._say(
                    f"kill -9   worker {worker.number} (pid {worker.pid}) while it parsed {min(map(str, open_files))}"
                )
                return True
        return False

    def _events(self) -> list[dict[str, object]]:
        return [event for worker in self._workers for event in worker.events()]

    def _repeats(self) -> int:
        """Return how many files were done twice: a killed worker's result may be written and its ack not."""
        done = Counter(event["path"] for event in self._events() if event["event"] != "begun")
        return sum(count > 1 for count in done.values())

    def _done(self) -> set[object]:
        return {event["path"] for event in self._events() if event["event"] != "begun"}

    def _compare(self, bootstrap_server: str, layout: QueueLayout, files: dict[str, bytes]) -> Outcome:
        """Wait until nothing is in flight, read the topics, and compare with a count without any queue."""
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S + self._lease_ms / 1000
        found = audit(layout, bootstrap_server)
        while found.lost and time.monotonic() < deadline_s:
            # Rejections become dead letters at the tracker's next TICK; what killed workers held is redelivered.
            time.sleep(0.5)
            found = audit(layout, bootstrap_server)
        counts, broken = count_directly(files)
        by_workers = {str(e["path"]): e["definitions"] for e in self._events() if e["event"] == "counted"}
        rejected = {str(event["path"]) for event in self._events() if event["event"] == "rejected"}
        outcome = Outcome(found, by_workers == counts, rejected == broken)
        if not outcome.is_same_count or not outcome.is_same_rejects:
            different = sorted(
                {path for path in files if by_workers.get(path) != counts.get(path)} | (rejected ^ broken)
            )
            self._say(f"          {len(different)} files differ from the direct count, the first: {different[:3]}")
        self._tell(outcome, counts)
        return outcome

    def _tell(self, outcome: Outcome, counts: dict[str, int]) -> None:
        found = outcome.audit
        table = Table(title="what the topics say", title_justify="left")
        table.add_column("", justify="left")
        table.add_column("", justify="right")
        rows = {
            "sent": len(found.sent),
            "acked": len(found.acked),
            "rejected (dead letters)": len(found.rejected),
            "redelivered": found.redelivered,
            "done more than once": self._repeats(),
            "redelivered too early": found.early,
            "lost": len(found.lost),
            "lateness p50 / p99": f"{found.percentile(50)} / {found.percentile(99)} ms",
        }
        for name, value in rows.items():
            table.add_row(name, str(value))
        self._out.print(table)
        same = "the same" if outcome.is_same_count else "NOT the same"
        self._say(
            f"compared  {sum(counts.values())} definitions in {len(counts)} files counted directly: {same} by the workers"
        )
