"""The programs in `examples/`, run as a user runs them, on a real broker."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING

import httpx
import pytest

from kmq_spark import QueueProducer, create_queue, list_dead_letters
from kmq_spark.local.probe import free_port
from tests.kafka.conftest import Queue, ended, read_all, tracked, wait_until
from tests.limits import COMES_S, ENDS_S

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.kafka

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"


class Program:
    """A program that runs, and what it has printed."""

    def __init__(self, log: Path, *arguments: str, **environment: str) -> None:
        self._log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, *arguments], cwd=EXAMPLES, stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            )  # fmt: skip

    @property
    def lines(self) -> list[str]:
        """What it and those before it have printed."""
        return self._log.read_text().splitlines()

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self.process.kill()
        self.process.wait(ENDS_S)


@contextmanager
def running(log: Path, *arguments: str, **environment: str) -> Iterator[Program]:
    """Run a program in a block, at whose end SIGTERM must stop it well."""
    program = Program(log, *arguments, **environment)
    try:
        yield program
        program.process.send_signal(signal.SIGTERM)
        assert program.process.wait(ENDS_S) in (0, -signal.SIGTERM)
    finally:
        program.kill()
    assert "Traceback" not in "\n".join(program.lines)


def lease_of_two_seconds(queue: Queue) -> None:
    create_queue(queue.name, bootstrap_servers=queue.bootstrap_servers, rules={"lease": 2})


def reasons(queue: Queue) -> list[str]:
    return [letter.reason for letter in list_dead_letters(queue.name, bootstrap_servers=queue.bootstrap_servers)]


class Invoices:
    """An HTTP service that is slow, is busy and down at first, and refuses order 13."""

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()
        self.most_at_once = 0
        calls: Counter[str] = Counter()
        at_once, lock = 0, Lock()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                nonlocal at_once
                order = self.rfile.read(int(self.headers["Content-Length"])).decode()
                with lock:
                    at_once += 1
                    service.most_at_once = max(service.most_at_once, at_once)
                    calls[self.headers["Idempotency-Key"]] += 1
                    is_first = calls[self.headers["Idempotency-Key"]] == 1
                time.sleep(0.3)
                number = int(order.split()[1])
                status = 400 if number == 13 else {0: 503, 1: 429}.get(number % 10, 200) if is_first else 200
                with lock:
                    at_once -= 1
                    service.taken[order] += status == 200
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)


def test_async_worker_calls_a_slow_service_and_retries(queue: Queue, tmp_path: Path) -> None:
    service = Invoices()
    Thread(target=service.server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{service.server.server_port}"
    orders = [f"order {number}" for number in range(40)]
    queue.send(*orders)
    with (
        service.server,
        tracked(queue),
        running(tmp_path / "log", "async_worker.py", queue.name, queue.bootstrap_servers, url),
    ):
        assert wait_until(lambda: service.taken.total() == 39 and len(reasons(queue)) == 1)
        service.server.shutdown()
    assert service.taken == {order: order != "order 13" for order in orders}
    assert service.most_at_once > 8
    assert reasons(queue) == ["refused with 400: "]


def test_recurring_job_neither_stops_nor_doubles_when_its_worker_is_killed(queue: Queue, tmp_path: Path) -> None:
    lease_of_two_seconds(queue)
    log, place = tmp_path / "log", (queue.name, queue.bootstrap_servers)
    Program(log, "instead_of_cron.py", *place, "start", "report", "1").process.wait(ENDS_S)
    with tracked(queue):
        first = Program(log, "instead_of_cron.py", *place, "work")
        try:
            assert wait_until(lambda: len(first.lines) >= 2)
        finally:
            first.kill()
        ran = len(set(first.lines))
        with running(log, "instead_of_cron.py", *place, "work") as second:
            assert wait_until(lambda: len(set(second.lines)) >= ran + 2)
    again = Counter(second.lines)
    assert again.total() - len(again) <= 1  # the run that was interrupted

    def waiting() -> set[int]:
        return {record.offset() for record in read_all(queue.bootstrap_servers, queue.name)}.difference(ended(queue))

    # The next run. A transaction that was committed just now is not seen in all partitions at the same moment.
    assert wait_until(lambda: len(waiting()) == 1)


KILLED_BEFORE_ITS_ACK = """
import os, signal, sys
import batches_to_sqlite

def store(database, batch, whole=batches_to_sqlite.store):
    whole(database, batch)
    os.kill(os.getpid(), signal.SIGKILL)

batches_to_sqlite.store = store
batches_to_sqlite.work(*sys.argv[1:])
"""


def test_batches_are_inserted_once_though_a_worker_is_killed_before_its_ack(queue: Queue, tmp_path: Path) -> None:
    lease_of_two_seconds(queue)
    database, log = tmp_path / "orders.db", tmp_path / "log"
    places = (queue.name, queue.bootstrap_servers, str(database))
    orders = [f"order {number}" for number in range(2_000)]
    queue.send(*orders)
    first = Program(log, "-c", KILLED_BEFORE_ITS_ACK, *places)
    try:
        assert first.process.wait(ENDS_S) == -signal.SIGKILL
    finally:
        first.kill()
    assert len(rows_of(database)) > 0
    with tracked(queue), running(log, "batches_to_sqlite.py", *places) as second:
        assert wait_until(lambda: rows_of(database) == sorted(orders) and len(ended(queue)) > len(orders))
    # A machine that is busy makes the handler slow, and the consumer then warns that it has no room.
    counts = [line.split() for line in second.lines if line.endswith("were new")]
    assert sum(int(new) for new, *_ in counts) == 2_000 < sum(int(whole) for _, _, whole, *_ in counts)


def rows_of(database: Path) -> list[str]:
    with closing(sqlite3.connect(database, timeout=20)) as connection:
        return sorted(value for (value,) in connection.execute("SELECT value FROM orders"))


@pytest.mark.spark
@pytest.mark.slow  # three JVMs of Spark
def test_rows_of_files_are_sent_once_by_a_job_that_is_killed_and_run_again(queue: Queue, tmp_path: Path) -> None:
    folder, log = tmp_path / "jobs", tmp_path / "log"
    places = (queue.name, queue.bootstrap_servers, str(folder), str(tmp_path / "checkpoint"))
    folder.mkdir()

    def write(file: str, count: int) -> list[str]:
        rows = [{"customer": f"{file}{each}", "what": "tea", "urgent": each % 2 == 0} for each in range(count)]
        (folder / file).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return [str(row["customer"]) for row in rows]

    def sent() -> list[str]:
        return sorted(record.key().decode() for record in read_all(queue.bootstrap_servers, queue.name))

    customers = write("a", 50)
    assert Program(log, "enqueue_from_spark.py", *places).process.wait(COMES_S) == 0
    assert sent() == sorted(customers)
    customers += write("b", 50)
    killed = Program(log, "enqueue_from_spark.py", *places, KMQ_FAILPOINT="sink.committed")
    assert killed.process.wait(COMES_S) != 0
    assert Program(log, "enqueue_from_spark.py", *places).process.wait(COMES_S) == 0
    assert sent() == sorted(customers)


def test_web_service_answers_when_the_order_is_in_the_queue(queue: Queue, tmp_path: Path) -> None:
    port = str(free_port())
    environment = {"QUEUE": queue.name, "BOOTSTRAP_SERVERS": queue.bootstrap_servers}
    url = f"http://127.0.0.1:{port}/orders"
    with running(tmp_path / "log", "-m", "uvicorn", "web_service:app", "--port", port, **environment) as service:
        assert wait_until(lambda: "Application startup complete" in "\n".join(service.lines))
        answers = [httpx.post(url, json={"customer": f"{each}", "what": "tea"}, timeout=COMES_S) for each in range(10)]
        assert {answer.status_code for answer in answers} == {202}
        sent = {
            f"0:{record.offset()}": json.loads(record.value())
            for record in read_all(queue.bootstrap_servers, queue.name)
        }
        assert sent == {
            answer.json()["id"]: {"customer": f"{each}", "what": "tea"} for each, answer in enumerate(answers)
        }
        assert httpx.post(url, json={"customer": "anna"}, timeout=COMES_S).status_code == 422


def test_arrow_batches_are_scored_and_what_is_no_row_is_a_dead_letter(
    queue: Queue, results: Queue, tmp_path: Path
) -> None:
    rows = {f"row {number}": (number / 100, number / 400) for number in range(500)}  # which the model scores with 0.5
    with QueueProducer(queue.name, bootstrap_servers=queue.bootstrap_servers) as producer:
        for key, row in rows.items():
            producer.send(struct.pack("<2d", *row), key=key)
    queue.send("no row")
    with (
        running(tmp_path / "log", "arrow_inference.py", queue.name, queue.bootstrap_servers, results.name),
        tracked(queue),
    ):
        assert wait_until(
            lambda: len(read_all(results.bootstrap_servers, results.name)) == 500 and bool(reasons(queue))
        )
    found = {record.key().decode(): record.value() for record in read_all(results.bootstrap_servers, results.name)}
    assert found == dict.fromkeys(rows, b"0.500000")
    assert reasons(queue) == ["not 16 bytes"]
