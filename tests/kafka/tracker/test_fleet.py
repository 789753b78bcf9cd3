"""
Which process of a fleet tracks which queue, on a real broker.

The trackers of most tests here are threads that note when they ran. Spark's trackers are in `test_fleet_processes.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kmq_spark.errors import FencedError, KafkaClientError, KmqError
from kmq_spark.tracker import fleet as fleet_module
from tests.kafka.conftest import wait_until
from tests.kafka.tracker.noting_fleet import Fleet, NotingTracker
from tests.limits import COMES_S

pytestmark = pytest.mark.kafka


@pytest.fixture
def fleet(bootstrap_servers: str, topic: str) -> Iterator[Fleet]:
    """A fleet of this test."""
    with Fleet(bootstrap_servers, topic) as made:
        yield made


def test_each_queue_is_tracked_by_one_process(fleet: Fleet) -> None:
    first = fleet.process("a", "orders", "emails", "bills")
    assert wait_until(lambda: first.running() == ["bills", "emails", "orders"])
    second = fleet.process("b", "orders", "emails", "bills")
    assert wait_until(lambda: len(second.running()) == 1 and len(first.running()) == 2)
    assert sorted(first.running() + second.running()) == ["bills", "emails", "orders"]


def test_queues_of_a_process_that_ends_are_handed_over_without_a_gap(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    """The old tracker goes on until the new one fences it, and is not asked to stop. It is no failure."""
    first = fleet.process("a", "orders", "emails")
    assert wait_until(lambda: len(first.running()) == 2)
    standby = fleet.process("b")
    assert wait_until(lambda: len(standby.running()) == 1)
    first.end()
    assert wait_until(lambda: standby.running() == ["emails", "orders"])
    assert [tracker.is_asked_to_stop for tracker in first.made] == [False, False]
    assert first.failure is None
    assert "failed; it is started again" not in caplog.text


def test_queues_are_handed_over_one_after_the_other(fleet: Fleet) -> None:
    """
    Trackers that start at the same time slow each other: the next queue goes when the last one's new tracker is ready.

    A queue whose turn has not come is tracked as before. Whether the old tracker was fenced does not count.
    """
    queues = ["orders", "emails", "bills", "returns"]
    first = fleet.process("a", *queues)
    assert wait_until(lambda: len(first.running()) == len(queues))
    second = fleet.process("b", make=lambda queue: NotingTracker(queue, is_ready=False))
    assert wait_until(lambda: len(second.running()) == 1)
    (moved,) = second.running()
    assert wait_until(lambda: sum(task.client_id == "b" for task in first.fleet.view().tasks.values()) == 2)
    time.sleep(2)
    assert second.running() == [moved]
    assert set(first.running()) == set(queues) - {moved}
    second.tracker(moved).is_ready = True
    assert wait_until(lambda: len(second.running()) == 2)


def test_tracker_that_is_not_ready_for_long_does_not_stop_the_hand_overs(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example without a broker, or in a process of a version that does not show whether a tracker is ready."""
    monkeypatch.setattr(fleet_module, "STARTING_S", 2.0)
    first = fleet.process("a", "orders", "emails", "bills", "returns")
    assert wait_until(lambda: len(first.running()) == 4)
    second = fleet.process("b", make=lambda queue: NotingTracker(queue, is_ready=False))
    assert wait_until(lambda: len(second.running()) == 2)
    starts_s = [tracker.began_s for tracker in second.made]
    assert starts_s[1] - starts_s[0] > 1.5


def test_process_that_ends_hands_over_all_its_queues_in_time(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many they are: it waits less for trackers that start."""
    monkeypatch.setattr(fleet_module, "DRAIN_HAND_OVERS_S", 2.0)
    queues = ["bills", "emails", "orders", "returns", "stocks"]
    first = fleet.process("a", *queues)
    assert wait_until(lambda: first.running() == queues)
    standby = fleet.process("b", make=lambda queue: NotingTracker(queue, is_ready=False))
    assert wait_until(lambda: len(standby.running()) == 1)
    first.end()
    assert standby.running() == queues
    assert not any(tracker.is_asked_to_stop for tracker in first.made)
    starts_s = sorted(tracker.began_s for tracker in standby.made)[1:]
    assert starts_s[-1] - starts_s[0] > 1.0


def test_queue_whose_claim_is_over_does_not_wait_for_its_turn(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its successor has it already; the old tracker is stopped if that one does not fence it."""
    monkeypatch.setattr(fleet_module, "STARTING_S", 3_600.0)
    monkeypatch.setattr(fleet_module, "HAND_OVER_S", 1.0)
    first = fleet.process("a", "orders", "emails", "bills", "returns")
    assert wait_until(lambda: len(first.running()) == 4)
    second = fleet.process("b", make=lambda queue: NotingTracker(queue, is_ready=False), is_fencing=False)
    assert wait_until(lambda: len(second.running()) == 1 and len(first.running()) == 3)
    for tracking in list(first.fleet._running.values()):
        tracking.claim.release()
    assert wait_until(lambda: len(second.running()) == 2 and len(first.running()) == 2)


def test_last_process_ends_without_a_successor(fleet: Fleet) -> None:
    only = fleet.process("a", "orders")
    assert wait_until(lambda: only.running() == ["orders"])
    only.end()
    assert only.running() == []
    assert only.failure is None
    assert only.events[-1] == ("stopped", "orders")


def test_tracker_that_no_successor_fences_is_stopped_after_a_while(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before its process ends, which would stop it too."""
    caplog.set_level(logging.INFO, logger="kmq_spark.tracker.fleet")
    monkeypatch.setattr(fleet_module, "HAND_OVER_S", 3.0)
    first = fleet.process("a", "orders")
    assert wait_until(lambda: first.running() == ["orders"])
    standby = fleet.process("b", make=lambda queue: NotingTracker(queue, is_ready=False), is_fencing=False)
    first.fleet.stop()
    assert wait_until(lambda: standby.running() == ["orders"])
    assert wait_until(lambda: first.running() == [])
    assert first.tracker("orders").is_asked_to_stop
    assert first.tracker("orders").ended_s > standby.tracker("orders").began_s
    assert "stopping the tracker of orders: no successor has fenced it" in caplog.text
    assert first.wait_end() is None


def test_tracker_is_stopped_when_its_successor_is_ready(fleet: Fleet) -> None:
    """It was fenced then, and need not find that out in a batch."""
    first = fleet.process("a", "orders")
    assert wait_until(lambda: first.running() == ["orders"])
    standby = fleet.process("b", make=lambda queue: NotingTracker(queue, is_ready=False), is_fencing=False)
    first.fleet.stop()
    assert wait_until(lambda: standby.running() == ["orders"])
    time.sleep(1)
    assert not first.tracker("orders").is_asked_to_stop
    standby.tracker("orders").is_ready = True
    assert wait_until(lambda: first.tracker("orders").is_asked_to_stop)
    assert first.wait_end() is None


def test_queue_that_comes_back_before_it_was_fenced_is_started_again(fleet: Fleet) -> None:
    first = fleet.process("a", "orders", "emails")
    assert wait_until(lambda: len(first.running()) == 2)
    second = fleet.process("b", make=lambda queue: NotingTracker(queue, is_ready=False), is_fencing=False)
    assert wait_until(lambda: len(second.running()) == 1)
    (moved,) = second.running()
    old = first.tracker(moved)
    assert old.is_running
    second.fleet.stop()
    assert wait_until(lambda: len(first.made) == 3 and first.running() == ["emails", "orders"])
    assert old.is_asked_to_stop
    assert not old.is_running
    assert second.wait_end() is None


def test_trackers_give_way_to_one_that_starts(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it has had its first batch, and not for ever."""
    monkeypatch.setattr(fleet_module, "STARTING_S", 3.0)
    first = fleet.process("a", "orders", "emails", make=lambda queue: NotingTracker(queue, is_ready=False))
    assert wait_until(lambda: len(first.made) == 2 and all(tracker.gives_way_s for tracker in first.made))
    for tracker in first.made:
        tracker.is_ready = True
    assert wait_until(lambda: not any(tracker.gives_way_s for tracker in first.made))
    first.made[0].fence()
    assert wait_until(lambda: first.running() == ["emails"])
    first.fleet._not_before_s.clear()
    assert wait_until(lambda: first.tracker("emails").gives_way_s > 0)
    assert wait_until(lambda: not first.tracker("emails").gives_way_s)


def test_process_that_cannot_reach_the_group_goes_on_until_another_one_has_the_queue(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its claim is over after T, and its tracker runs on; it claims again when the log can be read again."""
    heartbeat_s = 0.5
    only = fleet.process("a", "orders", fleet_heartbeat=heartbeat_s)
    assert wait_until(lambda: only.running() == ["orders"])
    session = only.fleet._coordinator._session
    assert session is not None
    held = session.claims["orders"]
    channel = session._channel
    read, write = channel.read, channel.write

    def read_nothing(timeout_s: float) -> list[Any]:
        time.sleep(timeout_s)
        return []

    monkeypatch.setattr(channel, "read", read_nothing)
    monkeypatch.setattr(channel, "write", lambda _value: None)
    assert wait_until(lambda: not held.is_held)
    time.sleep(3 * heartbeat_s)
    assert only.running() == ["orders"]
    monkeypatch.setattr(channel, "read", read)
    monkeypatch.setattr(channel, "write", write)
    operator = fleet.operator()
    try:
        # The session releases the claim that it had lost before it claims again.
        assert operator.wait_for(
            lambda world: "orders" in world.resources and world.resources["orders"].epoch > held.epoch, COMES_S
        )
    finally:
        operator.close()
    assert len(only.made) == 1
    assert only.running() == ["orders"]


def test_paused_fleet_tracks_nothing_until_it_is_resumed(fleet: Fleet) -> None:
    only = fleet.process("a", "orders")
    assert wait_until(lambda: only.running() == ["orders"])
    operator = fleet.operator()
    try:
        operator.pause(60)
        assert wait_until(lambda: only.running() == [])
        operator.resume()
        assert wait_until(lambda: only.running() == ["orders"])
    finally:
        operator.close()


def test_queue_that_is_removed_is_tracked_no_more_and_a_task_that_is_no_queue_never(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    """Its name would become a folder."""
    only = fleet.process("a", "orders", "emails")
    assert wait_until(lambda: only.running() == ["emails", "orders"])
    operator = fleet.operator()
    try:
        operator.remove_task("emails")
        operator.add_task("../etc")
    finally:
        operator.close()
    assert wait_until(lambda: only.running() == ["orders"])
    assert wait_until(lambda: "'../etc' of fleet" in caplog.text)
    assert len(only.made) == 2


def test_tracker_that_fails_is_started_again_and_the_others_run_on(fleet: Fleet) -> None:
    """A queue whose topic is missing takes no other queue down."""
    error = KafkaClientError("broker of this queue is away", code="_TRANSPORT", retriable=True)
    only = fleet.process(
        "a", "orders", "emails", make=lambda queue: NotingTracker(queue, error if queue == "emails" else None)
    )
    assert wait_until(lambda: len([one for one in only.made if one.queue == "emails"]) == 3)
    assert len([one for one in only.made if one.queue == "orders"]) == 1
    assert only.running() == ["orders"]


def test_tracker_that_is_fenced_from_outside_the_fleet_waits_before_it_fences_back(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    only = fleet.process("a", "orders", make=lambda queue: NotingTracker(queue, FencedError("fenced by x")))
    assert wait_until(lambda: "started again in 10 s" in caplog.text)
    assert len(only.made) == 1


def test_queues_of_a_process_without_a_jvm_do_not_wait_for_its_trackers(fleet: Fleet) -> None:
    """
    The process leaves the group at once: with T = 60 s a lapse would take two minutes.

    A tracker that takes long to end is fenced by its successor; the process ends when it has ended.
    """
    first = fleet.process("a", "orders", make=lambda queue: NotingTracker(queue, hangs=True), fleet_heartbeat=60)
    assert wait_until(lambda: first.running() == ["orders"])
    standby = fleet.process("b")
    first.engine_error = KmqError("the JVM of Spark is gone: got x; start the tracker again")
    # Less than the lapse takes.
    assert wait_until(lambda: standby.running() == ["orders"], 100)
    assert first.running() == ["orders"]
    first.tracker("orders").end.set()
    assert first.wait_end() is first.engine_error
