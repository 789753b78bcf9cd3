"""`kmq tracker once`: the tracker without Spark, for scheduled jobs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from kmq_spark.core.markers import Marker, MarkerType, OffsetRange
from kmq_spark.errors import KmqError
from kmq_spark.tracker import once
from kmq_spark.wire.codec import encode_marker
from tests.kafka.conftest import (
    consumer_of,
    drop,
    open_transaction,
    read_all,
    receive_all,
    remove_markers,
    seen,
    track,
    write_markers,
)
from tests.kafka.stage import put_rules

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.kafka.conftest import Queue

pytestmark = pytest.mark.kafka

KILLED = 137
"""Exit code of a process that a crash point ended."""


def test_dropped_messages_are_sent_again_once_however_often_it_runs(make_queue: Callable[..., Queue]) -> None:
    """After the last allowed delivery they are dead letters. Batches of three markers, so that there are several."""
    queue = make_queue(2)
    put_rules(queue.name, queue.bootstrap_servers, max_deliveries=2)
    queue.send(*"abcdef")
    with consumer_of(queue, lease=1, max_lease=1) as consumer:
        for message in receive_all(consumer, 6, max_messages=1):
            if message.value in {b"a", b"c", b"e"}:
                message.ack()
        time.sleep(1.5)
    assert [track(queue, max_markers_per_batch=3).redelivered for _ in range(3)] == [3, 0, 0]
    assert sorted(seen(queue)) == sorted(b"%c" % letter for letter in b"abcdefbdf")
    drop(queue, 3)
    ended = [track(queue, max_markers_per_batch=3) for _ in range(2)]
    assert [(each.redelivered, each.dead_lettered) for each in ended] == [(0, 3), (0, 0)]
    assert sorted(record.value() for record in read_all(queue.bootstrap_servers, f"{queue.name}.dlq")) == [
        b"b",
        b"d",
        b"f",
    ]


def test_run_behind_a_transaction_of_somebody_else_fails_and_the_next_one_redelivers(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot see what is overdue: a scheduler would take its silence for success."""
    queue.send("a")
    with open_transaction(queue, f"{queue.name}.markers"):
        drop(queue, 1)
        with monkeypatch.context() as impatient:
            impatient.setattr(once, "LSO_WAIT_S", 1.0)
            with pytest.raises(KmqError, match=r"markers up to this tracker's TERM.* a transaction is open there"):
                track(queue)
    assert track(queue).redelivered == 1


def test_message_that_is_held_is_left_alone(queue: Queue) -> None:
    queue.send("held")
    with consumer_of(queue, lease=60) as consumer:
        receive_all(consumer, 1)[0]
        assert track(queue).redelivered == 0
    assert seen(queue) == [b"held"]


def test_kill_in_the_middle_sends_nothing_twice_and_loses_nothing(queue: Queue) -> None:
    queue.send("a", "b")
    drop(queue, 2)
    command = [sys.executable, "-m", "kmq_spark.cli.main", "tracker", "once", queue.name]
    environment = {
        **os.environ,
        "KMQ_FAILPOINT": "tracker.delivered",
        "KMQ_KAFKA__BOOTSTRAP_SERVERS": queue.bootstrap_servers,
    }
    killed = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert killed.returncode == KILLED, killed.stderr
    track(queue)
    assert sorted(seen(queue)) == [b"a", b"a", b"b", b"b"]


def test_messages_that_do_not_exist_make_no_dead_letters(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    """A START of 30 bytes may name 100,000 messages; those in the topic are redelivered as usual."""
    queue.send("a")
    forged = Marker(MarkerType.START, 0, (OffsetRange(0, 5_000),), redeliver_after_ms=1)
    write_markers(queue, encode_marker(forged))
    time.sleep(0.1)
    assert [track(queue).redelivered for _ in range(2)] == [1, 0]
    assert read_all(queue.bootstrap_servers, f"{queue.name}.dlq") == []
    assert seen(queue) == [b"a", b"a"]
    assert "name offsets that the queue topic does not have" in caplog.text


def test_markers_that_were_removed_unread_are_refused_until_an_operator_goes_on_without_them(queue: Queue) -> None:
    """The group has no offsets, as after a week of silence: refused at the second start too."""
    queue.send("lost")
    with consumer_of(queue) as consumer:
        receive_all(consumer, 1)
    remove_markers(queue)
    for _ in range(2):
        with pytest.raises(KmqError, match=r"no committed offset.*FAIL_ON_REMOVED_MARKERS=false"):
            track(queue)
    track(queue, fail_on_removed_markers=False)
    track(queue)


def test_terms_of_trackers_that_are_gone_decide_nothing(queue: Queue) -> None:
    """
    TICKs without a term, as older versions wrote them, TICKs of a term that never began, and 10,000 TERMs.

    Nor does a record that is no marker; and none of them stops the run.
    """
    write_markers(queue, b"\xff\xff no marker")
    queue.send("a", "b")
    drop(queue, 2)
    ticks = Marker(MarkerType.TICK), Marker(MarkerType.TICK, term=17)
    terms = [Marker(MarkerType.TERM, consumer_id=f"gone-{number}", term=number) for number in range(100, 10_100)]
    written = [*ticks, *terms, terms[-1], *ticks, Marker(MarkerType.TICK, term=10_099)]
    write_markers(queue, *map(encode_marker, written))
    assert [track(queue, max_markers_per_batch=100_000).redelivered for _ in range(2)] == [2, 0]
    assert sorted(seen(queue)) == [b"a", b"a", b"b", b"b"]


def test_command_prints_what_was_done_without_spark(queue: Queue) -> None:
    queue.send("a")
    drop(queue, 1)
    program = (
        "import sys; from kmq_spark.cli.main import task\n"
        "try: task()\n"
        "finally: print([name for name in ('pyspark', 'pandas', 'pyarrow') if name in sys.modules])"
    )
    command = [
        *(sys.executable, "-c", program, "tracker", "once", queue.name, "--events"),
        "--bootstrap-server",
        queue.bootstrap_servers,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    event, modules = done.stdout.splitlines()
    assert event.startswith(f'{{"event": "ended", "queue": "{queue.name}", "redelivered": 1,')
    assert modules == "[]"
    assert len(queue.markers(MarkerType.TICK)) >= 1
