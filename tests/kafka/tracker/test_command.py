"""`kmq tracker run` as users run it: a process, signals, exit codes and readable lines."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from faults.processes import processes_of
from kmq_spark.cli.main import app
from tests.kafka.conftest import consumer_of, receive_all, wait_until
from tests.limits import ENDS_S

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kafka.conftest import Queue

pytestmark = [pytest.mark.spark, pytest.mark.kafka]

WORKER_CUT_SHORT = re.compile(r"Traceback .*\n(  File .*pyspark/daemon.py.*\n)*(BrokenPipeError.*\n|\Z)")
"""
What a Python worker of Spark prints whose task is cut short; only where the query is stopped in mid-batch.

It is killed soon after, so these words may themselves be cut short, and are the last ones then.
"""

NOISE = ("Traceback", "\tat ", "py4j", "StreamingQueryException", "Exception in thread", "[Stage ")


class Tracker:
    """A tracker process, with what it wrote."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        self._errors = (folder / f"tracker-{time.time_ns()}.log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kmq_spark.cli.main", "tracker", "run", *arguments],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
            env={**os.environ, **environment},
        )

    def wait_ready(self) -> None:
        """Wait until it has read the markers of before its start."""
        assert self.process.stdout is not None
        assert json.loads(self.process.stdout.readline() or "{}").get("event") == "ready", self.errors()

    def wait_end(self) -> tuple[int, dict[str, Any]]:
        """Return exit code and the last event, empty for none."""
        out, _ = self.process.communicate(timeout=ENDS_S)
        lines = out.splitlines()
        return self.process.returncode, json.loads(lines[-1]) if lines else {}

    def errors(self) -> str:
        """Return what it wrote to stderr."""
        self._errors.seek(0)
        return self._errors.read()

    def error_lines(self) -> list[str]:
        """Return the error lines of `kmq`, and check that no stack was printed."""
        errors = WORKER_CUT_SHORT.sub("", self.errors())
        assert not [noise for noise in NOISE if noise in errors], errors
        return [line for line in errors.splitlines() if line.startswith("kmq: ")]

    def close(self) -> None:
        """End it whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        self._errors.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Tracker]]:
    """Start trackers that end with the test."""
    started: list[Tracker] = []

    def start(*arguments: str, **environment: str) -> Tracker:
        started.append(Tracker(tmp_path, *arguments, **environment))
        return started[-1]

    yield start
    for tracker in started:
        tracker.close()


def arguments_of(queue: Queue, folder: Path, *more: str) -> list[str]:
    """Return the arguments of a tracker of a queue."""
    return [
        *(queue.name, "--events", "--bootstrap-server", queue.bootstrap_servers, "--checkpoint-dir", str(folder)),
        *more,
    ]


@pytest.mark.slow
def test_ctrl_c_ends_the_tracker_well(queue: Queue, start: Callable[..., Tracker], tmp_path: Path) -> None:
    """SIGINT goes to the whole process group, the JVM and Spark's workers included; the exit code is 0."""
    tracker = start(*arguments_of(queue, tmp_path / "checkpoint"))
    tracker.wait_ready()
    os.killpg(tracker.process.pid, signal.SIGINT)
    exit_code, event = tracker.wait_end()
    assert (exit_code, event["event"], tracker.error_lines()) == (0, "ended", [])
    assert f"tracker of {queue.name} ended" in tracker.errors()


@pytest.mark.slow
def test_queue_without_its_topics_is_named_and_the_others_are_tracked(
    queue: Queue, start: Callable[..., Tracker], tmp_path: Path
) -> None:
    queue.send("a")
    tracker = start("nope", *arguments_of(queue, tmp_path / "checkpoint", "--log-format", "json"))
    tracker.wait_ready()
    assert "tracker of nope has ended, the others go on: queue 'nope' is not set up correctly" in tracker.errors()
    with consumer_of(queue, lease=1, max_lease=1) as consumer:
        receive_all(consumer, 1)
        assert receive_all(consumer, 1)[0].delivery_count == 2
    tracker.process.terminate()
    exit_code, _ = tracker.wait_end()
    assert exit_code == 1
    # What Java writes stays text.
    ours = [line for line in tracker.errors().splitlines() if line.startswith("{") or "kmq_spark" in line]
    lines = [json.loads(line) for line in ours]
    assert all(line.keys() >= {"time", "level", "message"} for line in lines), lines
    found = {(line.get("action"), line.get("queue")) for line in lines}
    assert found >= {("ready", queue.name), ("redelivered", queue.name), ("failed", None)}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_while_spark_starts_ends_it_too(
    queue: Queue, start: Callable[..., Tracker], tmp_path: Path, number: signal.Signals
) -> None:
    """As a terminal and systemd send it: to the JVM too."""
    tracker = start(*arguments_of(queue, tmp_path / "checkpoint"))
    assert wait_until(lambda: any(use.is_jvm for use in processes_of(tracker.process.pid)))
    os.killpg(tracker.process.pid, number)
    exit_code, _ = tracker.wait_end()
    assert tracker.error_lines() == []
    assert exit_code in {0, 130}  # 130: before it had begun to listen


@pytest.mark.slow
def test_tracker_that_was_killed_is_distinguished_from_one_that_idles_and_one_that_was_stopped(
    queue: Queue, start: Callable[..., Tracker], tmp_path: Path
) -> None:
    """The heartbeat differs: `tracker status` and `doctor` end with exit code 3 once the tracker is gone."""
    queue.send("held", "held too")
    with consumer_of(queue, lease=1, max_lease=1) as consumer:
        killed = start(*arguments_of(queue, tmp_path / "checkpoint"))
        killed.wait_ready()
        assert f"tracker of {queue.name} is ready: 0 in flight, took " in killed.errors()
        # It is ready before its first heartbeat is there.
        assert wait_until(lambda: status(queue)[0] == 0 and "the tracker runs, last heartbeat" in status(queue)[1])
        killed.process.kill()
        killed.process.wait()
        receive_all(consumer, 2)
        gone = re.compile(r"no tracker for [\d.]+ s, 2 overdue")
        assert wait_until(lambda: bool(gone.search(status(queue)[1])))
        assert status(queue)[0] == 3
        exit_code, text = command(queue, "doctor", queue.name)
        assert exit_code == 3
        assert gone.search(text)
    stopped = start(*arguments_of(queue, tmp_path / "checkpoint"))
    stopped.wait_ready()
    assert wait_until(lambda: status(queue)[0] == 0)
    stopped.process.terminate()
    stopped.wait_end()
    assert "Failed to acquire transactional PID" not in stopped.errors()
    assert "BrokenPipeError" not in stopped.errors()
    assert wait_until(lambda: "the tracker was stopped" in status(queue)[1])


def status(queue: Queue) -> tuple[int, str]:
    """Return exit code and text of `kmq tracker status`."""
    return command(queue, "tracker", "status", queue.name)


def command(queue: Queue, *arguments: str) -> tuple[int, str]:
    """Return exit code and text of a command."""
    result = CliRunner().invoke(app, [*arguments, "--bootstrap-server", queue.bootstrap_servers], prog_name="kmq")
    return result.exit_code, result.stdout


def test_unreachable_broker_is_one_line_at_once(start: Callable[..., Tracker], tmp_path: Path) -> None:
    """The command ends before a JVM is started, and without a retry."""
    no_java = {"JAVA_HOME": str(tmp_path), "PATH": str(tmp_path)}
    tracker = start("orders", "--bootstrap-server", "127.0.0.1:1", KMQ_KAFKA__TIMEOUT="1.5", **no_java)
    exit_code, _ = tracker.wait_end()
    (line,) = tracker.error_lines()
    assert exit_code == 1
    assert "cannot reach broker at 127.0.0.1:1: " in line
    assert len(tracker.errors().splitlines()) <= 2  # the client's own log may have one


def test_tracker_without_its_topics_names_the_command_that_makes_them(
    bootstrap_servers: str, start: Callable[..., Tracker]
) -> None:
    tracker = start("not-there", "--bootstrap-server", bootstrap_servers)
    exit_code, _ = tracker.wait_end()
    (line,) = tracker.error_lines()
    assert exit_code == 1
    assert "topic 'not-there' does not exist; run `kmq queue create not-there`" in line


@pytest.mark.slow
def test_failing_query_is_logged_in_a_line_each_time_and_ends_after_the_limit(
    queue: Queue, start: Callable[..., Tracker], tmp_path: Path
) -> None:
    """A checkpoint folder that cannot be created: Spark's stack is not printed, our line has its first line."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    tracker = start(*arguments_of(queue, blocked), KMQ_TRACKER__RESTART_LIMIT="1")
    exit_code, _ = tracker.wait_end()
    (line,) = tracker.error_lines()
    assert exit_code == 1
    assert f"tracker of {queue.name} failed 2 times in a row: got " in line
    assert tracker.errors().count("failed; restarting in 0.25 s (restart 1 of 1): ") == 1
