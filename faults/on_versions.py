"""Faults of an upgrade, and of the way back: markers and checkpoints of other versions beside ours."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, TopicPartition

from faults.load import write_record
from faults.mix import Asked
from faults.older import newer_marker, older_marker
from faults.protocol import LOGICAL_QUEUE as QUEUE
from faults.topics import read_dump
from kmq_spark.core.markers import MarkerType
from kmq_spark.core.state import STATE_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from faults.campaign import Campaign
    from faults.protocol import MessageId
    from faults.stage import Stage
    from faults.topics import Record

FOREIGN = "foreign"
"""Logical queue that the consumers of other versions work on."""

LEASE_MS = 3_000


def mixed(campaign: Campaign) -> Stage:
    """F16: consumers of an older and a newer version beside ours, then a tracker on the checkpoint of each."""
    from faults.older_state import write_checkpoint_of  # noqa: PLC0415  # Spark loads only where it is used

    stage = campaign.stage("f16")
    stage.send(rate=campaign.rate(100))
    stage.worker("crew")
    checkpoint, others = stage.folder / "checkpoint", ((older_marker, -1), (newer_marker, 1))
    started: set[MessageId] = set()
    for number in range(campaign.scaled(2, least=1)):
        for marker, step in others:
            with stage.tracking():
                _work_as(stage, marker, started)
                stage.injected("markers of another version", form=marker.__name__)
                # The offsets of the tracker's group must say that it was there.
                time.sleep(3)
            made = checkpoint / f"made-{stage.injections}"
            write_checkpoint_of(STATE_VERSION + step, stage.layout, stage.bootstrap_servers, campaign.spark(), made)
            # Written elsewhere, and the tracker's renamed, not removed: a task of the query that was stopped may still
            # write into it.
            at = checkpoint / stage.queue
            at.rename(checkpoint / f"left-{stage.injections}")
            made.rename(at)
            stage.injected("checkpoint of another version", version=STATE_VERSION + step, round=number)
    with stage.tracking():
        stage.worker("takes-over", logical_queue=FOREIGN)
        time.sleep(2 * LEASE_MS / 1000)
        stage.drain()
    aside, wanted = len(list(checkpoint.glob("*.damaged-*"))), len(others) * campaign.scaled(2, least=1)
    # A task of the query that failed may write its state once more into the folder, which is then put aside again.
    if not wanted <= aside <= 2 * wanted:
        stage.fail(f"F16: {aside} checkpoints were put aside, expected {wanted} to {2 * wanted}")
    return stage


def _work_as(stage: Stage, marker: Callable[[MarkerType, int, int, int], bytes], started: set[MessageId]) -> None:
    """Send twenty messages, start them as a consumer of another version, end every second one, and commit."""
    stage.send(rate=0, count=20, ask=lambda _: Asked({"logical_queue": FOREIGN}, {QUEUE: FOREIGN})).join()
    messages = read_dump(stage.queue, stage.bootstrap_servers).messages
    waiting = [one for one in messages if one.header(QUEUE) == FOREIGN.encode() and one.place not in started]
    for number, record in enumerate(waiting):
        partition, offset = record.place
        write_record(stage, marker(MarkerType.START, partition, offset, LEASE_MS), partition)
        # What comes again is ended, so that nothing reaches the limit.
        if number % 2 or record.previous is not None:
            write_record(stage, marker(MarkerType.END, partition, offset, 0), partition)
    started.update(record.place for record in waiting)
    _commit(stage, messages)


def _commit(stage: Stage, messages: Sequence[Record]) -> None:
    """Commit the position behind these messages for the logical queue's consumers: all of theirs are started."""
    topics = stage.layout.topics
    ends: dict[int, int] = {}
    for partition, offset in (record.place for record in messages):
        ends[partition] = max(ends.get(partition, 0), offset + 1)
    consumer = Consumer({"bootstrap.servers": stage.bootstrap_servers, "group.id": topics.logical_group(FOREIGN)})
    try:
        at = [TopicPartition(topics.queue_topic, partition, end) for partition, end in ends.items()]
        consumer.commit(offsets=at, asynchronous=False)
    finally:
        consumer.close()
