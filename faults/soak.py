"""
Let a busy queue run for long with nothing broken, and judge what grows.

    .venv/bin/python -m faults.soak [--minutes 30] [--rate 200]

One message in ten is left alone at its first delivery, so the tracker, a process of its own, redelivers all the time.
A line of measures on stderr every 27 s, one JSON object on stdout at the end, and one line on stderr: PASS, or
FAIL with each reason. Exit code 1 where it fails: a message was lost, early or late, the tracker started its query
again or put its checkpoint aside, or a measure of `BOUNDS` grew by more than it may (`growth.py`).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faults.growth import Bound, Growth, grown
from faults.processes import TrackerChild, processes_of
from faults.waits import QUIET_P99_MS
from kmq_spark.consumer.consumer import QueueConsumer
from kmq_spark.demo.audit import audit
from kmq_spark.kafka.topics import create_queue
from kmq_spark.local.broker import EmbeddedBroker
from kmq_spark.producer.producer import QueueProducer

if TYPE_CHECKING:
    from collections.abc import Callable

    from kmq_spark.kafka.topics import QueueLayout

LEASE_MS = 2_000
LEFT_ALONE = 10
"""One message in so many."""

SAMPLE_S = 27.0
"""
No multiple of the 10 s after which Spark removes older files of the state (`spark/session.py`). Samples at almost the
same moment of that interval drift slowly through it, and its saw-tooth of 10 s looks like growth for many minutes.
"""

ATTACH_TIMEOUT_S = 20.0
DRAIN_S = 15.0

BOUNDS = {
    "python_mib": Bound(an_hour=60, noise=16),
    "jvm_mib": Bound(an_hour=120, noise=48),
    "heap_mib": Bound(an_hour=60, noise=12),
    "client_mib": Bound(an_hour=60, noise=8),
    "files_open": Bound(an_hour=30, noise=12),
    "threads": Bound(an_hour=30, noise=12),
    "checkpoint_files": Bound(an_hour=200, noise=80),
    "checkpoint_kib": Bound(an_hour=20_000, noise=4_000),
    "state_kib": Bound(an_hour=10_000, noise=4_000),
}
"""
What may grow by how much: the tracker's Python processes and its JVM, resident; the JVM's live heap, after a full
collection; this process, which sends and receives; open files and threads of the tracker; its checkpoint, in files and
bytes, and the state in it, in bytes.
"""

TROUBLE = ("restarting in", "cannot be used", "Ignoring error while performing maintenance")
"""What the tracker's log must not say."""


class Soak:
    """
    A queue under steady load.

    Args:
        broker: Running.
        folder: Folder of logs and checkpoint.
        rate: Messages sent a second.
    """

    def __init__(self, broker: EmbeddedBroker, folder: Path, rate: int) -> None:
        """Make the queue and start its tracker."""
        self._address, self._rate = broker.bootstrap_servers, rate
        self.layout: QueueLayout = create_queue("soak", bootstrap_servers=self._address, partitions=4)
        self.tracker = TrackerChild(self._address, "soak", folder, max_deliveries=0)
        self.times_s: list[float] = []
        self.samples: list[dict[str, int]] = []
        self.failures: list[str] = []
        self._sending, self._receiving = threading.Event(), threading.Event()

    def run(self, minutes: float) -> None:
        """Load it for some minutes, let it come to rest, and end the tracker."""
        if self.tracker.wait_ready() < 0:
            message = f"the tracker did not get ready: {self.tracker.last_words()}"
            raise TimeoutError(message)
        threads = [threading.Thread(target=self._noted, args=(work,)) for work in (self._send, self._receive)]
        for thread in threads:
            thread.start()
        ends_s = time.monotonic() + 60 * minutes
        try:
            while time.monotonic() < ends_s and not self.failures:
                time.sleep(min(SAMPLE_S, max(0.0, ends_s - time.monotonic())))
                self._sample()
            self._sending.set()
            threads[0].join()
            time.sleep(DRAIN_S)
        finally:
            # Else they go on, against a broker that is gone, and this process never ends.
            self._sending.set()
            self._receiving.set()
            for thread in threads:
                thread.join()
        if self.tracker.stop():
            self.failures.append(f"the tracker ended with {self.tracker.exit_code}: {self.tracker.last_words()}")

    def verdict(self) -> dict[str, Any]:
        """Return what the topics and the tracker's log say."""
        found = audit(self.layout, self._address)
        log = self.tracker.log.read_text(errors="replace")
        late = {name: found.percentile(share) for name, share in (("p50", 50), ("p99", 99), ("max", 100))}
        measures, reasons = self._growth()
        reasons += [f"{log.count(words)} times in the tracker's log: {words}" for words in TROUBLE if words in log]
        reasons += [
            f"{count} messages {what}" for what, count in (("lost", len(found.lost)), ("early", found.early)) if count
        ]
        reasons += [f"lateness p99 is {late['p99']} ms, bound {QUIET_P99_MS} ms"] * ((late["p99"] or 0) > QUIET_P99_MS)
        # A tracker that redelivered nothing has not been tried.
        reasons += ["nothing was redelivered"] * (not found.redelivered) + self.failures
        return {
            "sent": len(found.sent), "redelivered": found.redelivered, "lost": len(found.lost), "early": found.early,
            "lateness_ms": late, "growth": {name: measure._asdict() for name, measure in measures.items()},
            "reasons": reasons, "is_well": not reasons, "samples": self.samples,
        }  # fmt: skip

    def _growth(self) -> tuple[dict[str, Growth], list[str]]:
        """Return what each measure did, and what is wrong with it."""
        series = {name: [float(sample[name]) for sample in self.samples] for name in BOUNDS}
        try:
            measures = grown(self.times_s, series, BOUNDS)
        except ValueError as error:
            return {}, [str(error)]
        reasons = [
            f"{name} grows by {measure.an_hour:g} an hour, bound {measure.bound:g}: {measure.first:g}, {measure.last:g}"
            for name, measure in measures.items()
            if measure.is_too_much
        ]
        return measures, reasons

    def _send(self) -> None:
        due_s = time.monotonic()
        with QueueProducer("soak", bootstrap_servers=self._address) as producer:
            while not self._sending.is_set():
                producer.send(bytes(200))
                due_s += 1 / self._rate
                self._sending.wait(max(0.0, due_s - time.monotonic()))

    def _receive(self) -> None:
        with QueueConsumer(
            "soak", bootstrap_servers=self._address, lease=LEASE_MS / 1000, max_lease=LEASE_MS / 1000
        ) as consumer:
            while not self._receiving.is_set():
                for message in consumer.receive(100, timeout=0.2):
                    if message.delivery_count > 1 or message.id.message_offset % LEFT_ALONE:
                        message.ack()

    def _noted(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # reported in the verdict
            self.failures.append(f"{type(error).__name__}: {error}")

    def _sample(self) -> None:
        processes = processes_of(self.tracker.group)
        checkpoint = [file for file in self.tracker.checkpoint_dir.rglob("*") if file.is_file()]
        sample = {
            "python_mib": sum(each.resident_mib for each in processes if not each.is_jvm),
            "jvm_mib": sum(each.resident_mib for each in processes if each.is_jvm),
            "heap_mib": sum(_heap_mib(each.pid) for each in processes if each.is_jvm),
            "client_mib": next(each.resident_mib for each in processes_of(os.getpgid(0)) if each.pid == os.getpid()),
            "files_open": sum(each.files for each in processes),
            "threads": sum(each.threads for each in processes),
            "checkpoint_files": len(checkpoint),
            "checkpoint_kib": sum(map(_size, checkpoint)) // 1024,
            "state_kib": sum(_size(file) for file in checkpoint if "state" in file.parts) // 1024,
        }
        self.times_s.append(time.monotonic())
        self.samples.append(sample)
        sys.stderr.write(f"{time.strftime('%H:%M:%S')}  {sample}\n")


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _heap_mib(pid: int) -> int:
    """Return the same as `live_heap_mib`; 0 for a JVM that has ended meanwhile, as a launcher does."""
    try:
        return live_heap_mib(pid)
    except (OSError, ValueError):
        if Path(f"/proc/{pid}").exists():
            raise
        return 0


def live_heap_mib(pid: int) -> int:
    """
    Return what a JVM's heap holds after a full collection, MiB.

    By HotSpot's attach protocol, as `jcmd` uses it, which a runtime without the development tools lacks.
    """
    asked, answers = Path(f"/tmp/.attach_pid{pid}"), Path(f"/tmp/.java_pid{pid}")  # noqa: S108  # the JVM looks there
    if not answers.exists():
        asked.touch()
        os.kill(pid, signal.SIGQUIT)
        give_up_s = time.monotonic() + ATTACH_TIMEOUT_S
        while not answers.exists() and time.monotonic() < give_up_s:
            time.sleep(0.05)
        asked.unlink(missing_ok=True)
    _ask(answers, "GC.run")
    # One line of the whole heap or one a generation, after the collector.
    used = re.findall(r"total \d+K, used (\d+)K", _ask(answers, "GC.heap_info"))
    if not used:
        message = f"cannot read the heap of JVM {pid}: its answer names no used heap"
        raise ValueError(message)
    return sum(map(int, used)) // 1024


def _ask(answers: Path, command: str) -> str:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ATTACH_TIMEOUT_S)
        connection.connect(str(answers))
        # Protocol version, command, three arguments.
        connection.sendall(b"".join(part.encode() + b"\0" for part in ("1", "jcmd", command, "", "")))
        parts = []
        while part := connection.recv(65_536):
            parts.append(part)
    return b"".join(parts).decode(errors="replace")


def main() -> None:
    """Run it and print the verdict."""
    parser = argparse.ArgumentParser(prog="python -m faults.soak")
    parser.add_argument("--minutes", type=float, default=30, help="a third of them is warm-up; at least 6")
    parser.add_argument("--rate", type=int, default=200, help="messages a second")
    options = parser.parse_args()
    # The messages left alone are lost leases, each a line.
    logging.getLogger("kmq_spark.kafka").setLevel(logging.ERROR)
    with EmbeddedBroker() as broker, tempfile.TemporaryDirectory() as folder:
        soak = Soak(broker, Path(folder), options.rate)
        try:
            soak.run(options.minutes)
            verdict = soak.verdict()
        finally:
            soak.tracker.stop()
    sys.stdout.write(json.dumps(verdict) + "\n")
    for reason in verdict["reasons"]:
        sys.stderr.write(f"FAIL  {reason}\n")
    if verdict["is_well"]:
        sys.stderr.write("PASS\n")
    sys.exit(0 if verdict["is_well"] else 1)


if __name__ == "__main__":
    main()
