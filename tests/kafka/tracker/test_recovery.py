"""Loss of markers, topics or disk space under a tracker, and how it recovers."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from kmq_spark.demo.audit import audit
from kmq_spark.errors import KafkaClientError, KmqError
from kmq_spark.kafka.settings import admin_config
from kmq_spark.kafka.topics import create_queue_topics
from kmq_spark.tracker.queue_tracker import QueueTracker
from tests.kafka.stage import Stage, receive_all, wait_until
from tests.limits import COMES_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.spark, pytest.mark.kafka]


def acked(stage: Stage, *values: str) -> None:
    """Send messages and let a consumer ack them."""
    stage.send(*values)
    with stage.consumer() as consumer:
        for message in receive_all(consumer, len(values)):
            message.ack()
        consumer.flush()


def test_markers_removed_unread_stop_the_tracker_which_says_how_to_go_on(stage: Stage) -> None:
    """A START may have been among them. With `fail_on_removed_markers=false` the tracker continues with the rest."""
    acked(stage, "a", "b", "c")
    # A lease that outlasts all trackers, however slow the machine: only the last one has a reason to redeliver.
    with stage.consumer(lease=3600) as consumer:
        with stage.tracking() as tracker:
            stage.send("held")
            (held,) = receive_all(consumer, 1)
            assert wait_until(lambda: sum(s.in_flight for s in tracker.stats.statuses.values()) == 1)
        stage.send("d")
        receive_all(consumer, 1)[0].ack()
        consumer.flush()  # markers that no tracker has read
        topic = stage.layout.topics.markers_topic
        admin = AdminClient(admin_config(stage.bootstrap_servers))
        for future in admin.delete_records([TopicPartition(topic, p, -1) for p in range(2)]).values():
            future.result()
        with pytest.raises(KmqError, match=r"were removed before .*FAIL_ON_REMOVED_MARKERS=false"):
            QueueTracker(stage.spark, stage.queue, stage.settings()).run()
        with stage.tracking(fail_on_removed_markers=False):
            held.release()
            (again,) = receive_all(consumer, 1)
            assert (again.value, again.delivery_count) == (b"held", 2)


def test_tracker_is_ready_only_when_it_has_read_the_markers_of_before_its_start(stage: Stage) -> None:
    """Its first batch may be a part of them."""
    acked(stage, *(f"m{number}" for number in range(20)))
    with stage.tracking(max_markers_per_batch=1) as tracker:
        assert tracker.stats.batches > 1


def test_topics_made_anew_under_a_checkpoint_are_tracked_from_their_beginning(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """The topics are deleted and created again: the tracker puts the old checkpoint aside and logs a line."""
    with stage.tracking():
        acked(stage, *(f"old {number}" for number in range(20)))
    make_anew(stage)
    stage.send("new")
    with stage.consumer(lease=1) as consumer, stage.tracking():
        receive_all(consumer, 1)
        (again,) = receive_all(consumer, 1)
        assert (again.value, again.delivery_count) == (b"new", 2)
    assert "cannot be used and was renamed to" in caplog.text
    assert list((stage.folder / "checkpoint").glob(f"{stage.queue}.damaged-*"))


def test_topics_made_anew_that_are_as_long_as_the_old_ones_were_are_tracked(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """One TICK in each partition before and after, so that offsets alone show Spark no new markers."""
    with stage.tracking():
        pass
    make_anew(stage)
    # Being ready is the promise: without new markers there would never be a batch.
    with stage.tracking():
        pass
    assert "cannot be used and was renamed to" in caplog.text


def test_topics_made_anew_that_are_longer_than_the_old_ones_were_are_tracked_from_their_beginning(stage: Stage) -> None:
    """The new topic has a START below the old checkpoint's offset and more behind it, before any tracker starts."""
    with stage.tracking():
        pass
    make_anew(stage)
    values = {f"held {number}".encode() for number in range(8)}
    stage.send(*(value.decode() for value in values))
    with stage.consumer(lease=1) as consumer:
        held = [message for _ in values for message in receive_all(consumer, 1)]  # a START each
        assert {message.value for message in held} == values
        with stage.tracking():
            again = receive_all(consumer, len(values), ack=True)
    assert {(message.value, message.delivery_count) for message in again} == {(value, 2) for value in values}


def test_ticker_that_ends_by_an_exception_fails_the_query_which_starts_again_with_a_new_one(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a ticker the tracker would look alive and decide nothing."""
    is_broken = threading.Event()

    def break_the_thread(_: str) -> None:
        if is_broken.is_set():
            is_broken.clear()
            raise ZeroDivisionError

    monkeypatch.setattr("kmq_spark.tracker.ticker.failpoint", break_the_thread)
    with stage.consumer() as consumer, stage.tracking() as tracker:
        stage.send("held")
        is_broken.set()
        receive_all(consumer, 1)
        (again,) = receive_all(consumer, 1)
        assert (again.value, again.delivery_count) == (b"held", 2)
        # The TICK that the ticker wrote last may have decided this already.
        assert wait_until(lambda: tracker.restarts == 1)


def test_query_that_fails_after_a_batch_was_sent_sends_nothing_of_it_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark runs the batch again, under the old term: its decisions are dropped."""
    fails = threading.Event()

    def fail_once(point: str) -> None:
        if point == "tracker.delivered" and fails.is_set():
            fails.clear()
            message = "a failure after the commit"
            raise KafkaClientError(message, code="_TIMED_OUT", retriable=True)

    monkeypatch.setattr("kmq_spark.tracker.queue_tracker.failpoint", fail_once)
    with stage.consumer() as consumer, stage.tracking() as tracker:
        stage.send("held")
        receive_all(consumer, 1)
        fails.set()  # in the batch of its START, or in one after it
        (again,) = receive_all(consumer, 1, ack=True)
        assert (again.value, again.delivery_count, tracker.restarts) == (b"held", 2, 1)
        consumer.flush()
    story = audit(stage.layout, stage.bootstrap_servers)
    assert (story.redelivered, story.early, story.lost) == (1, 0, set())


def make_anew(stage: Stage) -> None:
    """Delete the topics of the queue and create them again."""
    topics = stage.layout.topics
    admin = AdminClient(admin_config(stage.bootstrap_servers))
    for future in admin.delete_topics(list(topics.all_topics)).values():
        future.result()
    assert wait_until(lambda: topics.queue_topic not in admin.list_topics(timeout=10).topics)
    create_queue_topics(stage.queue, bootstrap_servers=stage.bootstrap_servers, partitions=2)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if mount is None or umount is None:
        pytest.skip("cannot mount a small file system here")
    command = [mount, "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a small file system here")
    try:
        yield folder
    finally:
        subprocess.run([umount, "-l", str(folder)], check=True)


@pytest.mark.slow
def test_full_disk_fails_batches_loudly_and_loses_nothing(
    stage: Stage, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Batches fail with an error while the checkpoint cannot be written; then each message is redelivered once."""
    stage.send(*(f"m{number}" for number in range(20)))
    ballast = small_disk / "ballast"
    settings = stage.settings(checkpoint_dir=str(small_disk))
    tracker = QueueTracker(stage.spark, stage.queue, settings)
    thread = threading.Thread(target=tracker.run)
    thread.start()
    try:
        assert tracker.wait_ready(COMES_S)
        with stage.consumer() as consumer:
            receive_all(consumer, 20)
            # Unbuffered, or closing the file would want to write once more.
            with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(65_536))
            assert wait_until(lambda: tracker.restarts > 0)
            ballast.unlink()
            again = receive_all(consumer, 20)
            assert {message.delivery_count for message in again} == {2}
            for message in again:
                message.ack()
            consumer.flush()
            time.sleep(1.0)
    finally:
        tracker.stop()
        thread.join(COMES_S)
    story = audit(stage.layout, stage.bootstrap_servers)
    assert (story.redelivered, story.early, story.lost) == (20, 0, set())
    assert "failed; restarting in" in caplog.text
