"""The tracker on executors in other processes: `spark-submit.sh` with a cluster, and the package sent along."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kmq_spark.consumer.consumer import QueueConsumer
from kmq_spark.kafka.topics import create_queue_topics
from kmq_spark.producer.producer import QueueProducer
from tests.kafka.stage import receive_all
from tests.limits import ENDS_S
from tests.spark.clusters import ROOT, cluster_environment, plain_interpreter, spark_home, standalone_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(1200)]

LEASE_MS = 1_000

FOR_SPARK = {
    "standalone": ["--conf", "spark.executor.memory=512m", "--conf", "spark.executor.cores=2"],
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


@pytest.fixture(params=["standalone", pytest.param("local-cluster[2,1,1024]", marks=pytest.mark.long)])
def tracker(request: pytest.FixtureRequest, tmp_path: Path, queue: str, bootstrap_servers: str) -> Iterator[Submitting]:
    """The tracker of the queue, to be submitted to a cluster."""
    home = spark_home(tmp_path)
    arguments = [queue, "--bootstrap-server", bootstrap_servers, "--checkpoint-dir", str(tmp_path / "checkpoint")]
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
def test_tracker_outlives_a_killed_executor(
    tracker: Submitting, consumer: QueueConsumer, queue: str, bootstrap_servers: str, tmp_path: Path
) -> None:
    """`kill -9` during the run: a new executor loads the state from the checkpoint, and no message is lost."""
    with tracker.running() as process, QueueProducer(queue, bootstrap_servers=bootstrap_servers) as producer:
        wait_for_line(process, '{"event": "ready"')
        (executor,) = executors(tmp_path)
        producer.send("dropped")
        (dropped,) = receive_all(consumer, 1)
        os.kill(executor, signal.SIGKILL)
        (again,) = receive_all(consumer, 1)
        assert (again.value, again.delivery_count) == (dropped.value, 2)
        again.ack()
        assert executors(tmp_path) != [executor]
        assert consumer.receive(1, timeout=2.0) == []


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


def executors(folder: Path) -> list[int]:
    """Return the executors that run in the folder of a test, as process ids."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_ours = (process / "cwd").readlink().is_relative_to(folder / "work")
            if is_ours and b"CoarseGrainedExecutorBackend" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found
