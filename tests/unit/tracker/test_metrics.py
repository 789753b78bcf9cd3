"""The metrics of a process of a fleet."""

from __future__ import annotations

from kmq_spark.coordination import GroupView
from kmq_spark.core.coordination.world import Member, Resource, Task
from kmq_spark.tracker.metrics import fleet_samples


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
