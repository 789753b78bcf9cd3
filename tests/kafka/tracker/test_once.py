"""`kmq tracker once`: the tracker without Spark, for scheduled jobs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from kmq_spark.config import Settings, load_settings
from kmq_spark.core.markers import Marker, MarkerType
from kmq_spark.tracker.once import track_once
from kmq_spark.wire.codec import encode_marker
from tests.kafka.conftest import consumer_of, read_all, receive_all, seen
from tests.kafka.stage import put_rules

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.kafka.conftest import Queue

pytestmark = pytest.mark.kafka

LEASE_MS = 1_000
KILLED = 137
"""Exit code of a process that a crash point ended."""


def settings_of(queue: Queue, **tracker: object) -> Settings:
    """Return the settings of a tracker."""
    return load_settings(
        None,
        {
            "kafka": {"bootstrap_servers": queue.bootstrap_servers},
            "tracker": {"max_markers_per_batch": 3, **tracker},
        },
    )


def drop(queue: Queue, count: int) -> None:
    """Take messages and let their leases run out."""
    with consumer_of(queue, lease=LEASE_MS / 1000, max_lease=LEASE_MS / 1000) as consumer:
        receive_all(consumer, count)
        time.sleep(1.5 * LEASE_MS / 1000)


def test_dropped_messages_are_sent_again_once_however_often_it_runs(make_queue: Callable[..., Queue]) -> None:
    """After the last allowed delivery they are dead letters. Batches of three markers, so that there are several."""
    queue = make_queue(2)
    put_rules(queue.name, queue.bootstrap_servers, max_deliveries=2)
    queue.send(*"abcdef")
    with consumer_of(queue, lease=LEASE_MS / 1000, max_lease=LEASE_MS / 1000) as consumer:
        for message in receive_all(consumer, 6, max_messages=1):
            if message.value in {b"a", b"c", b"e"}:
                message.ack()
        time.sleep(1.5 * LEASE_MS / 1000)
    assert [track_once(queue.name, settings_of(queue)).redelivered for _ in range(3)] == [3, 0, 0]
    assert sorted(seen(queue)) == sorted(b"%c" % letter for letter in b"abcdefbdf")
    drop(queue, 3)
    ended = [track_once(queue.name, settings_of(queue)) for _ in range(2)]
    assert [(each.redelivered, each.dead_lettered) for each in ended] == [(0, 3), (0, 0)]
    assert sorted(record.value() for record in read_all(queue.bootstrap_servers, f"{queue.name}.dlq")) == [
        b"b",
        b"d",
        b"f",
    ]


def test_message_that_is_held_is_left_alone(queue: Queue) -> None:
    queue.send("held")
    with consumer_of(queue, lease=60) as consumer:
        receive_all(consumer, 1)[0]
        assert track_once(queue.name, settings_of(queue)).redelivered == 0
    assert seen(queue) == [b"held"]


@pytest.mark.parametrize("point", [pytest.param("tracker.batch", marks=pytest.mark.slow), "tracker.delivered"])
def test_kill_in_the_middle_sends_nothing_twice_and_loses_nothing(queue: Queue, point: str) -> None:
    queue.send("a", "b")
    drop(queue, 2)
    command = [sys.executable, "-m", "kmq_spark.cli.main", "tracker", "once", queue.name]
    environment = {**os.environ, "KMQ_FAILPOINT": point, "KMQ_KAFKA__BOOTSTRAP_SERVERS": queue.bootstrap_servers}
    killed = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert killed.returncode == KILLED, killed.stderr
    track_once(queue.name, settings_of(queue))
    assert sorted(seen(queue)) == [b"a", b"a", b"b", b"b"]


def test_unreadable_record_is_ignored_and_the_rest_is_done(queue: Queue) -> None:
    """No record in the log stops the run."""
    stranger = Producer({"bootstrap.servers": queue.bootstrap_servers})
    stranger.produce(f"{queue.name}.markers", b"\xff\xff no marker")
    assert stranger.flush(10) == 0
    queue.send("a")
    drop(queue, 1)
    assert track_once(queue.name, settings_of(queue)).redelivered == 1


def write_markers(queue: Queue, *markers: Marker) -> None:
    """Append markers to partition 0, as another program would."""
    producer = Producer({"bootstrap.servers": queue.bootstrap_servers})
    for marker in markers:
        producer.produce(f"{queue.name}.markers", encode_marker(marker), partition=0)
        producer.poll(0)
    assert producer.flush(10) == 0


def test_terms_of_trackers_that_are_gone_decide_nothing(queue: Queue) -> None:
    """TICKs without a term, as older versions wrote them, TICKs of a term that never began, and 10,000 TERMs."""
    queue.send("a", "b")
    drop(queue, 2)
    ticks = Marker(MarkerType.TICK), Marker(MarkerType.TICK, term=17)
    terms = [Marker(MarkerType.TERM, consumer_id=f"gone-{number}", term=number) for number in range(100, 10_100)]
    write_markers(queue, *ticks, *terms, terms[-1], *ticks, Marker(MarkerType.TICK, term=10_099))
    settings = settings_of(queue, max_markers_per_batch=100_000)
    assert [track_once(queue.name, settings).redelivered for _ in range(2)] == [2, 0]
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
