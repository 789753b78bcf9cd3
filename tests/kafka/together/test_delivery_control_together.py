"""Delivery control with consumers, broker and tracker together, and with what dies in the middle."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from kmq_spark.consumer.consumer import QueueConsumer
from kmq_spark.demo.audit import audit
from kmq_spark.kafka.topics import create_queue
from kmq_spark.producer.producer import QueueProducer
from tests.kafka.stage import Stage, receive_all, run_until, wait_until

if TYPE_CHECKING:
    from kmq_spark.consumer.message import Message

pytestmark = [pytest.mark.spark, pytest.mark.kafka]


def test_delayed_message_comes_and_not_before_its_time_though_its_consumer_was_killed(stage: Stage) -> None:
    """`kill -9` of the only consumer while the message waits: it was not held, so that no delivery of it counts."""
    with QueueProducer(stage.queue, bootstrap_servers=stage.bootstrap_servers) as producer:
        producer.send("later", delay=6.0)
        producer.send("now")
    with stage.tracking():
        killed = subprocess.Popen([sys.executable, "-c", HOLD, stage.queue, stage.bootstrap_servers], stdout=-1)
        assert killed.stdout is not None
        assert json.loads(killed.stdout.readline()) == ["now", 1]
        killed.kill()
        killed.communicate()
        with stage.consumer() as consumer:
            found = {message.value: message for message in receive_all(consumer, 2)}
            later = found[b"later"]
            assert (later.delivery_count, found[b"now"].delivery_count) == (1, 2)
            assert later.appended_at_ms - later.first_sent_at_ms >= 6_000
            for message in found.values():
                message.ack()


HOLD = """
import json, sys, time
from kmq_spark import QueueConsumer
consumer = QueueConsumer(sys.argv[1], bootstrap_servers=sys.argv[2], lease=2, extra={"group.protocol": "consumer"})
while not (messages := consumer.receive(1, timeout=1.0)):
    pass
# The one that is for later is deferred by now, or with the next look.
consumer.receive(1, timeout=1.0)
print(json.dumps([messages[0].value.decode(), messages[0].delivery_count]), flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_message_that_kills_its_process_is_handed_out_alone_and_ends_in_the_dead_letter_topic(stage: Stage) -> None:
    """Three deliveries, three processes; the next consumer finishes the messages that were held beside it."""
    stage.send("killer", *(f"good {number}" for number in range(6)))
    alone: list[int] = []
    program = [sys.executable, "-c", WORK, stage.queue, stage.bootstrap_servers]
    with stage.tracking() as tracker:

        def is_over() -> bool:
            return tracker.stats.dead_lettered >= 1 and not audit(stage.layout, stage.bootstrap_servers).lost

        for _ in range(5):
            exit_code, written = run_until(is_over, program, stage.folder / "over")
            lines = [json.loads(line) for line in written]
            alone += [line["held"] for line in lines if line["value"] == "killer" and line["delivery"] > 2]
            if exit_code == 0:
                break
    dead = [letter.value for letter in _dead_letters(stage)]
    assert dead == [b"killer"]
    # Its third delivery, by then a suspect.
    assert alone == [1]


WORK = """
import json, os, sys, time
from kmq_spark import QueueConsumer
# The group gives up a member that was killed after six seconds, the least that a broker allows by default.
extra = {"session.timeout.ms": "6000"}
consumer = QueueConsumer(sys.argv[1], bootstrap_servers=sys.argv[2], lease=2, extra=extra)
while not os.path.exists(sys.argv[3]):
    messages = consumer.receive(10, timeout=0.5)
    for message in messages:
        line = {"value": message.value.decode(), "delivery": message.delivery_count, "held": consumer.in_flight_count}
        print(json.dumps(line), flush=True)
    for message in messages:
        if message.value == b"killer":
            os.kill(os.getpid(), 9)
        message.ack()
consumer.close()
"""


def _dead_letters(stage: Stage) -> list[Message]:
    from kmq_spark import list_dead_letters  # noqa: PLC0415  # as a user would

    assert wait_until(lambda: bool(list(list_dead_letters(stage.queue, bootstrap_servers=stage.bootstrap_servers))))
    return list(list_dead_letters(stage.queue, bootstrap_servers=stage.bootstrap_servers))  # type: ignore[arg-type]


def test_redelivery_for_one_group_is_no_work_for_another(stage: Stage) -> None:
    """Two groups, two trackers in one application; each message is dropped once by one of the groups."""
    create_queue(f"{stage.queue}@billing", bootstrap_servers=stage.bootstrap_servers)
    with stage.tracking(), stage.tracking("billing") as tracker:
        stage.send("a", "b")
        servers = stage.bootstrap_servers
        with stage.consumer() as own, QueueConsumer(
            stage.queue, subscription="billing", bootstrap_servers=servers, lease=60
        ) as theirs:  # fmt: skip
            assert len(receive_all(own, 2)) == 2  # dropped
            for message in receive_all(theirs, 2):
                message.ack()
            again = receive_all(own, 2)
            assert [message.delivery_count for message in again] == [2, 2]
            for message in again:
                message.ack()
            assert theirs.receive(10, timeout=2.0) == []
            time.sleep(2.5)
            assert (own.receive(10, timeout=0.5), theirs.receive(10, timeout=0.5)) == ([], [])
    assert (tracker.stats.redelivered, tracker.stats.dead_lettered) == (0, 0)
