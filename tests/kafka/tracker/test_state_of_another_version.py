"""A checkpoint of another version of the tracker: it is put aside, and the state is rebuilt from the markers topic."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from kmq_spark.core.state import STATE_VERSION
from kmq_spark.inspection.cluster import Cluster
from kmq_spark.tracker.queue_tracker import DAMAGED_AFTER
from tests.kafka.stage import receive_all, wait_until
from tests.kafka.tracker.older_state import write_checkpoint_of

if TYPE_CHECKING:
    from tests.kafka.stage import Stage

pytestmark = [pytest.mark.spark, pytest.mark.kafka]


def has_signed(stage: Stage) -> bool:
    """Return whether a tracker has committed a place in the markers topic."""
    topics = stage.layout.topics
    with closing(Cluster(stage.bootstrap_servers, 10)) as cluster:
        return bool(cluster.committed(topics.tracker_group, topics.markers_topic))


@pytest.mark.slow
def test_checkpoint_of_an_older_version_is_put_aside_and_rebuilt(stage: Stage) -> None:
    """An upgrade needs no manual step: messages in flight are redelivered at their deadlines."""
    stage.send("before")
    with stage.consumer() as consumer:
        # The older one has worked here: without offsets of its group the checkpoint would be of a topic made anew.
        with stage.tracking(checkpoint="earlier"):
            receive_all(consumer, 1, ack=True)
            consumer.flush()
            assert wait_until(lambda: has_signed(stage))
        stage.send("a")
        receive_all(consumer, 1)
        at = stage.folder / "checkpoint" / stage.queue
        write_checkpoint_of(STATE_VERSION - 1, stage.layout, stage.bootstrap_servers, stage.spark, at)
        with stage.tracking() as tracker:
            (again,) = receive_all(consumer, 1)
            again.ack()
            consumer.flush()
    assert (again.value, again.delivery_count, tracker.restarts) == (b"a", 2, DAMAGED_AFTER)
    assert (stage.folder / "checkpoint" / f"{stage.queue}.damaged-1" / "state").is_dir()
