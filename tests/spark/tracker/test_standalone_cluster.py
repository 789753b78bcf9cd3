"""The tracker on executors in other processes: `spark-submit.sh` with a cluster, and the package sent along."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kmq_spark.consumer.consumer import QueueConsumer
from kmq_spark.kafka.topics import create_queue_topics
from kmq_spark.producer.producer import QueueProducer
from tests.kafka.conftest import wait_until
from tests.kafka.stage import receive_all
from tests.limits import ENDS_S
from tests.spark.clusters import (
    ROOT,
    WORK_FOLDERS,
    cluster_environment,
    hostile_defaults,
    plain_interpreter,
    spark_home,
    standalone_cluster,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(1200)]

LEASE_MS = 1_000
EXECUTOR = "CoarseGrainedExecutorBackend"

FOR_SPARK = {
    "standalone": ["--conf", "spark.executor.memory=512m"],
    # Two executors, each in a worker of its own.
    "local-cluster[2,1,1024]": ["--conf", "spark.executor.memory=1g"],
}


class Submitting:
    """What one test submits: always the same tracker, on the same cluster, with the same checkpoint."""

    def __init__(self, folder: Path, home: Path, master: str, options: list[str], arguments: list[str]) -> None:
        self._log = folder / "driver.log"
        self._command = [
            *(str(ROOT / "spark-submit.sh"), "--master", master, "--conf", "spark.driver.host=127.0.0.1", *options),
            *(str(ROOT / "jobs" / "redelivery_tracker.py"), *arguments, "--events"),
        ]
        self._environment = {
            **cluster_environment(home),
            "SPARK_CONF_DIR": str(hostile_defaults(folder)),
            "KMQ_DRIVER_MEMORY": "1g",
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "PYSPARK_PYTHON": str(plain_interpreter(folder)),
        }

    @contextmanager
    def running(self, **environment: str) -> Iterator[subprocess.Popen[str]]:
        """Submit it; whatever of it is still there at the end is ended."""
        with self._log.open("a") as log:
            process = subprocess.Popen(
                self._command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env={**self._environment, **environment},
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
            try:
                process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()

    def run_once(self) -> dict[str, Any]:
        """Handle what is there, and return the event with which it ended."""
        with self.running(KMQ_TRACKER__TRIGGER="available-now") as process:
            out, _ = process.communicate(timeout=ENDS_S)
            assert process.returncode == 0, out + self.logs()
            # spark-submit sends what the driver writes to stderr to stdout too.
            (event,) = [json.loads(line) for line in out.splitlines() if line.startswith('{"event": "ended"')]
            ended: dict[str, Any] = event
            return ended

    def logs(self) -> str:
        """Return the end of what it wrote to stderr."""
        return self._log.read_text()[-6_000:]


@pytest.fixture
def queue(bootstrap_servers: str) -> str:
    """A queue of two partitions."""
    create_queue_topics(name := f"cluster-{time.time_ns()}", bootstrap_servers=bootstrap_servers, partitions=2)
    return name


@pytest.fixture(params=["standalone", "local-cluster[2,1,1024]"])
def tracker(request: pytest.FixtureRequest, tmp_path: Path, queue: str, bootstrap_servers: str) -> Iterator[Submitting]:
    """The tracker of the queue, to be submitted to a cluster."""
    home = spark_home(tmp_path)
    arguments = [queue, "--bootstrap-server", bootstrap_servers, "--checkpoint-dir", "/checkpoints"]
    with ExitStack() as running:
        master = request.param
        if master == "standalone":
            master = running.enter_context(standalone_cluster(tmp_path, home))
        yield Submitting(tmp_path, home, master, FOR_SPARK[request.param], arguments)


@pytest.fixture
def consumer(queue: str, bootstrap_servers: str) -> Iterator[QueueConsumer]:
    """A consumer whose leases run out."""
    with QueueConsumer(
        queue, bootstrap_servers=bootstrap_servers, lease=LEASE_MS / 1000, max_lease=LEASE_MS / 1000
    ) as consumer:
        yield consumer


@pytest.mark.long
def test_dropped_message_is_seen_again_exactly_once_from_executors_without_our_package(
    tracker: Submitting, consumer: QueueConsumer, queue: str, bootstrap_servers: str
) -> None:
    """The second run starts from the checkpoint of the first, with new executors, and decides nothing."""
    with QueueProducer(queue, bootstrap_servers=bootstrap_servers) as producer:
        producer.send("dropped")
        producer.send("done")
    dropped, done = sorted(receive_all(consumer, 2), key=lambda message: message.value != b"dropped")
    done.ack()
    time.sleep(2 * LEASE_MS / 1000)
    assert tracker.run_once()["queues"][queue]["redelivered"] == 1
    (again,) = receive_all(consumer, 1)
    assert (again.value, again.delivery_count) == (dropped.value, 2)
    again.ack()
    ended = tracker.run_once()["queues"][queue]
    assert (ended["redelivered"], ended["dead_lettered"], ended["restarts"]) == (0, 0, 0)
    assert consumer.receive(1, timeout=2.0) == []


@pytest.mark.parametrize("tracker", ["standalone"], indirect=True)
def test_tracker_outlives_a_killed_executor_and_a_killed_worker(
    tracker: Submitting, consumer: QueueConsumer, queue: str, bootstrap_servers: str, tmp_path: Path
) -> None:
    """
    `kill -9` under load: state comes from the checkpoint, and what was dropped comes again, exactly once.

    The checkpoint is of an earlier run, with other executors.
    """
    sent: list[int] = []
    seen: Counter[tuple[int, int]] = Counter()
    work = [tmp_path / name for name in WORK_FOLDERS]

    def have_come(count: int) -> bool:
        """Send one more, as long as there are fewer; handle what comes, and drop every third one."""
        if (number := len(sent)) < count:
            sent.append(number)
            producer.send(str(number))
        for message in consumer.receive(20, timeout=0.1):
            seen[number := int(message.value or b""), message.delivery_count] += 1
            if number % 3 or message.delivery_count > 1:  # on a slow machine more leases run out
                message.ack()
        return all(seen[number, 1] and (number % 3 or seen[number, 2]) for number in range(count))

    with QueueProducer(queue, bootstrap_servers=bootstrap_servers) as producer:
        assert wait_until(lambda: have_come(2) or len(seen) == 2)
        time.sleep(2 * LEASE_MS / 1000)
        ended = tracker.run_once()["queues"][queue]
        assert (ended["redelivered"], ended["dead_lettered"], ended["restarts"]) == (1, 0, 0)
        assert wait_until(lambda: have_come(2))
        with tracker.running() as process:
            wait_for_line(process, '{"event": "ready"')
            assert wait_until(lambda: have_come(30))
            first = processes(work[0], EXECUTOR)
            for folder, word in ((work[0], EXECUTOR), (work[1], "")):
                wait_until(lambda: have_come(len(sent) + 10), timeout=1)  # some are in flight
                for each in processes(folder, word):
                    with suppress(ProcessLookupError):  # a Python worker ends with its executor
                        os.kill(each, signal.SIGKILL)
                count = len(sent) + 200
                assert wait_until(lambda count=count: have_come(count))  # type: ignore[misc]
            assert processes(work[0], EXECUTOR) not in ([], first)
            assert processes(work[1]) == []
            wait_until(lambda: not have_come(0), timeout=2)  # what comes too often
    assert set(seen.values()) == {1}


def wait_for_line(process: subprocess.Popen[str], start: str) -> None:
    """Read what it writes until a line begins so, and go on reading, so that it never waits for us."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(start):
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return
    raise AssertionError("".join(lines))


def processes(work: Path, word: str = "") -> list[int]:
    """Return the processes of a worker, itself among them, with a word in the command line."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (process / "cmdline").read_bytes().decode(errors="replace")
            is_in = (process / "cwd").readlink().is_relative_to(work) or f"--work-dir\0{work}\0" in command
            if is_in and word in command:
                found.append(int(process.name))
    return found
