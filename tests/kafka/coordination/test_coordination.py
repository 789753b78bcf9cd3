"""Groups on a real broker: claims, instances, positions, tasks, snapshots, and holders that are killed or suspended."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from kmq_spark.coordination import (
    Claim,
    Coordinator,
    RunningTask,
    TaskRunner,
    channel,
    coordinator,
    create_coordination_topic,
)
from kmq_spark.core.coordination.effects import Change, Effect
from kmq_spark.core.coordination.partition import partition_of
from kmq_spark.errors import (
    ClaimLostError,
    ConfigError,
    KafkaClientError,
    MalformedRecordError,
    TopicError,
    UsageError,
)
from kmq_spark.local.broker import EmbeddedBroker
from tests.kafka.conftest import wait_until
from tests.kafka.documents import blocks_of

pytestmark = pytest.mark.kafka

T = 1_000
ROOT = Path(__file__).resolve().parents[3]
_numbers = itertools.count()


@pytest.fixture(scope="module")
def topic(bootstrap_servers: str) -> str:
    """A coordination topic of this module."""
    name = f"coordination-{os.getpid()}-{time.time_ns()}"
    create_coordination_topic(bootstrap_servers, topic=name, partitions=2, replication_factor=1)
    return name


Make = Callable[..., Coordinator]


@pytest.fixture
def make(bootstrap_servers: str, topic: str) -> Iterator[Make]:
    """Make coordinators of one group that no other test uses; they are closed at the end."""
    group, made = f"group-{next(_numbers)}", []

    def new(client_id: str = "", *, begin: str = "join", **options: Any) -> Coordinator:  # noqa: ANN401  # passed on
        options = {"group": group, "topic": topic, "heartbeat_ms": T, **options}
        made.append(Coordinator(bootstrap_servers=bootstrap_servers, client_id=client_id, **options))
        if begin:
            getattr(made[-1], begin)()
        return made[-1]

    yield new
    for one in made:
        one.close()


def held(claim: Claim | None) -> Claim:
    """Return a claim that was granted."""
    assert claim is not None
    claim.check()
    return claim


# The topic.


def test_topic_that_is_there_is_checked_and_left_alone(bootstrap_servers: str, topic: str) -> None:
    """A second creation changes nothing."""
    create_coordination_topic(bootstrap_servers, topic=topic, partitions=7)
    found = AdminClient({"bootstrap.servers": bootstrap_servers}).list_topics(topic, timeout=10)
    assert len(found.topics[topic].partitions) == 2


def test_topic_with_the_clocks_of_hosts_is_refused(bootstrap_servers: str) -> None:
    """CreateTime: a host's clock would decide who is stale. The error names the repair."""
    name = f"coordination-{time.time_ns()}"
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    (made,) = admin.create_topics([NewTopic(name, 1, 1, config={"message.timestamp.type": "CreateTime"})]).values()
    made.result()
    with pytest.raises(
        TopicError, match=r"has message.timestamp.type=CreateTime, must be LogAppendTime; run `kafka-con"
    ):
        Coordinator("g", bootstrap_servers=bootstrap_servers, topic=name).join()


def test_topic_that_does_not_exist_is_refused(bootstrap_servers: str) -> None:
    """It is not made by accident."""
    with pytest.raises(TopicError, match="coordination topic 'no-such-topic' does not exist"):
        Coordinator("g", bootstrap_servers=bootstrap_servers, topic="no-such-topic").join()


@pytest.mark.parametrize("options", [{"retention_ms": 59_999}, {"partitions": 0}])
def test_topic_is_made_within_bounds(bootstrap_servers: str, options: dict[str, Any]) -> None:
    """Before anything is asked of the broker."""
    with pytest.raises(ConfigError):
        create_coordination_topic(bootstrap_servers, topic="never-made", **options)


def test_members_stop_when_the_topic_grows(bootstrap_servers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """New members would look for the group in another partition: two worlds, two holders."""
    monkeypatch.setattr(channel, "_LOOK_EVERY_S", 0.2)
    name = f"coordination-{time.time_ns()}"
    create_coordination_topic(bootstrap_servers, topic=name, partitions=1, replication_factor=1)
    with Coordinator("g", bootstrap_servers=bootstrap_servers, topic=name, heartbeat_ms=T) as member:
        claim = held(member.claim("r"))
        admin = AdminClient({"bootstrap.servers": bootstrap_servers})
        (grown,) = admin.create_partitions([NewPartitions(name, 2)]).values()
        grown.result()
        assert wait_until(lambda: member.failure is not None)
        with pytest.raises(TopicError, match="has another number of partitions: got 2, it had 1; stop all members"):
            member.claim("s")
        assert not claim.is_held


# Claims.


def test_one_of_two_members_gets_a_resource_and_the_other_follows(make: Make) -> None:
    """With the position that was left, and a larger epoch."""
    first, second = make("a"), make("b")
    claim = held(first.claim("orders/0"))
    assert first.claim("orders/0") is claim
    assert second.claim("orders/0") is None
    claim.commit(42, wait_s=10)
    claim.release()
    taken = held(second.claim("orders/0", 10))
    assert (taken.position, taken.epoch > claim.epoch, list(second.claims)) == (42, True, ["orders/0"])
    with pytest.raises(ClaimLostError):
        claim.check()


def test_member_that_leaves_frees_what_it_held(make: Make) -> None:
    """At once: the other member does not wait for 2T."""
    changes: list[Effect] = []
    first, second = make("a"), make("b", on_change=changes.extend)
    held(first.claim("r"))
    first.close()
    held(second.claim("r", 10))
    assert wait_until(lambda: Effect(Change.LEFT, "a") in changes)
    assert not [effect for effect in changes if effect.change in {Change.LAPSED, Change.DROPPED}]
    with pytest.raises(UsageError, match="was not joined"):
        first.claim("r")
    with pytest.raises(UsageError, match="was used before"):
        first.join()


def test_messages_are_claimed_before_they_are_handed_out(make: Make) -> None:
    """At most once: the next holder begins behind them."""
    first, second = make("a"), make("b")
    claim = held(first.claim("r"))
    claim.claim_messages(10)
    assert second.wait_for(lambda world: world["resources"]["r"]["position"] == 10, 10)
    assert second.view()["resources"]["r"]["claimed_to"] == 10
    claim.release()
    assert held(second.claim("r", 10)).position == 10


def test_callback_reports_a_claim_that_is_over(make: Make) -> None:
    """By `on_lost`, in a thread of its own; here since the group was paused."""
    lost: list[Claim] = []
    first, second = make("a", on_lost=lost.append), make("o", begin="watch")
    claim = held(first.claim("r"))
    second.pause(60_000)
    assert wait_until(lambda: lost == [claim])
    assert not claim.is_held
    second.resume()
    held(first.claim("r", 10))


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


def test_process_that_stops_without_leaving_is_found_again(make: Make) -> None:
    """A quick restart with a stable client id keeps the claims, with their positions."""
    first = make("a")
    held(first.claim("r")).commit(5)
    first.close(leave=False)
    taken = held(make("a", fast_reclaim=True).claims["r"])
    assert taken.position == 5


# The operator.


def test_positions_are_set_while_the_group_is_paused(make: Make) -> None:
    """Not before, and not while something is held."""
    member, operator = make("a"), make("o", begin="watch")
    held(member.claim("r")).commit(9, wait_s=10)
    with pytest.raises(
        UsageError, match=r"SET_POSITION changed nothing in group 'group-.*': not_paused; pause the group"
    ):
        operator.set_position("r", 3)
    operator.pause(60_000)
    member.claims["r"].release()
    assert operator.wait_for(lambda world: not world["resources"]["r"]["holder"], 10)
    operator.set_position("r", 3)
    operator.resume()
    assert held(member.claim("r", 10)).position == 3


# Tasks.


def test_tasks_are_spread_and_follow_the_members(make: Make) -> None:
    """Ten tasks over two members, then over one; a member that drains gives its tasks away."""
    first = make("a")
    for number in range(10):
        first.add_task(f"t{number}", b"payload")
    second = make("b")

    def counts(world: dict[str, Any]) -> list[int]:
        owners = [task["client_id"] for task in world["tasks"].values()]
        return [owners.count("a"), owners.count("b")]

    assert second.wait_for(lambda world: counts(world) == [5, 5], 10)
    assert set(second.assigned.values()) == {b"payload"}
    mine = next(iter(second.assigned))
    assert first.claim(mine) is None
    held(second.claim(mine, 10))
    second.drain()
    assert first.wait_for(lambda world: counts(world) == [10, 0], 10)
    # The hand-over: the old owner first.
    assert first.claim(mine) is None
    second.claims[mine].release()
    held(first.claim(mine, 10))
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
                while task.check():
                    task.stopping.wait(0.01)
            finally:
                events.append((task.name, client_id, "end"))

        return handle

    first, second = make("a"), make("b")
    for number in range(4):
        first.add_task(f"t{number}")
    with TaskRunner(first, handler_of("a"), restart_s=0.1) as runner:
        assert wait_until(lambda: len(runner.running) == 2, 20)
        with TaskRunner(second, handler_of("b"), restart_s=0.1) as other:
            assert wait_until(lambda: len(other.running) == 2 and len(failed) == 4, 20)
            assert runner.drain(20)
            assert wait_until(lambda: len(other.running) == 4, 20)
    for name in failed:
        steps = [(client_id, what) for task, client_id, what in events if task == name]
        begins, ends = steps[::2], steps[1::2]
        # Never two at once: each begin is followed by its own end.
        assert [(client_id, "end") for client_id, _ in begins] == ends
        assert begins[-1][0] == "b"


# Snapshots.


def test_group_outlives_the_records_that_made_it(bootstrap_servers: str, topic: str, make: Make) -> None:
    """A member that joins when the JOINs and CLAIMs are deleted has the same world as the others."""
    first = make("a")
    claim = held(first.claim("r"))
    for position in range(1, 13):
        claim.commit(position, wait_s=10)
    session = first._session
    assert session is not None
    with session.changed:
        session._snapshot_every_ms = 0
    assert first.wait_for(lambda world: world["snapshot_at"] >= 0, 10)
    with session.changed:
        session._snapshot_every_ms = 1e9
    # Well above the JOIN and the CLAIM, and a little below what the snapshot is as of.
    before = first.view()["snapshot_at"] - 6
    assert before > claim.epoch
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    (done,) = admin.delete_records([TopicPartition(topic, partition_of(first.group, 2), before)]).values()
    done.result()
    second = make("b")
    assert sorted(second.view()["members"]) == ["a", "b"]
    assert second.view()["resources"]["r"]["position"] == 12
    assert second.claim("r") is None
    first.close()
    assert held(second.claim("r", 10)).position == 12


def test_group_without_a_snapshot_is_joined_when_its_members_are_silent(
    bootstrap_servers: str, topic: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its JOIN was deleted, and it still heartbeats: no other process can know what it holds."""
    first = make("a")
    claim = held(first.claim("r"))
    assert first.wait_for(lambda world: world["next_offset"] > claim.epoch + 3, 10)
    place = TopicPartition(topic, partition_of(first.group, 2), claim.epoch + 2)
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    (done,) = admin.delete_records([place]).values()
    done.result()
    second = make("b", begin="")
    with pytest.raises(KafkaClientError, match=r"no snapshot of group 'group-.*' was found; check that its"):
        second.join(3)
    first.close(leave=False)
    monkeypatch.setattr(coordinator, "LONGEST_SILENCE_S", 2)
    held(make("c").claim("r", 10))


def test_program_of_the_document_runs(bootstrap_servers: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As printed, with the broker and a group of this test."""
    (block,) = blocks_of("docs/coordination.md")
    group = f"document-{time.time_ns()}"
    program = block.text.replace("localhost:9092", bootstrap_servers).replace('"fleet"', repr(group))
    exec(compile(program, "docs/coordination.md", "exec"), {})  # noqa: S102  # our own document
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines] == [str(position) for position in range(10)]


# Bad input.


def test_names_of_300_characters_are_refused(make: Make, bootstrap_servers: str) -> None:
    """Before anything is written."""
    member = make("a")
    with pytest.raises(MalformedRecordError, match="cannot write CLAIM: resource is too long: got 300 characters"):
        member.claim("r" * 300)
    with pytest.raises(ConfigError, match="client id is too long: got 300 characters"):
        Coordinator("g", bootstrap_servers=bootstrap_servers, client_id="c" * 300)
    with pytest.raises(ConfigError, match="group name is not allowed"):
        Coordinator("g" * 300, bootstrap_servers=bootstrap_servers)
    with pytest.raises(ConfigError, match="heartbeat interval in ms is out of bounds: got 99, allowed 100 to 60000"):
        Coordinator("g", bootstrap_servers=bootstrap_servers, heartbeat_ms=99)
    held(member.claim("r"))


def test_child_process_holds_nothing(make: Make) -> None:
    """After a fork only the parent may act."""
    member = make("a")
    claim = held(member.claim("r"))
    pid = os.fork()
    if pid == 0:
        os._exit(1 if claim.is_held or member._session is not None else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    claim.check()


# Processes that die or stand still.


class Worker:
    """A process of `coordination_worker.py`, and the lines that it wrote."""

    def __init__(
        self, bootstrap_servers: str, topic: str, group: str, client_id: str, *, file: Path, mode: str
    ) -> None:
        """Start it."""
        self.file = file
        command = [sys.executable, "-m", "tests.kafka.coordination_worker", bootstrap_servers, topic, group, client_id]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen([*command, "r", str(T), str(file), mode], cwd=ROOT, env=environment)

    def lines(self, kind: str) -> list[list[str]]:
        """Return the complete lines of one kind, in words."""
        text = self.file.read_text("utf-8") if self.file.exists() else ""
        return [words for line in text.split("\n")[:-1] if (words := line.split())[0] == kind]

    def acts_ms(self) -> list[float]:
        """Return when it was allowed to act."""
        return [float(words[1]) for words in self.lines("act")]

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()


@pytest.fixture
def workers(bootstrap_servers: str, topic: str, tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Start workers of one group, on one resource."""
    group, started = f"workers-{next(_numbers)}", []

    def start(client_id: str, mode: str = "act") -> Worker:
        started.append(Worker(bootstrap_servers, topic, group, client_id, file=tmp_path / client_id, mode=mode))
        return started[-1]

    yield start
    for one in started:
        one.end()


def epochs(worker: Worker) -> list[int]:
    """Return the epochs under which a worker claimed."""
    return [int(words[1]) for words in worker.lines("claimed")]


def test_resource_of_a_killed_holder_is_taken_over(workers: Callable[..., Worker]) -> None:
    """By the other one, with a larger epoch, and after the last act of the first."""
    first = workers("a")
    assert wait_until(lambda: bool(first.acts_ms()), 30)
    second = workers("b")
    assert wait_until(lambda: len(first.acts_ms()) > 100, 30)
    first.end()
    assert wait_until(lambda: bool(second.acts_ms()), 30)
    assert second.acts_ms()[0] > first.acts_ms()[-1]
    assert epochs(second)[0] > epochs(first)[-1]


def test_suspended_holder_does_not_act_when_it_wakes_up(workers: Callable[..., Worker]) -> None:
    """The other has the resource by then: the acts of the two do not overlap, twice over."""
    first = workers("a")
    assert wait_until(lambda: bool(first.acts_ms()), 30)
    second = workers("b")
    for holder, other in ((first, second), (second, first)):
        acts = len(other.acts_ms())
        holder.process.send_signal(signal.SIGSTOP)
        assert wait_until(lambda: len(other.acts_ms()) > acts + 20, 30)  # noqa: B023  # called within the loop
        losses = len(holder.lines("lost"))
        holder.process.send_signal(signal.SIGCONT)
        assert wait_until(lambda: len(holder.lines("lost")) > losses, 30)  # noqa: B023  # as above
    turns = sorted([(at_ms, "a") for at_ms in first.acts_ms()] + [(at_ms, "b") for at_ms in second.acts_ms()])
    # a until it is suspended, then b, then a.
    assert [name for name, _ in itertools.groupby(name for _, name in turns)] == ["a", "b", "a"]


def test_messages_are_handed_out_at_most_once_whoever_is_killed(workers: Callable[..., Worker]) -> None:
    """Holders are killed at random moments; the next one begins behind what was claimed, and loses a batch at most."""
    running = [workers(f"w{number}", "messages") for number in range(4)]
    deaths = 0
    while len(running) > 1:
        assert wait_until(lambda: any(len(one.lines("message")) > 50 for one in running), 30)  # as above
        holder = max(running, key=lambda one: len(one.lines("message")))
        holder.end()
        running.remove(holder)
        deaths += 1
    (last,) = running
    assert wait_until(lambda: len(last.lines("message")) > 50, 30)
    last.end()
    files = [file.read_text("utf-8").split("\n")[:-1] for file in last.file.parent.iterdir()]
    numbers = [int(line.split()[1]) for lines in files for line in lines if line.startswith("message ")]
    assert len(numbers) == len(set(numbers))
    assert max(numbers) + 1 - len(numbers) <= deaths * 10


def test_broker_that_was_away_leaves_no_resource_behind() -> None:
    """Holds end while it is away; afterwards the resource can be claimed, also by the other member."""
    with EmbeddedBroker() as broker:
        servers = broker.bootstrap_servers
        create_coordination_topic(servers, partitions=1)
        with (
            Coordinator("g", bootstrap_servers=servers, client_id="a", heartbeat_ms=T) as first,
            Coordinator("g", bootstrap_servers=servers, client_id="b", heartbeat_ms=T) as second,
        ):
            claim = held(first.claim("r"))
            broker.kill()
            assert wait_until(lambda: not claim.is_held, 30)
            broker.start()
            taken = held(second.claim("r", 60))
            assert taken.epoch > claim.epoch
            assert sorted(second.view()["members"]) == ["a", "b"]
            assert first.claim("r") is None
