"""Unreadable records of the markers topic, many of them: none is dropped, none is set aside twice."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from kmq_spark.kafka.topics import create_queue
from tests.kafka.tracker.test_redelivery_sender import Place, outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.kafka


@pytest.fixture
def place(bootstrap_servers: str) -> Iterator[Place]:
    """A queue of one partition."""
    name = f"set-aside-{time.time_ns()}"
    place = Place(bootstrap_servers, create_queue(name, bootstrap_servers=bootstrap_servers, partitions=1))
    yield place
    place.close()


def test_flood_of_unreadable_records_is_set_aside_whole_and_once_over_a_crash(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several transactions write them; each one commits the offset that it has reached."""
    values = [b"?%d" % number for number in range(2_500)]
    foreign = Producer({"bootstrap.servers": place.bootstrap_servers})
    for value in values:
        foreign.produce(place.layout.topics.markers_topic, value)
    foreign.flush(10)
    batch = [outcome(next_offset=2_500, needed_offset=2_500, unreadable=range(2_500))]

    def crash(name: str) -> None:
        if name == "tracker.chunk-committed":
            raise KeyboardInterrupt

    first = place.sender(max_transaction_messages=1_000)
    with monkeypatch.context() as patch:
        patch.setattr("kmq_spark.tracker.sender.redelivery.failpoint", crash)
        with pytest.raises(KeyboardInterrupt):
            first.deliver(batch)
    assert len(place.dead_letters()) == 1_000
    first.close()
    assert place.sender(max_transaction_messages=1_000).deliver(batch).set_aside == 1_500
    assert sorted(record.value() or b"" for record in place.dead_letters()) == sorted(values)
    assert place.committed().next_offset == 2_500
