"""`QueueConsumer.run`: the handler's outcome settles each message, and a stop leaves no message held."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from kmq_spark.consumer import worker
from kmq_spark.consumer.consumer import QueueConsumer
from kmq_spark.core.markers import MarkerType, Outcome, Release
from kmq_spark.errors import KafkaClientError
from tests.kafka.conftest import Queue, covered, ended, stopped_if_it_hangs, wait_until
from tests.limits import COMES_S, ENDS_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from kmq_spark.consumer.message import Message
    from kmq_spark.consumer.worker import RunSummary

pytestmark = pytest.mark.kafka


def run(queue: Queue, handler: Callable[[Message], object], count: int, **options: Any) -> RunSummary:
    """Run a handler until it was called *count* times."""
    consumer = QueueConsumer(queue.name, bootstrap_servers=queue.bootstrap_servers)
    calls: list[Message] = []

    def counting(message: Message) -> None:
        calls.append(message)
        if len(calls) == count:
            consumer.stop()
        handler(message)

    try:
        with stopped_if_it_hangs(consumer):
            return consumer.run(counting, **options)
    finally:
        assert len(calls) >= count


def test_handler_that_raises_is_logged_and_its_message_released_later(
    queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    queue.send(*"ab")

    def handler(message: Message) -> None:
        if message.value == b"a":
            raise RuntimeError("no database")

    summary = run(queue, handler, 2, concurrency=1)
    assert (summary.acked, summary.released, summary.failed) == (1, 1, 1)
    assert "RuntimeError: no database" in caplog.text
    named = (
        "message 0:0, key None, delivery 1 (delivered again as the queue's rules say, up to the limit of deliveries)"
    )
    assert f"handler failed for {named}" in caplog.text
    (release,) = queue.markers(MarkerType.KEEPALIVE)
    assert (covered(release.marker), release.marker.redeliver_after_ms) == ([0], 0)
    assert not release.marker.never_handed_out
    assert (release.marker.release, release.marker.reason) == (Release.FAILED, "RuntimeError: no database")


def test_failure_after_the_ack_does_not_say_that_the_message_comes_again(
    queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    queue.send("a")

    def handler(message: Message) -> None:
        message.ack()
        raise RuntimeError("too late")

    assert run(queue, handler, 1, concurrency=1).acked == 1
    assert "handler failed for message 0:0, key None, delivery 1 (settled before, and stays so)" in caplog.text


def test_fetch_that_fails_drops_nothing_that_is_under_way(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example while a host name cannot be resolved: messages that were started before are handed out."""
    monkeypatch.setattr(worker, "MAX_FETCH", 20)
    queue.send(*map(str, range(1_000)))
    # A lease that outlasts the test: what was dropped would come again after it.
    consumer = QueueConsumer(queue.name, bootstrap_servers=queue.bootstrap_servers, lease=3600)
    seen: list[int] = []

    def handler(message: Message) -> None:
        seen.append(message.id.message_offset)
        if len(seen) % 100 == 50:
            consumer._pipeline._fetcher._error = KafkaClientError("no such host", code="_RESOLVE", retriable=True)
        if len(seen) == 1_000:
            consumer.stop()

    with stopped_if_it_hangs(consumer):
        summary = consumer.run(handler, concurrency=1)
    assert sorted(seen) == list(range(1_000))
    assert summary.acked == 1_000


def test_handler_that_settles_is_not_acknowledged_for(queue: Queue) -> None:
    queue.send(*"abc")
    verbs: dict[bytes | None, Callable[[Message], None]] = {
        b"a": lambda message: message.reject("bad"),
        b"b": lambda message: message.release(5),
        b"c": lambda message: message.ack(),
    }
    summary = run(queue, lambda message: verbs[message.value](message), 3, concurrency=1)
    assert (summary.acked, summary.released, summary.rejected) == (1, 1, 1)
    assert (ended(queue, Outcome.REJECTED), ended(queue, Outcome.ACKED)) == ([0], [2])


def test_stop_gives_back_unseen_messages_uncounted_and_waits_for_the_running_one(queue: Queue) -> None:
    queue.send(*map(str, range(10)))
    consumer = QueueConsumer(queue.name, bootstrap_servers=queue.bootstrap_servers)

    def handler(_message: Message) -> None:
        threading.Timer(0.3, consumer.stop).start()
        time.sleep(1)

    summary = consumer.run(handler, concurrency=1)
    assert summary.acked == 1
    started = covered(*(each.marker for each in queue.markers(MarkerType.START)))
    releases = [each.marker for each in queue.markers(MarkerType.KEEPALIVE)]
    assert all(each.never_handed_out and each.redeliver_after_ms == 0 for each in releases)
    assert covered(*releases) == started[1:]
    assert summary.unseen == len(started) - 1
    assert queue.committed() == {0: len(started)}


def test_handler_that_outlasts_the_drain_loses_its_message(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    queue.send("a")
    go_on = threading.Event()
    summary = run(queue, lambda _message: go_on.wait(COMES_S), 1, concurrency=1, drain_timeout=0.2)
    assert "1 handler(s) still running 0.2 s after the stop" in caplog.text
    assert summary.acked == 0
    (release,) = queue.markers(MarkerType.KEEPALIVE)
    assert not release.marker.never_handed_out
    go_on.set()


def test_worker_whose_handlers_all_hang_says_so(
    queue: Queue, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep-alive renews their leases: nothing else would show it."""
    monkeypatch.setattr(worker, "STUCK_S", 0.3)
    queue.send(*map(str, range(20)))
    consumer = QueueConsumer(queue.name, bootstrap_servers=queue.bootstrap_servers)
    said = "all 1 handlers have been busy for 0.3 s while "

    def hang(_message: Message) -> None:
        wait_until(lambda: said in caplog.text)
        consumer.stop()

    with stopped_if_it_hangs(consumer):
        consumer.run(hang, concurrency=1)
    assert said in caplog.text


def test_system_exit_of_a_handler_ends_the_run(queue: Queue) -> None:
    queue.send("a")
    with pytest.raises(SystemExit, match="3"):
        run(queue, lambda _message: sys.exit(3), 1, concurrency=2)
    assert len(queue.markers(MarkerType.KEEPALIVE)) == 1


PROGRAM = """
import sys, time
from kmq_spark.consumer.consumer import QueueConsumer
def handler(message):
    print("handling", flush=True)
    time.sleep(float(sys.argv[3]))
consumer = QueueConsumer(sys.argv[1], bootstrap_servers=sys.argv[2])
try:
    print(consumer.run(handler, concurrency=1), flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(130)
"""


def start_program(queue: Queue, seconds: float) -> subprocess.Popen[str]:
    """Start a worker whose handler takes so long, and wait until the handler runs."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, queue.name, queue.bootstrap_servers, str(seconds)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "handling\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_cleanly(queue: Queue, number: signal.Signals) -> None:
    queue.send(*"abc")
    process = start_program(queue, 0.5)
    process.send_signal(number)
    out, _ = process.communicate(timeout=ENDS_S)
    assert process.returncode == 0
    assert "RunSummary(acked=1, " in out
    assert ended(queue, Outcome.ACKED) == [0]
    started = covered(*(each.marker for each in queue.markers(MarkerType.START)))
    assert covered(*(each.marker for each in queue.markers(MarkerType.KEEPALIVE))) == started[1:]


def test_second_ctrl_c_ends_the_run_at_once(queue: Queue) -> None:
    queue.send("a")
    process = start_program(queue, 60)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=ENDS_S)
    assert process.returncode == 130
    assert "interrupted" in out
    # The message of the handler that was left behind is given back.
    assert len(queue.markers(MarkerType.KEEPALIVE)) == 1
