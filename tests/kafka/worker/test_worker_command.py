"""`kmq worker` as a process of its own on a real broker: what handlers and their processes do, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

from kmq_spark import list_dead_letters
from kmq_spark.consumer.consumer import QueueConsumer
from kmq_spark.core.markers import MarkerType, Release
from kmq_spark.errors import KmqError
from kmq_spark.local.probe import free_port
from kmq_spark.worker import processes
from kmq_spark.worker.child import Start
from tests.kafka.commands import no_process_outlives_its_test, start  # noqa: F401  # a fixture
from tests.kafka.conftest import Queue, ended, given_back, stopped_if_it_hangs, track, tracked, wait_until
from tests.limits import COMES_S, ENDS_S

pytestmark = pytest.mark.kafka

ONE_SECOND = {"KMQ_WORKER__LEASE": "1", "KMQ_WORKER__MAX_LEASE": "1"}

HUNG = "handler process was killed: its handler hung until max_lease, 20 s"

HANDLERS = """
import asyncio, os, signal, sys, time
from kmq_spark import Reject, Retry

results = os.open("results", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def say(event, message):
    os.write(results, f"{event} {message.value.decode()} {message.delivery_count} {os.getpid()}\\n".encode())

def work(message):
    say("begun", message)
    time.sleep(0.02)
    say("done", message)

async def wait(message):
    await asyncio.sleep(0.01)
    say("done", message)

def slow(message):
    say("begun", message)
    time.sleep(3)
    say("done", message)

def deaf(message):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say("begun", message)
    time.sleep(1000)

class Unpicklable(Exception):
    def __init__(self, what, why):
        super().__init__(f"{what}: {why}")
        self.callback = lambda: None

def odd(message):
    value = message.value.decode()
    if message.delivery_count == 1:
        if value == "killed": os.kill(os.getpid(), signal.SIGKILL)
        if value == "exit": os._exit(3)
        if value == "sys.exit": sys.exit(0)
        if value == "unpicklable": raise Unpicklable("database", "away")
        if value == "retry": raise Retry("busy", delay=1)
        if value == "reject": raise Reject("no such customer")
        if value == "by-hand": message.reject("broken")
        if value == "megabytes": print("x" * 5_000_000); print("y" * 5_000_000, file=sys.stderr)
    say("done", message)

def store(batch):
    if "killed" in map(bytes.decode, batch.values()): os.kill(os.getpid(), signal.SIGKILL)
    for message in batch: say("done", message)
    return {index: "second" for index, value in enumerate(batch.values()) if value == b"two"}
"""


class Worker:
    """A `kmq worker` of a test's module of handlers, which write what they do into a file."""

    def __init__(self, queue: Queue, folder: Path, handler: str, *options: str, **settings: str) -> None:
        self.folder = folder
        (folder / "shop.py").write_text(HANDLERS)
        self.log = folder / "log"
        with (folder / "output").open("ab") as output, self.log.open("ab") as log:
            self.process = start(
                queue.bootstrap_servers, "worker", f"shop:{handler}", queue.name, *options,
                cwd=folder, stdout=output, stderr=log, env={**os.environ, **settings}, start_new_session=True,
            )  # fmt: skip

    def lines(self) -> list[list[str]]:
        """Return the whole lines that handlers have written: event, value, delivery count, process."""
        file = self.folder / "results"
        return [line.split() for line in file.read_text().splitlines()] if file.exists() else []

    def done(self) -> Counter[str]:
        """Return how often each message was done."""
        return Counter(line[1] for line in self.lines() if line[0] == "done")

    def stop(self) -> int:
        """Send SIGTERM to the command and all its processes, as systemd does; return the exit code."""
        os.killpg(self.process.pid, signal.SIGTERM)
        return self.process.wait(ENDS_S)


def reasons(queue: Queue) -> list[str]:
    """Return why deliveries failed, without the numbers of processes."""
    found = [each.marker for each in queue.markers(MarkerType.KEEPALIVE)]
    texts = [each.reason for each in found if each.release is Release.FAILED]
    return sorted(re.sub("process [0-9]+", "process", text) for text in texts)


def test_handler_process_killed_under_load_loses_nothing(queue: Queue, tmp_path: Path) -> None:
    """500 messages of one partition in four processes: the message of the killed one comes again, no other does."""
    values = [f"m{number}" for number in range(500)]
    queue.send(*values)
    worker = Worker(queue, tmp_path, "work", "--processes", "4")
    assert wait_until(lambda: len(worker.done()) > 50)
    victim, value = 0, ""
    while not value:
        *_, last = [line for line in worker.lines() if line[0] == "begun"]
        os.kill(int(last[3]), signal.SIGSTOP)
        *_, (event, name, _, process) = [line for line in worker.lines() if line[3] == last[3]]
        if event == "begun":
            victim, value = int(process), name
        os.kill(int(last[3]), signal.SIGCONT if not value else signal.SIGKILL)

    def is_replaced() -> bool:
        queue.send("more")
        return len({line[3] for line in worker.lines()}) == 5

    with tracked(queue):
        assert wait_until(lambda: set(worker.done()) == set(values))
    assert wait_until(is_replaced)
    assert worker.stop() == 0
    begun = Counter(line[1] for line in worker.lines() if line[0] == "begun" and line[1] != "more")
    assert {name: count for name, count in begun.items() if count > 1} == {value: 2}
    assert (f"done {value} 2", worker.done()[value]) in [(" ".join(line[:3]), 1) for line in worker.lines()]
    assert reasons(queue) == ["handler process was ended by SIGKILL"]
    assert f"handler process {victim} was ended by SIGKILL; it was handling <Message 0:" in worker.log.read_text()
    assert ended(queue)[:501] == list(range(501))  # the copy of the killed one's message is the last
    for pid in {int(line[3]) for line in worker.lines()}:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_whatever_a_handler_does_in_its_process_ends_its_message_alone(queue: Queue, tmp_path: Path) -> None:
    values = [
        "killed", "exit", "sys.exit", "unpicklable", "retry", "reject", "by-hand", "megabytes",
        *(f"m{number}" for number in range(20)),
    ]  # fmt: skip
    queue.send(*values)
    port = str(free_port())
    worker = Worker(queue, tmp_path, "odd", "--processes", "3", "--metrics-port", port, "--log-format", "json")
    with tracked(queue):
        assert wait_until(lambda: {*values} - {*worker.done()} == {"reject"}), {*values} - {*worker.done()}

    def failures(error: str) -> list[str]:
        sample = rf'kmq_handler_failures_total{{error="{error}",queue="{queue.name}"}} (\S+)'
        return re.findall(sample, page(port, "/metrics")[1])

    assert (failures("ProcessOverError"), failures("Unpicklable")) == (["3.0"], ["1.0"])
    assert worker.stop() == 0
    track(queue)  # writes the dead letter of what was rejected last
    again = {line[1] for line in worker.lines() if line[2] == "2"}
    assert again >= {"killed", "exit", "sys.exit", "unpicklable", "retry"}
    assert {*reasons(queue)} == {
        "Unpicklable: database: away", "busy", "handler process ended with exit code 0",
        "handler process ended with exit code 3", "handler process was ended by SIGKILL",
    }  # fmt: skip
    letters = list_dead_letters(queue.name, bootstrap_servers=queue.bootstrap_servers)
    assert {(letter.value, letter.reason) for letter in letters} == {
        (b"reject", "no such customer"),
        (b"by-hand", "broken"),
    }
    assert (tmp_path / "output").read_bytes() == b"x" * 5_000_000 + b"\n"
    said = [json.loads(line) for line in worker.log.read_text().splitlines() if not line.startswith("yyy")]
    assert all(line.keys() >= {"time", "level", "message"} for line in said), said
    assert {line["queue"] for line in said} == {queue.name}
    failed = {(line["action"], line["origin"]) for line in said if "origin" in line}
    assert failed == {
        *(("handler_process_ended", f"0:{offset}") for offset in range(3)),
        *(("handler_failed", f"0:{offset}") for offset in (3, 4, 5)),
    }


def test_reason_of_a_handler_that_hung_is_stored_with_its_message_which_comes_again(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process ignores SIGTERM, and is killed."""
    monkeypatch.setattr(processes, "HANG_MARGIN_S", 9.0)  # a loaded machine may need more than half a second
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "hanging.py").write_text(
        "import signal, time\n"
        "def handle(message):\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    time.sleep(1000)\n"
    )
    queue.send("a")
    handlers = processes.HandlerProcesses(Start("hanging:handle", False, 20, None), 1, 20)  # noqa: FBT003  # a tuple
    handlers.start()
    consumer = QueueConsumer(queue.name, bootstrap_servers=queue.bootstrap_servers, lease=20, max_lease=20)
    run = threading.Thread(target=consumer.run, args=(handlers,), kwargs={"concurrency": 1}, daemon=True)
    run.start()
    try:
        assert wait_until(lambda: reasons(queue) == [HUNG]), reasons(queue)
    finally:
        consumer.stop()
        run.join(COMES_S)
        handlers.close()
    assert not run.is_alive()
    assert wait_until(lambda: track(queue).redelivered == 1)


def test_process_of_a_handler_that_hangs_is_killed_at_the_limit_of_the_settings(queue: Queue, tmp_path: Path) -> None:
    queue.send("a")
    worker = Worker(queue, tmp_path, "deaf", "--processes", "1", **ONE_SECOND)
    assert wait_until(lambda: "its handler hung until max_lease, 1 s" in worker.log.read_text())
    assert worker.stop() == 0


def test_batch_that_kills_its_process_is_handled_one_by_one(queue: Queue, tmp_path: Path) -> None:
    """The others are done, and the killer is named."""
    queue.send("one", "two", "killed", "three")
    worker = Worker(queue, tmp_path, "store", "--processes", "1", "--batch", "10")
    assert wait_until(lambda: len(reasons(queue)) == 2)
    assert worker.stop() == 0
    assert worker.done() == {"one": 1, "two": 1, "three": 1}
    assert reasons(queue) == ["handler process was ended by SIGKILL", "second"]
    assert ended(queue) == [0, 3]
    assert "it was handling <Batch of 1 messages, the first is 0:2" in worker.log.read_text()


def page(port: str, path: str) -> tuple[int, str]:
    """Return status and text of a page; status 0 while the port is closed."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:  # our own page
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def test_coroutine_function_runs_and_the_worker_shows_health_and_metrics(queue: Queue, tmp_path: Path) -> None:
    """A stop is a success."""
    queue.send(*map(str, range(50)))
    ports = str(free_port()), str(free_port())
    worker = Worker(
        queue, tmp_path, "wait", "--concurrency", "20", "--metrics-port", ports[0], "--health-port", ports[1]
    )
    assert wait_until(lambda: len(worker.done()) == 50)
    assert page(ports[0], "/health") == page(ports[1], "/health") == (200, "ok\n")
    metrics = page(ports[0], "/metrics")[1]
    assert f'kmq_deliveries_total{{component="worker",queue="{queue.name}"}} 50.0' in metrics
    assert f'kmq_handler_duration_seconds_count{{queue="{queue.name}"}} 50.0' in metrics
    assert page(ports[1], "/metrics") == (200, "")
    assert worker.stop() == 0


def test_health_names_messages_that_a_handler_has_not_let_go(queue: Queue, tmp_path: Path) -> None:
    queue.send("one")
    port = str(free_port())
    worker = Worker(queue, tmp_path, "slow", "--health-port", port, **ONE_SECOND)
    assert wait_until(lambda: page(port, "/health") == (503, "1 message(s) held for longer than max_lease, 1 s\n"))
    assert wait_until(lambda: worker.done() == {"one": 1} and page(port, "/health") == (200, "ok\n"))
    assert worker.stop() == 0


def test_sigterm_waits_for_running_handlers_and_gives_the_rest_back(queue: Queue, tmp_path: Path) -> None:
    """The signal goes to the handler processes too."""
    queue.send(*map(str, range(10)))
    worker = Worker(queue, tmp_path, "slow", "--processes", "2")
    assert wait_until(lambda: len(worker.lines()) >= 2)
    assert worker.stop() == 0
    begun = Counter(line[1] for line in worker.lines() if line[0] == "begun")
    assert begun == worker.done()
    assert ended(queue) == sorted(map(int, begun))


def test_handler_process_that_ignores_sigterm_is_killed_and_its_message_comes_again(
    queue: Queue, tmp_path: Path
) -> None:
    queue.send("a")
    worker = Worker(queue, tmp_path, "deaf", "--processes", "1", KMQ_WORKER__DRAIN_TIMEOUT="0.5")
    assert wait_until(lambda: len(worker.lines()) == 1)
    assert worker.stop() == 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(worker.lines()[0][3]), 0)
    assert ended(queue) == []
    assert track(queue).redelivered == 1


def test_processes_that_die_in_their_start_end_the_run_with_the_reason(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All starts fail after a first one that did not; the message of the run is given back, uncounted."""
    monkeypatch.setattr(processes, "MAX_STARTS", 2)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    (tmp_path / "dying.py").write_text(
        "import os\n"
        "with open(os.environ['STARTS'], 'a') as file: file.write('.')\n"
        "if os.path.getsize(os.environ['STARTS']) > 1: os._exit(7)\n"
        "def handle(message): os._exit(1)\n"
    )
    queue.send("a", "b")
    handlers = processes.HandlerProcesses(Start("dying:handle", False, 20, None), 1, 600)  # noqa: FBT003  # a tuple
    handlers.start()
    assert handlers.wait_ready(COMES_S)
    consumer = QueueConsumer(queue.name, bootstrap_servers=queue.bootstrap_servers)
    handlers.attach(consumer)
    with stopped_if_it_hangs(consumer):
        consumer.run(handlers, concurrency=1)
    handlers.close()
    assert isinstance(handlers.error, KmqError)
    assert re.search("process [0-9]+ ended with exit code 7 in its start, 2 times", str(handlers.error))
    assert (tmp_path / "starts").read_text() == "." * 3
    assert reasons(queue) == ["handler process ended with exit code 1"]
    assert given_back(queue) == [1]


def test_handler_whose_answer_nobody_can_use_ends_the_command_with_1(queue: Queue, tmp_path: Path) -> None:
    queue.send("a")
    (tmp_path / "lazy.py").write_text("def handle(message): return (each for each in 'ab')\n")
    done = start(
        queue.bootstrap_servers, "worker", "lazy:handle", queue.name, "--processes", "1", cwd=tmp_path
    )  # fmt: skip
    _, log = done.communicate(timeout=ENDS_S)
    assert done.returncode == 1
    assert log.decode().splitlines()[-1].startswith("kmq: handler returned work that has not run: got generator for")
    (release,) = queue.markers(MarkerType.KEEPALIVE)
    assert release.marker.never_handed_out


def test_reload_starts_the_worker_again_with_the_changed_handler(queue: Queue, tmp_path: Path) -> None:
    worker = Worker(queue, tmp_path, "work", "--reload")
    queue.send("first")
    assert wait_until(lambda: "first" in worker.done())
    (tmp_path / "shop.py").write_text(HANDLERS.replace('say("done", message)', 'say("changed", message)'))
    assert wait_until(lambda: "changed: the worker starts again" in worker.log.read_text())
    queue.send("second")
    with tracked(queue):  # the worker that ends may have fetched it, and gives it back
        assert wait_until(lambda: any(line[:2] == ["changed", "second"] for line in worker.lines()))
    assert worker.stop() == 0
