"""The findings of `kmq group describe`: each problem of a group with its repair, and nothing where all is well."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kmq_spark.core.coordination.records import RecordType
from kmq_spark.inspection.facts import TopicFacts
from kmq_spark.inspection.findings import Finding, Level
from kmq_spark.inspection.group_findings import check_group, check_topic
from kmq_spark.inspection.groups import GroupState
from kmq_spark.inspection.spans import span
from tests.unit.coordination_memory import GROUP, Partition, Process, T, pass_time

HOUR_MS = 3_600_000
SETTINGS = {
    "message.timestamp.type": "LogAppendTime",
    "cleanup.policy": "delete",
    "retention.ms": str(HOUR_MS),
    "min.insync.replicas": "2",
    "unclean.leader.election.enable": "false",
}
TOPIC = TopicFacts("kmq.coordination", 8, SETTINGS, replicas=3)


class Group:
    """Members `a`, who leads, and `b`; `a` runs the task `t` and holds `r` at position 7."""

    def __init__(self) -> None:
        self.partition = Partition()
        self.members = {name: Process(self.partition, name) for name in "ab"}
        for process in self.members.values():
            process.join()
        self.add_task("t")
        self.members["a"].held("t")
        claim = self.members["a"].held("r")
        claim.commit(7)
        self.live(T)

    def add_task(self, name: str) -> None:
        """Add a task, and let the leader assign it."""
        self.members["b"].session.send(RecordType.ADD_TASK, resource=name)
        self.live(T)

    def live(self, passed_ms: float, *names: str) -> None:
        """Let time pass; only the named members live, all by default."""
        pass_time(self.partition, passed_ms, *(self.members[name] for name in names or self.members))

    @property
    def now_ms(self) -> int:
        """Time of the check."""
        return int(self.partition.now_ms)

    def state(self, **changes: Any) -> GroupState:
        """Return the group as `b` has read it; its newest snapshot is 30 s old."""
        world = self.members["b"].session.world
        now = self.now_ms
        known = GroupState(
            GROUP, 3, world=world, first_at_ms=now - 90_000, snapshot_at_ms=now - 30_000,
            is_complete=True, claimed_at_ms={}, ignored={}, fault="",
        )  # fmt: skip
        return replace(known, **changes)

    def checked(self, topic: TopicFacts = TOPIC, **changes: Any) -> list[Finding]:
        """Run the checks."""
        return check_group(self.state(**changes), topic, self.now_ms)

    def bad(self, topic: TopicFacts = TOPIC, **changes: Any) -> list[Finding]:
        """Return what is not well."""
        return [finding for finding in self.checked(topic, **changes) if finding.level is not Level.OK]


@pytest.fixture
def group() -> Group:
    """A group that is well."""
    return Group()


def one_bad(group: Group, check: str, **changes: Any) -> Finding:
    """Return the only problem, which is of one check and names a repair."""
    (finding,) = group.bad(**changes)
    assert finding.check == check
    assert finding.repair
    return finding


def test_group_that_is_well_has_no_problem(group: Group) -> None:
    """Each check says what it has seen."""
    generation = group.members["b"].session.world.generation
    assert [(finding.check, finding.level, finding.what) for finding in group.checked()] == [
        ("members", Level.OK, "2 members, T is 1.0 s"),
        ("leader", Level.OK, f"a, generation {generation}"),
        ("tasks", Level.OK, "all 1 assigned"),
        ("snapshots", Level.OK, "the newest is 30 s old"),
    ]


def test_member_that_is_silent_for_longer_than_2t_is_named(group: Group) -> None:
    """It is named before a record drops it, if it was silent for three seconds or more."""
    world = group.members["b"].session.world
    world.members["b"] = world.members["b"]._replace(seen_ms=world.clock_ms - 2_500)
    assert not group.bad()
    world.members["b"] = world.members["b"]._replace(seen_ms=world.clock_ms - 9_000)
    finding = one_bad(group, "members")
    assert finding.level is Level.WARNING
    # The check is some time after the last record.
    since_ms = group.now_ms - world.newest_append_ms
    assert finding.what == f"silent for more than 2T (2.0 s): b for {span(9_000 + since_ms)}"


def test_group_whose_members_are_all_silent_runs_nothing(group: Group) -> None:
    """Killed at once: no record has dropped them, and none will."""
    group.partition.now_ms += 60_000
    members, leader, snapshots = group.bad()
    assert (members.check, members.level, members.repair) == (
        "members",
        Level.UNHEALTHY,
        "start the group's processes",
    )
    assert members.what == "no live member: silent are a for 1 min, b for 1 min; 1 task not run"
    assert (leader.check, leader.level) == ("leader", Level.UNHEALTHY)
    assert leader.what == "none: no tasks are assigned and no snapshots are written"
    assert (snapshots.check, snapshots.level) == ("snapshots", Level.WARNING)
    assert "retention may remove 1 position and 1 task from " in snapshots.what


def test_group_without_tasks_whose_members_have_left_is_only_a_warning() -> None:
    """It may have done all that it was for."""
    group = Group()
    group.members["b"].session.send(RecordType.REMOVE_TASK, resource="t")
    group.live(T)
    for process in group.members.values():
        process.session.stop(leave=True)
    group.live(T)
    members, leader, snapshots = group.bad()
    assert (members.level, members.what) == (Level.WARNING, "no live member: all have left")
    assert {leader.level, snapshots.level} == {Level.WARNING}
    endless = replace(TOPIC, settings={**SETTINGS, "retention.ms": "-1"})
    assert [finding.check for finding in group.bad(endless)] == ["members", "leader"]


def test_leader_that_is_silent_assigns_nothing(group: Group) -> None:
    world = group.members["b"].session.world
    world.members["a"] = world.members["a"]._replace(seen_ms=world.clock_ms - 20_000)
    found = {finding.check: finding for finding in group.bad()}
    assert found["leader"].level is Level.UNHEALTHY
    assert found["leader"].what.endswith("the leader is silent: a for 20 s")
    assert found["tasks"].what == "1 task assigned to no live member: t"


def test_task_that_no_member_takes_is_unhealthy(group: Group) -> None:
    for name in "ab":
        group.members["b"].session.send(RecordType.DRAIN, member=name)
    group.live(T)
    finding = one_bad(group, "tasks")
    assert (finding.level, finding.repair) == (Level.UNHEALTHY, "every member is draining: start another one")
    assert finding.what.startswith("1 task assigned to no live member: t")


def test_task_that_its_member_does_not_claim_is_a_warning(group: Group) -> None:
    """Not while the group is paused: then nothing is claimed."""
    group.add_task("t2")
    finding = one_bad(group, "tasks")
    assert (finding.level, finding.what) == (Level.WARNING, "1 task assigned and not claimed: t2")
    group.members["b"].session.send(RecordType.PAUSE_GROUP, duration_ms=600_000)
    group.live(T)
    assert one_bad(group, "pause").level is Level.UNHEALTHY


def test_pause_is_named_with_the_command_that_ends_it(group: Group) -> None:
    """With the topic, where it has another name."""
    group.members["b"].session.send(RecordType.PAUSE_GROUP, duration_ms=600_000)
    group.live(T)
    assert one_bad(group, "pause").repair == "when the reason is over: kmq group pause fleet --end"
    assert one_bad(group, "pause", topic=replace(TOPIC, name="c")).repair.endswith(
        "kmq group pause fleet --end --topic c"
    )


@pytest.mark.parametrize(
    ("snapshot_age_ms", "first_age_ms", "level", "what"),
    [
        (182_000, 200_000, Level.OK, "the newest is 3 min 2 s old"),  # three times a minute, and the clocks' difference
        (184_000, 200_000, Level.WARNING, "the newest is 3 min 4 s old"),
        (
            HOUR_MS // 2 + 1_000,
            HOUR_MS,
            Level.UNHEALTHY,
            "the newest is 30 min 1 s old, and records are kept for 1 h: then the group's state is lost",
        ),
        (None, 600_000, Level.WARNING, "none, and the oldest record is 10 min old"),
    ],
)
def test_snapshots_must_be_younger_than_retention(
    group: Group, snapshot_age_ms: int | None, first_age_ms: int, level: Level, what: str
) -> None:
    """Late by three is a warning; half of the retention is too old."""
    now = group.now_ms
    at_ms = -1 if snapshot_age_ms is None else now - snapshot_age_ms
    found = group.checked(snapshot_at_ms=at_ms, first_at_ms=now - first_age_ms)
    (finding,) = [each for each in found if each.check == "snapshots"]
    assert (finding.level, finding.what) == (level, what)
    assert bool(finding.repair) == (level is not Level.OK)


def test_records_that_members_cannot_read_are_named(group: Group) -> None:
    """A newer version stops members; other bytes only tell of a foreign writer."""
    newer = one_bad(group, "records", ignored={"unsupported": 2, "unreadable": 1}, fault="version 9")
    assert (newer.level, "2 records of a newer version" in newer.what) == (Level.UNHEALTHY, True)
    foreign = one_bad(group, "records", ignored={"unreadable": 1}, fault="no record")
    assert (foreign.level, "1 unreadable record, which" in foreign.what) == (Level.WARNING, True)


def test_topic_that_fits_has_no_problem() -> None:
    (finding,) = check_topic(TOPIC, 3)
    assert finding == Finding("topic", Level.OK, "kmq.coordination: 8 partitions, LogAppendTime, cleanup.policy=delete")


@pytest.mark.parametrize(
    ("changes", "level", "what", "repair"),
    [
        ({"partition_count": 0}, Level.UNHEALTHY, "does not exist", "kmq group init"),
        (
            {"settings": {**SETTINGS, "message.timestamp.type": "CreateTime"}},
            Level.UNHEALTHY,
            "has message.timestamp.type=CreateTime, must be LogAppendTime",
            "--add-config message.timestamp.type=LogAppendTime",
        ),
        ({"leaderless": (2,)}, Level.UNHEALTHY, "has no leader: partitions 2", "start the broker"),
        ({"under_replicated": (2,)}, Level.WARNING, "has out-of-sync replicas: partitions 2", "check the brokers"),
        ({"replicas": 1}, Level.WARNING, "the loss of its broker stops the groups", "raise its replication factor"),
    ],
)
def test_problem_of_the_topic_is_named_with_its_repair(
    changes: dict[str, Any], level: Level, what: str, repair: str
) -> None:
    (finding,) = check_topic(replace(TOPIC, **changes), 3)
    assert (finding.check, finding.level) == ("topic", level)
    assert what in finding.what
    assert repair in finding.repair
