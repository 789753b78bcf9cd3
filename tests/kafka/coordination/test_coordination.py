"""Groups on a real broker: claims, instances, positions, tasks, snapshots."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from kmq_spark.coordination import Coordinator, GroupView, RunningTask, TaskRunner, channel
from kmq_spark.coordination.topic import partition_of
from kmq_spark.core.coordination.effects import Change, Effect
from kmq_spark.core.coordination.leader import Candidate, sticky_balanced
from kmq_spark.errors import ClaimLostError, ConfigError, KafkaClientError, MalformedRecordError, UsageError
from tests.kafka.conftest import wait_until
from tests.kafka.coordination.conftest import Make, held
from tests.limits import COMES_S

pytestmark = pytest.mark.kafka


# Claims.


def test_one_of_two_members_gets_a_resource_and_the_other_follows(make: Make) -> None:
    """With the position that was left, and a larger epoch."""
    first, second = make("a"), make("b")
    claim = held(first.claim("orders/0"))
    assert first.claim("orders/0") is claim
    assert second.claim("orders/0") is None
    claim.commit(42, timeout=COMES_S)
    claim.release()
    taken = held(second.claim("orders/0", COMES_S))
    assert (taken.position, taken.epoch > claim.epoch, list(second.claims)) == (42, True, ["orders/0"])
    with pytest.raises(ClaimLostError):
        claim.check()


def test_member_that_leaves_frees_what_it_held(make: Make) -> None:
    """At once: the other member does not wait for 2T."""
    changes: list[Effect] = []
    first, second = make("a"), make("b", on_change=changes.extend)
    held(first.claim("r"))
    first.close()
    held(second.claim("r", COMES_S))
    assert wait_until(lambda: Effect(Change.LEFT, "a") in changes)
    assert not [effect for effect in changes if effect.change in {Change.LAPSED, Change.DROPPED}]
    with pytest.raises(UsageError, match="is not joined"):
        first.claim("r")
    with pytest.raises(UsageError, match="was used before"):
        first.join()


def test_messages_are_claimed_before_they_are_handed_out(make: Make) -> None:
    """At most once: the next holder begins behind them."""
    first, second = make("a"), make("b")
    claim = held(first.claim("r"))
    claim.claim_messages(10)
    # The other member may not have read of the resource yet.
    assert second.wait_for(lambda world: "r" in world.resources and world.resources["r"].position == 10, COMES_S)
    assert second.view().resources["r"].claimed_to == 10
    claim.release()
    assert held(second.claim("r", COMES_S)).position == 10


# One client id.


def test_second_instance_is_refused_and_fast_reclaim_takes_over(make: Make) -> None:
    """The first one ends with an error that says why."""
    first = make("a")
    claim = held(first.claim("r"))
    second = make("a", begin="")
    with pytest.raises(UsageError, match=r"cannot join group 'group-.*' as 'a': client_id_in_use; use one client id"):
        second.join(3)
    taken = held(make("a", fast_reclaim=True).claims["r"])
    assert taken.epoch > claim.epoch
    assert wait_until(lambda: first.failure is not None)
    assert not claim.is_held


# Tasks.


def test_tasks_are_spread_and_follow_the_members(make: Make) -> None:
    """Ten tasks over two members, then over one; a member that drains gives its tasks away."""
    first = make("a")
    for number in range(10):
        first.add_task(f"t{number}", b"payload")
    second = make("b")

    def counts(world: GroupView) -> list[int]:
        owners = [task.client_id for task in world.tasks.values()]
        return [owners.count("a"), owners.count("b")]

    assert second.wait_for(lambda world: counts(world) == [5, 5], COMES_S)
    assert set(second.assigned.values()) == {b"payload"}
    mine = next(iter(second.assigned))
    assert first.claim(mine) is None
    claim = held(second.claim(mine, COMES_S))
    second.drain()
    assert first.wait_for(lambda world: counts(world) == [10, 0], COMES_S)
    # The hand-over: the old owner first.
    assert first.claim(mine) is None
    claim.release()
    held(first.claim(mine, COMES_S))
    first.remove_task(mine)
    with pytest.raises(UsageError, match=r"REMOVE_TASK changed nothing in group 'group-.*': unknown_task"):
        first.remove_task(mine)


def test_task_runs_in_one_process_at_a_time(make: Make) -> None:
    """It ends in the old one before it begins in the new one; a handler that fails is called again."""
    events: list[tuple[str, str, str]] = []
    failed: set[str] = set()

    def handler_of(client_id: str) -> Callable[[RunningTask], None]:
        def handle(task: RunningTask) -> None:
            events.append((task.name, client_id, "begin"))
            try:
                if task.name not in failed:
                    failed.add(task.name)
                    message = "the first time it fails"
                    raise RuntimeError(message)
                while not task.stopping.wait(0.01):
                    task.claim.check()
            finally:
                events.append((task.name, client_id, "end"))

        return handle

    first, second = make("a"), make("b")
    for number in range(4):
        first.add_task(f"t{number}")
    with TaskRunner(first, handler_of("a"), retry_delay=0.1) as runner:
        assert wait_until(lambda: len(runner.running) == 2)
        with TaskRunner(second, handler_of("b"), retry_delay=0.1) as other:
            assert wait_until(lambda: len(other.running) == 2 and len(failed) == 4)
            assert runner.drain(COMES_S)
            assert wait_until(lambda: len(other.running) == 4)
    for name in failed:
        steps = [(client_id, what) for task, client_id, what in events if task == name]
        begins, ends = steps[::2], steps[1::2]
        # Never two at once: each begin is followed by its own end.
        assert [(client_id, "end") for client_id, _ in begins] == ends
        assert begins[-1][0] == "b"


def test_task_that_outlasts_the_stop_keeps_its_claim_when_its_member_is_closed(make: Make) -> None:
    """A LEAVE would let another member run it beside this one."""
    changes: list[Effect] = []
    first, second = (make(name, on_change=changes.extend) for name in "ab")
    returned = threading.Event()

    def outlast(_task: RunningTask) -> None:
        returned.wait(COMES_S)

    first.add_task("t")
    runners = [TaskRunner(each, outlast) for each in (first, second)]
    for runner in runners:
        runner.start()
    assert wait_until(lambda: any(runner.running for runner in runners))
    (mine,) = (number for number in range(2) if runners[number].running)
    runners[mine].stop(timeout=0.1)
    (first, second)[mine].close()
    # A LEAVE would be before this claim in the log, so the other member has read what there is.
    held((first, second)[1 - mine].claim("later", COMES_S))
    assert Effect(Change.LEFT, "ab"[mine]) not in changes
    returned.set()
    runners[1 - mine].stop()


def test_functions_of_the_user_cost_no_claim(make: Make) -> None:
    """`assign` and `condition` take longer than T, or raise; heartbeats go on, and the tasks are assigned at last."""
    heartbeat_s, calls = 2.0, list[str]()

    def assign(tasks: Sequence[str], members: Sequence[Candidate], current: Mapping[str, str]) -> Mapping[str, str]:
        calls.append("assign")
        if len(calls) == 1:
            message = "of the user"
            raise RuntimeError(message)
        time.sleep(1.2 * heartbeat_s)
        return sticky_balanced(tasks, members, current)

    def is_assigned(view: GroupView) -> bool:
        time.sleep(1.2 * heartbeat_s)
        return view.tasks["t"].client_id == "a"

    member = make("a", assign=assign, heartbeat=heartbeat_s)
    claim = held(member.claim("r"))
    member.add_task("t")
    assert member.wait_for(is_assigned, COMES_S)
    claim.check()
    assert len(calls) > 1


# Snapshots.


def delete_records(bootstrap_servers: str, topic: str, group: str, before: int) -> None:
    """Delete the records of a group's partition below an offset, -1 = all, as retention does."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    (done,) = admin.delete_records([TopicPartition(topic, partition_of(group, 2), before)]).values()
    done.result()


def test_members_agree_whatever_retention_deletes_when_a_group_begins_again(
    bootstrap_servers: str, topic: str, make: Make
) -> None:
    """The first member has read the old records, the second one finds them deleted; the group was paused."""
    operator = make("o", begin="watch")
    operator.add_task("t", b"payload")
    operator.pause(600)
    first = make("a")
    delete_records(bootstrap_servers, topic, first.group, first.view().generation)
    second = make("b")
    assert dict(second.view().tasks) == dict(first.view().tasks) != {}
    assert second.claim("r") is None


def test_group_whose_records_were_all_deleted_begins_anew_with_a_warning(
    bootstrap_servers: str, topic: str, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """It had no member for longer than the retention; nothing in the topic shows that it ever was."""
    first = make("a")
    held(first.claim("r")).commit(5, timeout=COMES_S)
    first.close()
    delete_records(bootstrap_servers, topic, first.group, -1)
    assert held(make("b").claim("r")).position is None
    assert f"no snapshot of group {first.group} was found" in caplog.text


def test_group_outlives_the_records_that_made_it(bootstrap_servers: str, topic: str, make: Make) -> None:
    """A member that joins when the JOINs and CLAIMs are deleted has the same world as the others."""
    first = make("a")
    claim = held(first.claim("r"))
    for position in range(1, 13):
        claim.commit(position, timeout=COMES_S)
    session = first._session
    assert session is not None
    before = session.world.next_offset
    with session.changed:
        session._duties.snapshot_every_ms = 0
    assert wait_until(lambda: session.world.snapshot_at >= before)
    with session.changed:
        session._duties.snapshot_every_ms = 1e9
    # Well above the JOIN and the CLAIM, and a little below what the snapshot is as of.
    before = session.world.snapshot_at - 6
    assert before > claim.epoch
    delete_records(bootstrap_servers, topic, first.group, before)
    second = make("b")
    assert sorted(second.view().members) == ["a", "b"]
    assert second.view().resources["r"].position == 12
    assert second.claim("r") is None
    first.close()
    assert held(second.claim("r", COMES_S)).position == 12


def test_group_without_a_snapshot_is_joined_when_its_members_are_silent(
    bootstrap_servers: str, topic: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its JOIN was deleted, and it still heartbeats: no other process can know what it holds."""
    first = make("a")
    claim = held(first.claim("r"))
    for position in range(4):
        claim.commit(position, timeout=COMES_S)
    delete_records(bootstrap_servers, topic, first.group, claim.epoch + 2)
    second = make("b", begin="")
    with pytest.raises(KafkaClientError, match=r"no snapshot of group 'group-.*' was found; check that its"):
        second.join(3)
    first.close(leave=False)
    monkeypatch.setattr(channel, "LONGEST_SILENCE_S", 2)
    held(make("c").claim("r", COMES_S))


# Bad input.


def test_values_out_of_bounds_are_refused(make: Make, bootstrap_servers: str) -> None:
    """Before anything is written."""
    member = make("a")
    with pytest.raises(MalformedRecordError, match="cannot write CLAIM: resource is too long: got 300 characters"):
        member.claim("r" * 300)
    with pytest.raises(ConfigError, match="client id is too long: got 300 characters"):
        Coordinator("g", bootstrap_servers=bootstrap_servers, client_id="c" * 300)
    with pytest.raises(ConfigError, match="group name is not allowed"):
        Coordinator("g" * 300, bootstrap_servers=bootstrap_servers)
    with pytest.raises(ConfigError, match=r"heartbeat is out of bounds: got 0.099, 0.1 to 60 seconds"):
        Coordinator("g", bootstrap_servers=bootstrap_servers, heartbeat=0.099)
    held(member.claim("r"))
