"""The metrics of the trackers of a process, in a fleet or not."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kmq_spark.config import load_settings
from kmq_spark.coordination import GroupView
from kmq_spark.core.coordination.world import Member, Resource, Task
from kmq_spark.errors import KmqError
from kmq_spark.metrics.samples import Sample
from kmq_spark.tracker.metrics import TrackerMetrics, fleet_samples
from kmq_spark.tracker.queue_tracker import QueueTracker


def test_samples_of_a_fleet_count_queues_that_no_process_holds() -> None:
    """A resource that is no task is not a queue of the fleet. A member is silent after T, not at T: here only `b`."""
    seen_ms = {"a": 9_000, "b": 7_500, "c": 8_000}
    view = GroupView(
        next_offset=50,
        generation=41,
        leader="a",
        heartbeat=2.0,
        clock_ms=10_000,
        paused_until_ms=0,
        members={name: Member(name, "i", 0, seen_ms=at_ms) for name, at_ms in seen_ms.items()},
        resources={"orders": Resource("a"), "emails": Resource(position=1), "other": Resource("b")},
        tasks={"orders": Task(), "emails": Task(), "bills": Task()},
    )
    found = {sample.name: sample.value for sample in fleet_samples("production", view)}
    assert found == {
        "kmq_group_members": 3, "kmq_group_silent_members": 1, "kmq_group_held": 1, "kmq_group_unheld": 2,
        "kmq_group_generation": 41, "kmq_group_heartbeat_age_seconds": 2.5
    }  # fmt: skip


class Tracker:
    """What the metrics use of a tracker."""

    on_batch: Callable[..., None] | None = None
    snapshot_lag, committed_at_s, tick_late_s, batch_s = 0, 0.0, None, None

    def __init__(self, queue: str, trouble: str = "") -> None:
        self.queue = queue
        self.trouble = lambda: trouble


def test_tracker_has_samples_from_its_start_to_its_end() -> None:
    """In a fleet: sums over its processes are right only where one process has those of a queue."""
    settings = load_settings(None, {"kafka": {"bootstrap_servers": "b:9092"}})
    metrics = TrackerMetrics([], settings, lambda: [Sample("kmq_group_members", ("production",), 2)])
    assert [sample.name for sample in metrics.samples()] == ["kmq_group_members"]
    for queue in ("orders", "emails", "orders"):
        metrics.add(Tracker(queue))
    metrics.remove("emails")
    metrics.remove("never-added")
    queues = {sample.labels[0] for sample in metrics.samples() if sample.name != "kmq_group_members"}
    assert (queues, metrics.health()) == ({"orders"}, "tracker of orders has not started")
    assert [labels for labels, _ in metrics.lateness()] == [("orders",)]


def test_health_names_what_a_tracker_fails_of_whatever_it_commits_in_between() -> None:
    settings = load_settings(None, {"kafka": {"bootstrap_servers": "b:9092"}})
    failing = Tracker("orders", "restarting, 6 of 20: No space left on device")
    failing.committed_at_s = time.time()
    metrics = TrackerMetrics([failing], settings)
    assert metrics.health() == "tracker of orders: restarting, 6 of 20: No space left on device"


def test_failure_of_a_full_disk_names_the_checkpoint_folder_and_what_is_free(tmp_path: Path) -> None:
    own = {"kafka": {"bootstrap_servers": "b:9092"}, "tracker": {"checkpoint_dir": f"file://{tmp_path}"}}
    no_spark: Any = None
    tracker = QueueTracker(no_spark, "orders", load_settings(None, own))
    full = tracker.cause_of(KmqError("IOException: No space left on device"))
    assert re.search(rf"on device; checkpoint folder file://{tmp_path}: \d+ of \d+ MiB free$", full)
    assert tracker.cause_of(KmqError("File too large")) == "File too large"
