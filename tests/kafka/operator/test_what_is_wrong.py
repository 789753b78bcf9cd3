"""
Four things that go wrong for minutes: doctor, `top`, status, metrics and health say what is, for as long as it is.

Nobody reads a logical queue; all handlers of a worker hang, for longer than keep-alive holds their messages; a tracker
cannot write its checkpoint; no tracker runs.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from faults.processes import processes_of
from kmq_spark.local.probe import free_port
from tests.kafka.commands import no_process_outlives_its_test, start  # noqa: F401  # a fixture
from tests.kafka.conftest import Queue, consumer_of, receive_all
from tests.kafka.operator.test_commands import checks, kmq
from tests.kafka.worker.test_worker_command import page

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.slow, pytest.mark.long]

LOOKS_S = (30, 120, 300)
SILENT_S = 120
"""Doctor does not call a worker hung that was silent for less than a minute."""

HANGS = """
import sys, time
from kmq_spark import QueueConsumer
from kmq_spark.metrics.exposition import MetricsServer

consumer = QueueConsumer(sys.argv[1], bootstrap_servers=sys.argv[2], lease=5, max_lease=20)
MetricsServer(int(sys.argv[3]), "127.0.0.1", list, health=lambda: consumer.problem)
consumer.run(lambda message: time.sleep(3_600), concurrency=4)
"""


class TrackerOf:
    """A tracker process, and what it serves."""

    def __init__(self, folder: Path, *queues: Queue) -> None:
        self._port = str(free_port())
        self.process = start(
            queues[0].bootstrap_servers, "tracker", "run", *(queue.name for queue in queues), "--events",
            "--metrics-port", self._port, "--checkpoint-dir", str(folder), stderr=None, start_new_session=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        assert json.loads(self.process.stdout.readline())["event"] == "ready"

    def get(self, path: str) -> tuple[int, str]:
        """Return status and text of a page."""
        return page(self._port, path)

    def write_no_file(self) -> None:
        """As with a full disk: the JVM can write nothing any more."""
        (jvm,) = (each.pid for each in processes_of(self.process.pid) if "/bin/java " in each.command)
        resource.prlimit(jvm, resource.RLIMIT_FSIZE, (0, 0))


def held_by_the_dead(queue: Queue) -> None:
    """Send messages, and let the leases of some run out."""
    queue.send(*map(str, range(50)))
    with consumer_of(queue, lease=1, max_lease=1) as consumer:
        receive_all(consumer, 5)
        time.sleep(2)


def top_of(queues: list[Queue]) -> dict[str, dict[str, Any]]:
    """Return what `kmq top` shows of each queue."""
    names = [queue.name for queue in queues]
    frame = json.loads(
        kmq(queues[0].bootstrap_servers, "top", *names, "--once", "--interval", "1s", "-o", "json").stdout
    )
    return {figures["queue"]: figures for figures in frame["queues"]}


def test_all_tools_say_what_is_wrong_for_as_long_as_it_is(make_queue: Callable[..., Queue], tmp_path: Path) -> None:
    unread, hung, unwritable, untracked = queues = [make_queue(partitions=2) for _ in range(4)]
    servers = unread.bootstrap_servers
    tracker, failing = TrackerOf(tmp_path / "good", unread, hung), TrackerOf(tmp_path / "full", unwritable)
    failing.write_no_file()
    unread.send(*map(str, range(100)), logical_queue="emails")
    hung.send(*map(str, range(500)))
    port = str(free_port())
    worker = subprocess.Popen([sys.executable, "-c", HANGS, hung.name, servers, port])
    try:
        for queue in (unwritable, untracked):
            held_by_the_dead(queue)
        began_s = time.monotonic()
        for look_s in LOOKS_S:
            time.sleep(max(0.0, began_s + look_s - time.monotonic()))
            judge(queues, tracker, failing, is_silent=look_s >= SILENT_S)
            code, why = page(port, "/health")
            assert (code, "held for longer than max_lease, 20 s" in why) == (503, True), why
    finally:
        worker.kill()
        worker.wait()


def judge(queues: list[Queue], tracker: TrackerOf, failing: TrackerOf, *, is_silent: bool) -> None:
    """Look with every tool; *is_silent*: the worker has hung for so long that doctor says so."""
    unread, hung, unwritable, untracked = (queue.name for queue in queues)
    servers, top = queues[0].bootstrap_servers, top_of(queues)
    doctor = {queue.name: kmq(servers, "doctor", queue.name, "-o", "json") for queue in queues}
    wrong = {
        name: {check: each["what"] for check, found in checks(result).items() for each in found if each["repair"]}
        for name, result in doctor.items()
    }
    status = [kmq(servers, "tracker", "status", queue.name).exit_code for queue in queues]
    assert status == [0, 0, 3, 3], wrong
    assert (top[unwritable]["tracker"], top[untracked]["tracker"]) == ("failing", "never")
    assert [top[name]["overdue"] for name in (unread, hung, unwritable, untracked)] == [0, 0, 5, 5]
    assert wrong[unread] == {"consumers": "100 messages of logical queue emails ready and no consumer of it"}
    assert {"tracker", "in flight"} <= wrong[unwritable].keys()
    assert {"tracker", "in flight"} <= wrong[untracked].keys()
    assert wrong[hung].keys() == ({"workers"} if is_silent else set())
    assert [result.exit_code for result in doctor.values()] == [3, 3 if is_silent else 0, 3, 3]
    assert tracker.get("/health")[0] == 200
    code, why = failing.get("/health")
    assert (code, "restarting, " in why, "File too large" in why) == (503, True, True), why
    assert f'kmq_messages_ready{{queue="{unread}"}} 100.0' in tracker.get("/metrics")[1]
