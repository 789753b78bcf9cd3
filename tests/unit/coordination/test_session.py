"""What one process does in a group: on a log in memory, with a clock that the test moves."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from kmq_spark.core.coordination import leader
from kmq_spark.core.coordination.effects import Ignored
from kmq_spark.core.coordination.records import Record, RecordType, SnapshotPart
from kmq_spark.errors import ClaimLostError, FencedError, KafkaClientError, UsageError
from kmq_spark.wire import coordination_pb2
from kmq_spark.wire.coordination import decode_record, encode_record
from kmq_spark.wire.coordination_log import GroupLog
from tests.unit.coordination_memory import GROUP, Partition, Process, T, pass_time
from tests.unit.coordination_story import facts

if TYPE_CHECKING:
    from kmq_spark.core.coordination.effects import Applied


@pytest.fixture
def partition() -> Partition:
    """An empty log."""
    return Partition()


@pytest.fixture
def pair(partition: Partition) -> tuple[Process, Process]:
    """Two members, both up to date; the first leads."""
    first, second = Process(partition, "a"), Process(partition, "b")
    first.join()
    second.join()
    first.session.turn()
    return first, second


def types(partition: Partition, client_id: str = "") -> list[RecordType]:
    """Return the types of all records, or those of a client."""
    records = [decode_record(one.value) for one in partition.records]
    return [record.type for record in records if client_id in {"", record.client_id}]


def test_claim_is_granted_to_one_and_lasts_while_it_heartbeats(
    partition: Partition, pair: tuple[Process, Process]
) -> None:
    """The other gets nothing, for as long as both live."""
    first, second = pair
    claim = first.held()
    assert (claim.epoch, claim.position, claim.is_held, repr(claim)) == (3, None, True, "Claim('r', epoch=3)")
    assert second.claim() is None
    pass_time(partition, 10 * T, first, second)
    claim.check()
    assert not second.session.may_claim("r")
    assert types(partition, "a").count(RecordType.HEARTBEAT) == pytest.approx(29, abs=1)


def test_join_ends_when_a_later_join_was_read_back(partition: Partition) -> None:
    """The first JOIN is lost, as with a broker that was just started; the thread of the session joins again."""
    one = Process(partition, "a")
    one.channel.can_write = False
    answers: list[Applied | None] = []
    joining = threading.Thread(target=lambda: answers.append(one.session.join(60)), daemon=True)
    joining.start()
    while not one.channel.has_kept:
        continue
    one.channel.lose()
    one.channel.can_write = True
    pass_time(partition, 3 * T, one)
    joining.join(30)
    assert [answer.ignored for answer in answers if answer is not None] == [[]]
    assert types(partition)[:2] == [RecordType.JOIN, RecordType.SNAPSHOT]
    assert set(types(partition)[2:]) == {RecordType.HEARTBEAT}


def test_refused_join_is_tried_again_after_t(partition: Partition) -> None:
    """The first instance lives on; the second does not write a JOIN every two seconds."""
    first, second = Process(partition, "a", heartbeat_ms=60 * T), Process(partition, "a", 2, heartbeat_ms=60 * T)
    first.join()
    assert second.join().ignored == [Ignored.CLIENT_ID_IN_USE]
    pass_time(partition, 59 * T, first, second)
    assert types(partition).count(RecordType.JOIN) == 2
    pass_time(partition, 2 * T, first, second)
    assert types(partition).count(RecordType.JOIN) == 3


def test_hold_is_over_when_nothing_was_read_back_for_t_and_stays_over(
    partition: Partition, pair: tuple[Process, Process]
) -> None:
    """Though each heartbeat is in the log, and though they are read later."""
    first, second = pair
    claim = first.held()
    first.channel.can_read = False
    pass_time(partition, T - 1, first, second)
    claim.check()
    partition.now_ms += 1
    with pytest.raises(
        ClaimLostError, match="no renewal was read back from the log for T; stop working on it"
    ) as caught:
        claim.check()
    assert (caught.value.resource, caught.value.epoch) == ("r", 3)
    first.channel.can_read = True
    pass_time(partition, T - 10, first, second)
    assert (claim.is_held, first.session.claims) == (False, {})
    # Its former holder has another T to stop; then it is released.
    assert not second.session.may_claim("r")
    pass_time(partition, T, first, second)
    assert second.session.may_claim("r")


def test_thread_ends_a_hold_before_it_reads_a_late_renewal(partition: Partition, pair: tuple[Process, Process]) -> None:
    """The process was suspended for T; whichever thread runs first afterwards, the claim is over."""
    first, _ = pair
    claim = first.held()
    first.session._beat()
    partition.now_ms += T
    first.session.turn()
    assert (first.session.claims, claim.is_held) == ({}, False)


def test_suspended_holder_is_replaced_after_2t_and_joins_again(
    partition: Partition, pair: tuple[Process, Process]
) -> None:
    """With the same instance, and without its claims."""
    first, second = pair
    claim = first.held()
    claim.commit(7)
    pass_time(partition, T / 2, first, second)
    pass_time(partition, 3 * T, second)
    taken = second.held()
    assert (taken.position, taken.epoch > claim.epoch) == (7, True)
    pass_time(partition, 3 * T, first, second)
    assert (claim.is_held, first.session.is_member, first.session.world.leader) == (False, True, "b")
    first.session.turn()
    assert facts(first.session.world) == facts(second.session.world)


def test_positions_go_with_the_heartbeat(partition: Partition, pair: tuple[Process, Process]) -> None:
    """Only those that were set since; never back."""
    first, second = pair
    claim = first.held()
    claim.commit(5)
    claim.commit(6)
    pass_time(partition, T, first, second)
    assert second.session.world.resources["r"].position == 6
    sent = [record.positions for one in partition.records if (record := decode_record(one.value)).positions]
    assert sent == [(("r", 3, 6),)]
    with pytest.raises(UsageError, match="position of 'r' would go back: got 5; expected 6 or more"):
        claim.commit(5)


def test_position_whose_heartbeat_was_not_written_goes_with_the_next(
    partition: Partition, pair: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The send buffer of the client may be full."""
    first, second = pair
    first.held().commit(5)
    write, refused = first.channel.write, list[bytes]()

    def refuse_once(value: bytes) -> None:
        if not refused:
            refused.append(value)
            raise KafkaClientError("cannot write: Queue full; check the broker", code="_QUEUE_FULL", retriable=True)
        write(value)

    monkeypatch.setattr(first.channel, "write", refuse_once)
    pass_time(partition, T, first, second)
    assert (len(refused), second.session.world.resources["r"].position) == (1, 5)


def test_position_that_was_not_read_back_does_not_count(partition: Partition, pair: tuple[Process, Process]) -> None:
    """Who goes on under the claim, or releases it, goes on from the old one."""
    first, _ = pair
    claim = first.held()
    claim.commit(5)
    first.channel.can_write = False
    with pytest.raises(KafkaClientError, match="HEARTBEAT was not read back"):
        claim.commit(10, timeout=0.001)
    assert claim.position == 5


def test_released_claim_is_over_at_once(partition: Partition, pair: tuple[Process, Process]) -> None:
    """Before the record is written; with its position."""
    first, second = pair
    claim = first.held()
    claim.commit(5)
    claim.release()
    claim.release()
    with pytest.raises(ClaimLostError, match="it was released"):
        claim.check()
    pass_time(partition, T, first, second)
    assert types(partition).count(RecordType.RELEASE) == 1
    taken = second.held()
    assert taken.position == 5


def test_release_that_was_lost_is_written_again(partition: Partition, pair: tuple[Process, Process]) -> None:
    """Else the heartbeats of its former holder would keep the resource from everybody."""
    first, second = pair
    claim = first.held()
    first.channel.can_write = False
    claim.release()
    first.channel.lose()
    first.channel.can_write = True
    pass_time(partition, T, first, second)
    assert second.session.may_claim("r")


def test_claim_whose_caller_has_given_up_is_released(partition: Partition, pair: tuple[Process, Process]) -> None:
    """It was granted after the caller had given up."""
    first, second = pair
    first.channel.can_write = False
    with pytest.raises(KafkaClientError, match="CLAIM was not read back within 0 s"):
        first.session.claim("r", 0)
    first.channel.can_write = True
    pass_time(partition, T, first, second)
    assert (first.session.claims, second.session.may_claim("r")) == ({}, True)


def test_messages_are_handed_out_after_claim_and_position_were_read_back(
    partition: Partition, pair: tuple[Process, Process]
) -> None:
    """No thread reads here, so both calls time out: no message may be handed out."""
    first, _ = pair
    claim = first.held()
    with pytest.raises(KafkaClientError, match="CLAIM_MESSAGES was not read back within 0 s"):
        claim.claim_messages(10, timeout=0)
    with pytest.raises(KafkaClientError, match="HEARTBEAT was not read back"):
        claim.commit(10, timeout=0.001)
    assert types(partition, "a")[-2:] == [RecordType.CLAIM_MESSAGES, RecordType.HEARTBEAT]


def test_instance_that_was_replaced_stops(partition: Partition, pair: tuple[Process, Process]) -> None:
    """Its successor has the claims, under new epochs."""
    first, _ = pair
    claim = first.held()
    successor = Process(partition, "a", 2, fast_reclaim=True)
    successor.session.turn()
    assert not successor.join().ignored
    (taken,) = successor.session.claims.values()
    assert (taken.resource, taken.is_held, taken.epoch > claim.epoch) == ("r", True, True)
    first.session.turn()
    assert isinstance(first.session.failure, FencedError)
    assert claim.is_held is False
    with pytest.raises(FencedError, match="another instance of client id 'a' has taken over"):
        first.session.send(RecordType.LEAVE)
    first.session.fail(UsageError("a second reason changes nothing"))
    assert isinstance(first.session.failure, FencedError)


def test_leader_spreads_tasks_and_its_successor_goes_on(partition: Partition, pair: tuple[Process, Process]) -> None:
    """A task that is assigned can be claimed by its member alone."""
    first, second = pair
    for number in range(4):
        second.session.send(RecordType.ADD_TASK, resource=f"t{number}")
    pass_time(partition, T, first, second)
    tasks = second.session.world.tasks
    assert sorted(task.client_id for task in tasks.values()) == ["a", "a", "b", "b"]
    mine = next(name for name, task in tasks.items() if task.client_id == "a")
    assert (first.session.may_claim(mine), second.session.may_claim(mine)) == (True, False)
    first.session.stop(leave=True)
    # Its thread may take another turn, and does not join again.
    pass_time(partition, 3 * T, first, second)
    assert list(second.session.world.members) == ["b"]
    assert {task.client_id for task in tasks.values()} == {"b"}


def test_leader_writes_snapshots_from_which_a_reader_may_begin(
    partition: Partition, pair: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once when it begins to lead, by the time, and by the number of records; each part fits into a record."""
    first, second = pair
    first.claim()
    assert types(partition, "a") == [RecordType.JOIN, RecordType.SNAPSHOT, RecordType.CLAIM]
    pass_time(partition, 61 * T, first, second)
    assert types(partition, "a").count(RecordType.SNAPSHOT) == 2
    assert types(partition, "b").count(RecordType.SNAPSHOT) == 0
    monkeypatch.setattr(leader, "SNAPSHOT_EVERY_RECORDS", 20)
    pass_time(partition, 20 * T, first, second)
    assert types(partition, "a").count(RecordType.SNAPSHOT) > 4
    late = GroupLog(GROUP, first_offset=20)
    for one in partition.records[20:]:
        late.read(one.offset, one.append_time_ms, one.key, one.value)
    assert (late.is_complete, facts(late.world)) == (True, facts(first.session.world))


FAR = 10**6
"""An epoch and a generation above the end of the log."""


def written(kind: RecordType, client_id: str, instance: str, **fields: Any) -> bytes:
    """Return the bytes of a record."""
    return encode_record(Record(kind, client_id, instance, 10**9, **fields))


HOSTILE = {
    "epoch from the future": (written(RecordType.RELEASE, "a", "a1", resource="r", epoch=FAR), Ignored.FUTURE_EPOCH),
    "ASSIGN of a member that does not lead": (written(RecordType.ASSIGN, "b", "b1", generation=2), Ignored.NOT_LEADER),
    "CLAIM of an unknown member": (written(RecordType.CLAIM, "z", "z1", resource="s"), Ignored.UNKNOWN_MEMBER),
    "CLAIM of a second process": (written(RecordType.CLAIM, "a", "a2", resource="s"), Ignored.OTHER_INSTANCE),
    "no protobuf": (b"\xff" * 40, Ignored.UNREADABLE),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_bad_input_is_counted_and_every_member_keeps_its_world(
    partition: Partition, pair: tuple[Process, Process], name: str
) -> None:
    """The claim is held on, nothing ends, and both members go on to agree."""
    first, second = pair
    claim = first.held()
    value, reason = HOSTILE[name]
    partition.append(value)
    for process in (first, second):
        process.session.turn()
        assert process.session._log.ignored == {reason: 1}
    pass_time(partition, 3 * T, first, second)
    claim.check()
    first.session.turn()
    second.session.turn()
    assert facts(first.session.world) == facts(second.session.world)
    assert [process.session.failure for process in pair] == [None, None]


def test_record_of_a_newer_version_ends_the_session(partition: Partition, pair: tuple[Process, Process]) -> None:
    """It may have changed the world of others."""
    first, _ = pair
    claim = first.held()
    partition.append(b"\xff")
    first.session.turn()
    claim.check()
    newer = coordination_pb2.Coordination(type=99, client_id="b", instance="b1")  # type: ignore[arg-type]  # on purpose
    partition.append(newer.SerializeToString())
    first.session.turn()
    assert not claim.is_held
    with pytest.raises(KafkaClientError, match=r"type 99, this build reads up to 14.*this member cannot know"):
        first.session.send(RecordType.LEAVE)


def test_snapshot_of_a_newer_version_is_told_from_one_that_cannot_be_read() -> None:
    """Who takes the group for a new one instead has lost its tasks and positions."""
    newer = coordination_pb2.World(version=99).SerializeToString()  # type: ignore[arg-type]  # on purpose
    found = []
    for data in (newer, b"\xff"):
        log = GroupLog(GROUP, first_offset=4)
        part = SnapshotPart(as_of=4, part=0, parts=1, data=data)
        log.read(4, 1, GROUP.encode(), encode_record(Record(RecordType.SNAPSHOT, "a", "a1", 1, snapshot=part)))
        found.append((log.is_complete, "version 99 of snapshots" in log.unsupported))
    assert found == [(False, True), (False, False)]


def test_channel_that_failed_ends_the_session(partition: Partition, pair: tuple[Process, Process]) -> None:
    """For good."""
    first, _ = pair
    first.channel.failure = KafkaClientError("cannot read x: gone; check the broker")
    first.session.turn()
    assert first.session.failure is first.channel.failure
    beats = len(partition.records)
    partition.now_ms += T
    first.session.turn()
    assert len(partition.records) == beats


def test_paused_group_ends_holds_and_grants_nothing(partition: Partition, pair: tuple[Process, Process]) -> None:
    """After T, since no heartbeat renews; the members stay."""
    first, second = pair
    claim = first.held()
    second.session.send(RecordType.PAUSE_GROUP, duration_ms=10 * T)
    pass_time(partition, 1.4 * T, first, second)
    assert (claim.is_held, first.session.may_claim("r")) == (False, False)
    second.session.send(RecordType.RESUME_GROUP)
    pass_time(partition, T, first, second)
    assert first.claim() is not None
