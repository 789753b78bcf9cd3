"""Consumers, a broker and the tracker together: the promises about redelivery, on a real broker."""

from __future__ import annotations

import threading
import time

import pytest

from kmq_spark.demo.audit import audit
from kmq_spark.kafka.topics import create_queue_topics
from kmq_spark.tracker.queue_tracker import QueueTracker
from kmq_spark.tracker.service import TrackerService
from tests.kafka.conftest import wait_until
from tests.kafka.stage import Stage, receive_all
from tests.limits import COMES_S

pytestmark = [pytest.mark.spark, pytest.mark.kafka]


def test_message_that_was_not_acked_comes_again_with_its_bytes_and_its_count(stage: Stage) -> None:
    """Redelivery keeps key, value and headers, counts the delivery, and never comes before the deadline."""
    stage.send("a", "b")
    with stage.tracking(), stage.consumer() as consumer:
        first = {message.value: message for message in receive_all(consumer, 2)}
        first[b"a"].ack()
        (again,) = receive_all(consumer, 1)
        again.ack()
        consumer.flush()
        assert (again.key, again.value, again.delivery_count) == (b"b", b"b", 2)
        assert again.headers == [("origin-app", b"tests")]
        assert again.origin == first[b"b"].id
        assert wait_until(lambda: not audit(stage.layout, stage.bootstrap_servers).lost)
    story = audit(stage.layout, stage.bootstrap_servers)
    assert (story.redelivered, story.early) == (1, 0)


def test_available_now_run_handles_what_is_due_and_ends(stage: Stage) -> None:
    """`--trigger available-now` writes its own TICKs, redelivers due messages, and ends by itself."""
    stage.send("a")
    with stage.consumer(lease=1) as consumer:
        receive_all(consumer, 1)
        time.sleep(1.2)
        tracker = QueueTracker(stage.spark, stage.queue, stage.settings(trigger="available-now"))
        tracker.run()
        (again,) = receive_all(consumer, 1)
        again.ack()
    assert (tracker.stats.redelivered, again.delivery_count) == (1, 2)


def test_one_application_tracks_a_queue_and_a_subscription_of_it(stage: Stage) -> None:
    """A query, a checkpoint and a transactional id for each. What is redelivered to one is no work for the other."""
    names = [stage.queue, f"{stage.queue}@billing"]
    create_queue_topics(names[1], bootstrap_servers=stage.bootstrap_servers)
    service = TrackerService(stage.spark, names, stage.settings())
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        assert all(tracker.wait_ready(COMES_S) for tracker in service.trackers)
        stage.send("a")
        for options in ({}, {"subscription": "billing"}):
            with stage.consumer(**options) as consumer:
                first, second = receive_all(consumer, 1) + receive_all(consumer, 1)
                second.ack()
                assert (first.value, second.value, second.delivery_count) == (b"a", b"a", 2)
    finally:
        service.stop()
        thread.join(COMES_S)
    assert [tracker.stats.redelivered for tracker in service.trackers] == [1, 1]
