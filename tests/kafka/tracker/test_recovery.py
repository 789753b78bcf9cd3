"""Loss of markers, topics or the checkpoint under a tracker, and how it recovers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from kmq_spark.errors import KmqError
from kmq_spark.kafka.settings import admin_config
from kmq_spark.kafka.topics import create_queue_topics
from kmq_spark.tracker.queue_tracker import QueueTracker
from tests.kafka.conftest import delete_topics, wait_until
from tests.kafka.stage import Stage, receive_all

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


@pytest.mark.slow
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


def mounted(stage: Stage) -> str:
    """Return a URL of the folder of the stage for which we set no checkpoint file manager."""
    hadoop: Any = stage.spark.sparkContext._jsc.hadoopConfiguration()
    table = stage.folder.name.replace("_", "-")  # its own: Hadoop reads a mount table once
    hadoop.set(f"fs.viewfs.mounttable.{table}.link.{stage.folder}", f"file:{stage.folder}")
    return f"viewfs://{table}{stage.folder}"


@pytest.mark.slow  # two failures, each with its pause
def test_checkpoint_that_cannot_be_read_is_put_aside_and_the_state_is_rebuilt(stage: Stage) -> None:
    """Damaged, or of another version: no step is needed, and messages in flight stay in flight."""
    checkpoint_dir = f"file:{stage.folder}/checkpoint"
    with stage.consumer(lease=3600) as consumer:
        with stage.tracking(checkpoint_dir=checkpoint_dir) as tracker:
            stage.send("held")
            (held,) = receive_all(consumer, 1)
            assert wait_until(lambda: sum(s.in_flight for s in tracker.stats.statuses.values()) == 1)
        for file in (stage.folder / "checkpoint").glob("*/state/**/*"):
            if file.is_file():
                file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        with stage.tracking(checkpoint_dir=checkpoint_dir):
            held.release()
            (again,) = receive_all(consumer, 1, ack=True)
            consumer.flush()
    assert (again.value, again.delivery_count) == (b"held", 2)
    assert (stage.folder / "checkpoint" / f"{stage.queue}.damaged-1" / "state").is_dir()


@pytest.mark.slow  # five failures, each with its pause
def test_good_checkpoint_is_put_aside_once_however_often_the_tracker_fails(stage: Stage) -> None:
    """What fails again and again, here by a setting of somebody else, is no damage of the checkpoint."""
    checkpoint_dir = f"{mounted(stage)}/checkpoint"
    of_others = "spark.sql.streaming.checkpointFileManagerClass"
    settings = stage.settings(checkpoint_dir=checkpoint_dir, restart_limit=4)
    with stage.consumer(lease=3600) as consumer:
        with stage.tracking(checkpoint_dir=checkpoint_dir):
            stage.send("held")
            (held,) = receive_all(consumer, 1)
        stage.spark.conf.set(of_others, "no.such.Manager")
        try:
            with pytest.raises(KmqError, match=r"no\.such\.Manager"):
                QueueTracker(stage.spark, stage.queue, settings).run()
        finally:
            stage.spark.conf.unset(of_others)
        with stage.tracking(checkpoint_dir=checkpoint_dir):
            held.release()
            (again,) = receive_all(consumer, 1, ack=True)
    assert (again.value, again.delivery_count) == (b"held", 2)
    assert len(list((stage.folder / "checkpoint").glob("*.damaged-*"))) == 1


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


def make_anew(stage: Stage) -> None:
    """Delete the topics of the queue and create them again."""
    topics = stage.layout.topics
    delete_topics(stage.bootstrap_servers, *topics.all_topics)
    create_queue_topics(stage.queue, bootstrap_servers=stage.bootstrap_servers, partitions=2)
