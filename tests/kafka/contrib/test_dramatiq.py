"""dramatiq's actors and workers on a queue: each message once, retries with delay, dead letters, kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dramatiq
import pytest
from dramatiq import Message, QueueNotFound, Worker

from kmq_spark import DeadLetter, DeadLetterFilter, KafkaClientError, TopicError, UsageError, list_dead_letters
from kmq_spark.contrib.dramatiq import KmqBroker
from kmq_spark.core.markers import MarkerType
from kmq_spark.kafka.settings import MAX_MESSAGE_BYTES
from kmq_spark.wire.headers import DELAY_MS, LOGICAL_QUEUE, ORIGIN
from tests.kafka.conftest import Queue, consumer_of, ended, read_all, receive_all, track, tracked, wait_until
from tests.limits import COMES_S, ENDS_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.kafka

ROOT = Path(__file__).parents[3]
JOIN_MS = int(COMES_S * 1_000)


def broker_of(queue: Queue, **options: Any) -> KmqBroker:
    """Return a broker that actors declared from now on use."""
    broker = KmqBroker(queue.name, bootstrap_servers=queue.bootstrap_servers, **options)
    dramatiq.set_broker(broker)
    return broker


@contextmanager
def working(broker: KmqBroker, **options: Any) -> Iterator[Worker]:
    worker = Worker(broker, worker_timeout=100, **options)
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()
        broker.close()


def letters_of(queue: Queue) -> list[DeadLetter]:
    where = DeadLetterFilter(logical_queue="default")
    return list(list_dead_letters(queue.name, bootstrap_servers=queue.bootstrap_servers, where=where))


def test_worker_handles_each_message_of_two_queues_once(make_queue: Callable[..., Queue]) -> None:
    queue = make_queue(partitions=2)
    broker = broker_of(queue)
    handled: Counter[tuple[str, int]] = Counter()

    @dramatiq.actor
    def pack(number: int) -> None:
        handled["pack", number] += 1

    @dramatiq.actor(queue_name="emails")
    def tell(number: int) -> None:
        handled["tell", number] += 1
        pack.send(number)

    for number in range(100):
        tell.send(number)
    with working(broker):
        broker.join("emails", timeout=JOIN_MS)
        broker.join("default", timeout=JOIN_MS)
    assert handled == {(name, number): 1 for name in ("pack", "tell") for number in range(100)}
    assert len(ended(queue)) == 200
    names = Counter(dict(record.headers())[LOGICAL_QUEUE] for record in read_all(queue.bootstrap_servers, queue.name))
    assert names == {b"default": 100, b"emails": 100}


def test_failing_actor_is_retried_with_delay_and_ends_as_a_dead_letter(queue: Queue) -> None:
    broker = broker_of(queue)
    attempts = 0

    @dramatiq.actor(max_retries=2, min_backoff=300)
    def charge(customer: str) -> None:
        nonlocal attempts
        attempts += 1
        message = f"no such customer: {customer}"
        raise LookupError(message)

    with working(broker), tracked(queue):
        charge.send("anna")
        broker.join("default", timeout=JOIN_MS)
    assert attempts == 3
    (letter,) = letters_of(queue)
    assert letter.reason == "LookupError: no such customer: anna"
    assert Message.decode(letter.value or b"").options["retries"] == 2
    # What is sent with a delay is deferred; the tracker sends a copy when it is due, which a worker takes.
    found = [
        (dict(record.headers()), record.timestamp()[1]) for record in read_all(queue.bootstrap_servers, queue.name)
    ]
    due = [sent_at_ms + int(headers[DELAY_MS]) for headers, sent_at_ms in found if DELAY_MS in headers]
    copied = [sent_at_ms for headers, sent_at_ms in found if ORIGIN in headers]
    assert len(due) == len(copied) == 2
    assert all(copied_at_ms >= due_at_ms for due_at_ms, copied_at_ms in zip(due, copied, strict=True))


def test_retry_that_cannot_be_sent_leaves_the_message_to_the_queue(queue: Queue) -> None:
    """The traceback makes it larger than a message may be. dramatiq logs that and acknowledges: it would be lost."""
    broker = broker_of(queue)

    @dramatiq.actor
    def load(_file: str) -> None:
        message = "x" * 5_000
        raise ValueError(message)

    load.send("x" * (MAX_MESSAGE_BYTES - 3_000))
    with working(broker), tracked(queue):
        broker.join("default", timeout=JOIN_MS)
    (letter,) = letters_of(queue)
    assert letter.reason.startswith(
        "delivery limit reached: 5 of 5; last error: KafkaClientError: message is too large"
    )


def test_message_that_no_actor_can_take_is_a_dead_letter(queue: Queue) -> None:
    broker = broker_of(queue)
    broker.declare_queue("default")
    queue.send("greet anna", logical_queue="default")
    broker.enqueue(Message("default", "greet", ("anna",), {}, {}))
    with working(broker), tracked(queue):
        broker.join("default", timeout=JOIN_MS)
    reasons = sorted(letter.reason.partition(":")[0] for letter in letters_of(queue))
    assert reasons == ["ActorNotFound", "no message of dramatiq"]


def test_stopped_worker_gives_back_what_no_actor_has_seen(queue: Queue) -> None:
    broker = broker_of(queue)
    began, go_on = threading.Event(), threading.Event()

    @dramatiq.actor
    def pack(_number: int) -> None:
        began.set()
        go_on.wait(COMES_S)

    for number in range(4):
        pack.send(number)
    with working(broker, worker_threads=1) as worker:  # with two messages: one works, one waits
        assert began.wait(COMES_S)
        assert wait_until(lambda: worker.work_queue.qsize() == 1)
        threading.Timer(1.0, go_on.set).start()
    assert len(ended(queue)) == 1
    track(queue)
    with consumer_of(queue, logical_queue="default") as consumer:
        rest = receive_all(consumer, 3)
        assert sorted(Message.decode(each.value or b"").args for each in rest) == [(1,), (2,), (3,)]
        assert {each.delivery_count for each in rest} == {1}


TASKS = """
import os, sys, time
import dramatiq
from kmq_spark.contrib.dramatiq import KmqBroker

options = {"lease": 2, "extra": {"session.timeout.ms": "3000"}}
dramatiq.set_broker(KmqBroker(os.environ["QUEUE"], bootstrap_servers=os.environ["SERVERS"], **options))

def note(line):
    with open("log", "a") as log:
        print(line, file=log)

@dramatiq.actor
def pack(number):
    note(f"begun {number}")
    if os.environ["WORKER"] == "first" and number >= 10:
        time.sleep(3_600)
    note(f"done {number}")
"""


def test_worker_that_is_killed_in_mid_message_loses_nothing(queue: Queue, tmp_path: Path) -> None:
    """As users run it: the command `dramatiq`, which forks a process of four threads."""
    (tmp_path / "tasks.py").write_text(TASKS)
    log = tmp_path / "log"
    log.touch()
    command = [sys.executable, "-m", "dramatiq", "tasks", "--processes", "1", "--threads", "4"]
    environment = {**os.environ, "QUEUE": queue.name, "SERVERS": queue.bootstrap_servers, "PYTHONPATH": str(ROOT)}

    def begin(name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, cwd=tmp_path, env=environment | {"WORKER": name}, start_new_session=True)

    def lines(what: str) -> set[int]:
        return {int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith(f"{what} ")}

    broker = broker_of(queue)
    broker.declare_queue("default")
    for number in range(30):
        broker.enqueue(Message("default", "pack", (number,), {}, {}))
    broker.close()
    first = begin("first")
    try:
        assert wait_until(lambda: len(lines("begun") - lines("done")) == 4)
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait(ENDS_S)
    in_work = lines("begun") - lines("done")
    second = begin("second")
    try:
        with tracked(queue):
            assert wait_until(lambda: lines("done") == set(range(30)))
            second.terminate()
            assert second.wait(ENDS_S) == 0
    finally:
        if second.poll() is None:
            os.killpg(second.pid, signal.SIGKILL)
    begun = Counter(line.split()[1] for line in log.read_text().splitlines() if line.startswith("begun "))
    assert {number for number in in_work if begun[str(number)] == 2} == in_work
    starts = [each.marker.delivery_count for each in queue.markers(MarkerType.START)]
    assert max(starts) == 2


def test_what_cannot_be_had_is_an_error_that_says_so(queue: Queue) -> None:
    broker = broker_of(queue)
    message: Message[None] = Message("default", "pack", (), {}, {})
    with pytest.raises(QueueNotFound, match="default"):
        broker.enqueue(message)
    broker.declare_queue("default")
    with pytest.raises(UsageError, match="a queue cannot be flushed: got 'default'; use a new queue for each test"):
        broker.flush_all()
    with pytest.raises(KafkaClientError, match="message is too large"):
        broker.enqueue(message.copy(args=("x" * 2_000_000,)))
    broker.close()
    missing = KmqBroker("no-such-queue", bootstrap_servers=queue.bootstrap_servers)
    missing.declare_queue("default")
    with pytest.raises(TopicError, match="run `kmq queue create no-such-queue`"):
        missing.enqueue(message)


def test_process_that_has_sent_may_fork_workers(queue: Queue) -> None:
    program = """
import os, sys
from dramatiq import Message
from kmq_spark.contrib.dramatiq import KmqBroker

broker = KmqBroker(sys.argv[1], bootstrap_servers=sys.argv[2])
broker.declare_queue("default")
broker.enqueue(Message("default", "pack", ("parent",), {}, {}))
pid = os.fork()
if pid:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
else:
    broker.enqueue(Message("default", "pack", ("child",), {}, {}))
broker.close()
"""
    command = [sys.executable, "-c", program, queue.name, queue.bootstrap_servers]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ENDS_S)
    assert done.returncode == 0, done.stderr
    sent = [Message.decode(record.value()).args[0] for record in read_all(queue.bootstrap_servers, queue.name)]
    assert sent == ["parent", "child"]
