"""What a hostile or broken writer appends to a group's partition: counted by its reason, without another effect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kmq_spark.core.coordination.effects import Ignored
from kmq_spark.core.coordination.records import MAX_NAME_CHARS, Assignment, HeldPosition, Record, RecordType
from kmq_spark.wire import coordination_pb2
from kmq_spark.wire.coordination import encode_record
from tests.unit.coordination_memory import Partition, Process, T, pass_time
from tests.unit.coordination_story import facts

if TYPE_CHECKING:
    from kmq_spark.coordination.claim import Claim

LONG = "n" * 300
FAR = 10**6
"""An epoch and a generation above the end of the log."""


def record(kind: RecordType, client_id: str = "a", instance: str = "", **fields: Any) -> bytes:
    """Return the bytes of a record of a client; by default of its living instance."""
    return encode_record(Record(kind, client_id, instance or f"{client_id}1", 10**9, **fields))


def raw(**fields: Any) -> bytes:
    """Return the bytes of a record that our encoder refuses."""
    return bytes(coordination_pb2.Coordination(client_id="b", instance="b1", **fields).SerializeToString())


def assign(client_id: str, generation: int, task: str = "t", member: str = "b") -> bytes:
    """Return an ASSIGN with one entry."""
    wanted = (Assignment(task, member),)
    return record(RecordType.ASSIGN, client_id, generation=generation, assignments=wanted)


class Group:
    """
    Three members that are up to date: `old` led, left and joined again, so `a` leads; `a` holds `r` and runs `t`.

    Attributes:
        partition: The log.
        members: By client id.
        claim: Of `r`.
        stale_generation: One that `old` led.
    """

    def __init__(self) -> None:
        """Let them join, and assign the task."""
        self.partition = Partition()
        old = Process(self.partition, "old")
        old.join()
        self.members = {name: Process(self.partition, name) for name in "ab"}
        for process in self.members.values():
            process.join()
        self.stale_generation = old.session.world.generation
        old.session.stop(leave=True)
        again = self.members["old"] = Process(self.partition, "old", 2)
        again.session.turn()
        again.join()
        self.settle()
        self.members["b"].session.send(RecordType.ADD_TASK, resource="t")
        pass_time(self.partition, T, *self.members.values())
        self.claim: Claim = self.members["a"].held("r")
        self.settle()

    def settle(self) -> None:
        """Let every member read to the end."""
        for process in [*self.members.values(), *self.members.values()]:
            process.session.turn()

    def views(self) -> list[dict[str, Any]]:
        """Return what each member knows, without the place and the time of its last record."""
        found = []
        for process in self.members.values():
            view = facts(process.session.world)
            del view["next_offset"]
            found.append(view)
        return found

    def ignored(self) -> list[dict[Ignored, int]]:
        """Return what each member has counted."""
        return [dict(process.session._log.ignored) for process in self.members.values()]


@pytest.fixture
def group() -> Group:
    """A group with a leader that has changed."""
    return Group()


def test_story_begins_as_it_says(group: Group) -> None:
    """Otherwise the cases below would be ignored for other reasons than they name."""
    first, *others = group.views()
    assert others == [first, first]
    assert (group.members["a"].session.world.leader, first["generation"] > group.stale_generation) == ("a", True)
    assert (first["resources"]["r"].holder, group.ignored()[0]) == ("a", {})
    assert (first["generation"], first["tasks"]["t"].client_id) == (5, "a")


CASES = {
    "epoch from the future, release": (record(RecordType.RELEASE, resource="r", epoch=FAR), Ignored.FUTURE_EPOCH),
    "epoch from the future, messages": (
        record(RecordType.CLAIM_MESSAGES, resource="r", epoch=FAR, position=1), Ignored.FUTURE_EPOCH,
    ),
    "ASSIGN of a leader that was replaced, by its old instance": (assign("old", 0), Ignored.OTHER_INSTANCE),
    "ASSIGN of a member that does not lead": (assign("b", 5), Ignored.NOT_LEADER),
    "ASSIGN for an old generation": (assign("a", 2), Ignored.OLD_GENERATION),
    "ASSIGN for a generation of the future": (assign("a", FAR), Ignored.FUTURE_GENERATION),
    "ASSIGN of an unknown task": (assign("a", 5, task="u"), Ignored.UNKNOWN_TASK),
    "ASSIGN to an unknown member": (assign("a", 5, member="z"), Ignored.UNKNOWN_MEMBER),
    "CLAIM of an unknown member": (record(RecordType.CLAIM, "z", resource="s"), Ignored.UNKNOWN_MEMBER),
    "CLAIM of a second process of a client id": (
        record(RecordType.CLAIM, "a", "a2", resource="s"), Ignored.OTHER_INSTANCE,
    ),
    "JOIN of a second process of a client id": (
        record(RecordType.JOIN, "a", "a2", heartbeat_ms=T), Ignored.CLIENT_ID_IN_USE,
    ),
    "DRAIN of an unknown member": (record(RecordType.DRAIN, member="z"), Ignored.UNKNOWN_MEMBER),
    "REMOVE_TASK of an unknown task": (record(RecordType.REMOVE_TASK, resource="u"), Ignored.UNKNOWN_TASK),
    "CLAIM of a task of another member": (record(RecordType.CLAIM, "b", resource="t"), Ignored.NOT_ASSIGNED),
    "resource of 300 characters": (raw(type=4, resource=LONG), Ignored.UNREADABLE),
    "task of 300 characters": (raw(type=10, resource=LONG), Ignored.UNREADABLE),
    "T below its bound": (raw(type=1, heartbeat_ms=99), Ignored.UNREADABLE),
    "no bytes": (b"", Ignored.UNREADABLE),
    "no value": (None, Ignored.UNREADABLE),
    "no protobuf": (b"\xff" * 40, Ignored.UNREADABLE),
    "a megabyte": (b"\x00" * 1_048_576, Ignored.UNREADABLE),
}  # fmt: skip
"""What is appended, and why it changes nothing."""


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_counted_and_every_member_keeps_its_world(name: str, group: Group) -> None:
    """The claim is held on, nothing ends, and all members go on to agree."""
    value, reason = CASES[name]
    before = group.views()[0]
    group.partition.append(value)  # type: ignore[arg-type]  # None: a record without value
    group.settle()
    assert group.views() == [before, before, before]
    assert group.ignored() == [{reason: 1}] * 3
    assert [process.session.failure for process in group.members.values()] == [None] * 3
    pass_time(group.partition, 3 * T, *group.members.values())
    group.claim.check()
    group.settle()
    first, *others = group.views()
    assert others == [first, first]
    assert first["resources"] == before["resources"]


def test_position_under_an_epoch_from_the_future_is_counted_and_its_heartbeat_counts(group: Group) -> None:
    """An entry is refused alone: its writer is alive."""
    positions = (HeldPosition("r", FAR, 5), HeldPosition("s", 0, 5))
    group.partition.append(record(RecordType.HEARTBEAT, positions=positions))
    group.settle()
    assert group.ignored() == [{Ignored.FUTURE_EPOCH: 1, Ignored.NOT_HOLDER: 1}] * 3
    assert [view["resources"]["r"].position for view in group.views()] == [None] * 3
    group.claim.check()


def test_longest_name_is_accepted(group: Group) -> None:
    """The bound is on what is longer."""
    name = "n" * MAX_NAME_CHARS
    group.members["b"].held(name)
    group.settle()
    assert [view["resources"][name].holder for view in group.views()] == ["b"] * 3
