"""
Run the demo: start broker and tracker, send messages, kill workers, wait, count, and print a few lines about it.

All printed numbers are measured in this run. The table is read from the topics (`audit.py`), not from counters.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kmq_spark.demo.audit import Audit, audit
from kmq_spark.demo.processes import Crew, TrackerProcess
from kmq_spark.demo.worker import BROKEN_FILES, count_directly, standard_library
from kmq_spark.inspection.spans import counted
from kmq_spark.kafka.queue_rules import create_queue
from kmq_spark.local.broker import EmbeddedBroker
from kmq_spark.producer.producer import QueueProducer

if TYPE_CHECKING:
    from pathlib import Path

    from kmq_spark.kafka.topics import QueueLayout

PARTITIONS = 4
WORK_TIMEOUT_S = 600.0
SETTLE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of the demo: what the topics say, and whether the workers' results are those of a direct count."""

    audit: Audit
    is_same_count: bool
    is_same_rejects: bool

    @property
    def is_right(self) -> bool:
        """Whether no message is lost, none was redelivered early, and the result is the same as without a queue."""
        return not self.audit.lost and not self.audit.early and self.is_same_count and self.is_same_rejects

    def summary(self) -> dict[str, object]:
        """Return the JSON object that the demo prints as its last line."""
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
    """One run of the demo, with logs, results and checkpoint in *folder*."""

    def __init__(self, folder: Path, *, workers: int, kills: int, lease_ms: int) -> None:
        self._folder = folder
        self._worker_count = workers
        self._kills = kills
        self._lease_ms = lease_ms
        self._out = Console(stderr=True, highlight=False)

    def run(self, bootstrap_servers: str | None) -> Outcome:
        """Run the demo; start an embedded broker if no bootstrap address is given."""
        with ExitStack() as stack:
            files = self._files()
            # KIP-848 on the embedded broker; any other may be older.
            protocol = "classic" if bootstrap_servers else "consumer"
            servers = bootstrap_servers or self._start_broker(stack)
            # Created for this run, so that a broker with existing data can be used.
            queue = f"kmq-demo-{int(time.time())}"
            # Without backoff, which would count as lateness.
            layout = create_queue(queue, bootstrap_servers=servers, partitions=PARTITIONS, rules={"backoff": "none"})
            self._start_tracker(stack, servers, queue)
            self._send(servers, queue, files)
            crew = self._work(stack, [servers, queue, str(self._lease_ms), protocol], len(files))
            return self._compare(layout, servers, crew, files)

    def _say(self, title: str, text: str) -> None:
        self._out.print(f"{title:9} {text}", soft_wrap=True)

    def _files(self) -> dict[str, bytes]:
        files = standard_library()
        size_mb = sum(map(len, files.values())) / 1e6
        self._say("input", f"{len(files)} .py files of this Python's standard library, {size_mb:.0f} MB")
        if not any("badsyntax" in path or "bad_coding" in path for path in files):
            self._say("", f"it ships no broken ones, so {len(BROKEN_FILES)} of our own are added")
            files |= BROKEN_FILES
        return files

    def _start_broker(self, stack: ExitStack) -> str:
        began_s = time.monotonic()
        servers: str = stack.enter_context(EmbeddedBroker()).bootstrap_servers
        took_s = time.monotonic() - began_s
        self._say("broker", f"Kafka 4.3.1 on {servers}, ready in {took_s:.1f} s (not for production)")
        return servers

    def _start_tracker(self, stack: ExitStack, servers: str, queue: str) -> None:
        began_s = time.monotonic()
        tracker = TrackerProcess(servers, queue, self._folder)
        stack.callback(tracker.stop)
        # Shown on a terminal only: the longest step without other output.
        with self._out.status("tracker   Spark is starting"):
            tracker.wait_ready()
        self._say("tracker", f"one Spark streaming job, ready in {time.monotonic() - began_s:.1f} s")

    def _send(self, servers: str, queue: str, files: dict[str, bytes]) -> None:
        began_s = time.monotonic()
        with QueueProducer(queue, bootstrap_servers=servers) as producer:
            for path, content in files.items():
                producer.send(content, key=path)
        self._say("sent", f"{counted(len(files), 'message')}, one a file, in {time.monotonic() - began_s:.1f} s")

    def _work(self, stack: ExitStack, arguments: list[str], file_count: int) -> Crew:
        """Run workers until all files are done; at equal intervals of files, kill one worker and start another."""
        crew = Crew(self._folder, arguments)
        stack.callback(crew.stop)
        for _ in range(self._worker_count):
            crew.hire()
        kill_at = [file_count * share // (self._kills + 1) for share in range(1, self._kills + 1)]
        deadline_s = time.monotonic() + WORK_TIMEOUT_S
        columns = (TextColumn("work     "), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._out, disable=not self._out.is_terminal) as progress:
            bar = progress.add_task("work", total=file_count)
            while (done_count := crew.done_count()) < file_count:
                progress.update(bar, completed=done_count)
                if kill_at and done_count >= kill_at[0] and (killed := crew.kill_one_at_work()):
                    self._say("kill -9", killed)
                    kill_at.pop(0)
                    crew.hire()
                if time.monotonic() > deadline_s:
                    self._say("", f"gave up after {WORK_TIMEOUT_S:g} s with {file_count - done_count} files open")
                    break
                time.sleep(0.1)
            progress.update(bar, completed=done_count)
        crew.stop()
        return crew

    def _compare(self, layout: QueueLayout, servers: str, crew: Crew, files: dict[str, bytes]) -> Outcome:
        """Wait until every message is settled, then compare the results with a direct count without a queue."""
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S + self._lease_ms / 1000
        found = audit(layout, servers)
        while found.lost and time.monotonic() < deadline_s:
            # Rejected messages become dead letters at the next TICK; messages of killed workers are redelivered.
            time.sleep(0.5)
            found = audit(layout, servers)
        counts, broken = count_directly(files)
        by_workers, rejected = crew.counts(), crew.rejected()
        outcome = Outcome(found, by_workers == counts, rejected == broken)
        self._out.print(_table(found, crew.repeated_count()))
        parsed, unparsed = counted(len(counts), "file"), counted(len(broken), "file")
        total = f"{counted(sum(counts.values()), 'definition')} in {parsed}, {unparsed} that cannot be parsed"
        if outcome.is_same_count and outcome.is_same_rejects:
            self._say("compared", f"with a direct count without a queue: the same, {total}")
        else:
            different = {path for path in files if by_workers.get(path) != counts.get(path)} | (rejected ^ broken)
            self._say("compared", f"with a direct count ({total}): {len(different)} differ, such as {min(different)}")
        return outcome


def _table(found: Audit, repeated_count: int) -> Table:
    table = Table(title="what the topics say", title_justify="left", show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    rows = {
        "sent": len(found.sent),
        "acked": len(found.acked),
        "rejected (dead letters)": len(found.rejected),
        "redelivered": found.redelivered,
        "redelivered too early": found.early,
        "done twice (killed before the ack)": repeated_count,
        "lost": len(found.lost),
        "lateness p50": f"{found.percentile(50)} ms",
        "lateness p99": f"{found.percentile(99)} ms",
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table
