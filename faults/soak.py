"""
Let a busy queue run for long with nothing broken, and watch what grows: memory, files of the checkpoint, lateness.

    .venv/bin/python -m faults.soak [--minutes 10] [--rate 200]

One message in ten is left alone at its first delivery, so the tracker, a process of its own, redelivers all the time.
A line on stderr every half a minute, one JSON object on stdout at the end. It ends with 1 where a message was lost or
came early, or the tracker started its query again or put its checkpoint aside.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.stage import resident_mib
from faults.processes import TrackerChild
from kmq_spark.demo.audit import audit
from kmq_spark.kafka.consumer import QueueConsumer
from kmq_spark.kafka.producer import QueueProducer
from kmq_spark.kafka.topics import create_queue
from kmq_spark.local.broker import EmbeddedBroker

if TYPE_CHECKING:
    from collections.abc import Callable

    from kmq_spark.kafka.topics import QueueLayout

LEASE_MS = 2_000
LEFT_ALONE = 10
"""One message in so many."""

SAMPLE_S = 30.0
DRAIN_S = 15.0
TROUBLE = ("starting again", "cannot be used", "Ignoring error while performing maintenance")
"""What the tracker's log must not say."""


class Soak:
    """
    A queue under steady load.

    Args:
        broker: Running.
        folder: Of logs and checkpoint.
        rate: Messages sent a second.
    """

    def __init__(self, broker: EmbeddedBroker, folder: Path, rate: int) -> None:
        """Make the queue and start its tracker."""
        self._address, self._rate = broker.bootstrap_servers, rate
        self.layout: QueueLayout = create_queue("soak", bootstrap_servers=self._address, partitions=4)
        self.tracker = TrackerChild(self._address, "soak", folder, max_deliveries=0)
        self.samples: list[dict[str, int]] = []
        self.failures: list[str] = []
        self._sending, self._receiving = threading.Event(), threading.Event()

    def run(self, minutes: float) -> None:
        """Load it for so long, let it come to rest, and end the tracker."""
        if self.tracker.wait_ready() < 0:
            message = f"the tracker did not get ready: {self.tracker.last_words()}"
            raise TimeoutError(message)
        threads = [threading.Thread(target=self._noted, args=(work,)) for work in (self._send, self._receive)]
        for thread in threads:
            thread.start()
        ends_s = time.monotonic() + 60 * minutes
        while time.monotonic() < ends_s and not self.failures:
            time.sleep(min(SAMPLE_S, max(0.0, ends_s - time.monotonic())))
            self._sample()
        self._sending.set()
        threads[0].join()
        time.sleep(DRAIN_S)
        self._receiving.set()
        threads[1].join()
        if self.tracker.stop():
            self.failures.append(f"the tracker ended with {self.tracker.exit_code}: {self.tracker.last_words()}")

    def verdict(self) -> dict[str, object]:
        """Return what the topics and the tracker's log say."""
        found = audit(self.layout, self._address)
        log = self.tracker.log.read_text(errors="replace")
        trouble = {words: log.count(words) for words in TROUBLE if words in log}
        late = {name: found.percentile(share) for name, share in (("p50", 50), ("p99", 99), ("max", 100))}
        return {
            "sent": len(found.sent), "redelivered": found.redelivered, "lost": len(found.lost), "early": found.early,
            "lateness_ms": late, "trouble": trouble, "failures": self.failures, "samples": self.samples,
            "is_well": not (found.lost or found.early or trouble or self.failures),
        }  # fmt: skip

    def _send(self) -> None:
        due_s = time.monotonic()
        with QueueProducer("soak", bootstrap_servers=self._address) as producer:
            while not self._sending.is_set():
                producer.send(bytes(200))
                due_s += 1 / self._rate
                self._sending.wait(max(0.0, due_s - time.monotonic()))

    def _receive(self) -> None:
        with QueueConsumer("soak", bootstrap_servers=self._address, lease_ms=LEASE_MS, keep_alive=False) as consumer:
            while not self._receiving.is_set():
                for message in consumer.receive(100, timeout=0.2):
                    if message.delivery_count > 1 or message.id.message_offset % LEFT_ALONE:
                        message.ack()

    def _noted(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # told in the verdict
            self.failures.append(f"{type(error).__name__}: {error}")

    def _sample(self) -> None:
        sample = {"tracker_jvm_mib": 0, "tracker_python_mib": 0}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if os.getpgid(int(folder.name)) == self.tracker.group:
                    kind = "jvm" if b"java" in (folder / "cmdline").read_bytes()[:200] else "python"
                    sample[f"tracker_{kind}_mib"] += resident_mib(folder)
            except (OSError, IndexError):
                continue
        sample["client_mib"] = resident_mib(Path("/proc/self"))
        sample["checkpoint_files"] = sum(len(files) for _, _, files in os.walk(self.tracker.checkpoint_dir))
        self.samples.append(sample)
        sys.stderr.write(f"{time.strftime('%H:%M:%S')}  {sample}\n")


def main() -> None:
    """Run it and print the verdict."""
    parser = argparse.ArgumentParser(prog="python -m faults.soak")
    parser.add_argument("--minutes", type=float, default=10)
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
    sys.exit(0 if verdict["is_well"] else 1)


if __name__ == "__main__":
    main()
