"""The rules of a coordination group by stories: claims, two instances of one client id, pauses and positions."""

from __future__ import annotations

from typing import Any

import pytest

from kmq_spark.core.coordination.effects import Change, Ignored
from kmq_spark.core.coordination.records import FIELDS, Assignment, HeldPosition, RecordType
from tests.unit.coordination_story import Story, T, effects, facts


def test_claim_is_granted_where_the_resource_is_free_and_its_offset_is_the_epoch() -> None:
    """The second claim finds it held."""
    story = Story()
    story.join("a")
    story.join("b")
    applied = story.claim("r", "a")
    assert (applied.refreshed, story.holder("r"), story.epoch("r")) == (True, "a", 2)
    applied = story.claim("r", "b")
    assert (applied.ignored, applied.refreshed, story.holder("r")) == ([Ignored.HELD_BY_OTHER], False, "a")


def test_claim_of_the_holder_itself_gets_a_new_epoch() -> None:
    """What it wrote under the old one is refused from then on."""
    story = Story()
    story.join()
    story.claim()
    story.claim()
    assert story.epoch() == 2
    assert story.say(RecordType.RELEASE, resource="r", epoch=1).ignored == [Ignored.OLD_EPOCH]


def test_claim_of_a_stale_holder_is_taken_over_with_its_position() -> None:
    """The position that it reported last is kept."""
    story = Story()
    story.join("a")
    story.claim("r", "a")
    story.say(RecordType.HEARTBEAT, "a", positions=(HeldPosition("r", 1, 42),))
    story.join("b")
    story.pass_time(2 * T + 1, "b")
    story.claim("r", "b")
    taken = story.world.resources["r"]
    assert (taken.holder, taken.epoch, taken.position) == ("b", story.offset, 42)


def test_position_of_a_topic_that_was_created_again_is_forgotten() -> None:
    """By the claim that names another topic id; an unknown one may be the same, and an operator's position stands."""
    story = Story()
    story.join()

    def claim(topic_id: str) -> list[Change]:
        applied = story.say(RecordType.CLAIM, resource="r", topic_id=topic_id)
        return [effect.change for effect in applied.effects]

    def position() -> tuple[int | None, str]:
        resource = story.world.resources["r"]
        return resource.position, resource.topic_id

    assert claim("old") == [Change.CLAIMED]
    story.say(RecordType.HEARTBEAT, positions=(HeldPosition("r", story.epoch(), 9),))
    assert (claim(""), claim("old"), position()) == ([Change.CLAIMED], [Change.CLAIMED], (9, "old"))
    story.say(RecordType.RELEASE, resource="r", epoch=story.epoch())
    assert claim("new") == [Change.POSITION_FORGOTTEN, Change.CLAIMED]
    assert position() == (None, "new")
    story.say(RecordType.HEARTBEAT, positions=(HeldPosition("r", story.epoch(), 3),))
    assert position() == (3, "new")
    story.say(RecordType.RELEASE, resource="r", epoch=story.epoch())
    story.say(RecordType.PAUSE_GROUP, duration_ms=T)
    story.say(RecordType.SET_POSITION, resource="r", position=2)
    story.say(RecordType.RESUME_GROUP)
    assert (claim("third"), position()) == ([Change.CLAIMED], (2, "third"))


def test_positions_never_go_back() -> None:
    """Not by a heartbeat, not by a release, which releases all the same."""
    story = Story()
    story.join()
    story.claim()
    story.say(RecordType.HEARTBEAT, positions=(HeldPosition("r", 1, 9),))
    applied = story.say(RecordType.HEARTBEAT, positions=(HeldPosition("r", 1, 8), HeldPosition("r", 1, 10)))
    assert (applied.ignored, applied.refreshed) == ([Ignored.POSITION_BACK], True)
    story.claim("s")
    assert story.say(RecordType.RELEASE, resource="r", epoch=1, position=3).ignored == [Ignored.POSITION_BACK]
    assert (story.holder(), story.world.resources["r"].position) == ("", 10)
    # A resource without position is forgotten, so that names of locks do not pile up.
    story.say(RecordType.RELEASE, resource="s", epoch=story.epoch("s"))
    assert list(story.world.resources) == ["r"]


@pytest.mark.parametrize(("epoch", "reason"), [(0, Ignored.OLD_EPOCH), (99, Ignored.FUTURE_EPOCH)])
def test_record_under_another_epoch_changes_nothing(epoch: int, reason: Ignored) -> None:
    """Positions, messages, releases: only under the epoch of the claim."""
    story = Story()
    story.join()
    story.claim()
    for kind in (RecordType.RELEASE, RecordType.CLAIM_MESSAGES):
        assert story.say(kind, resource="r", epoch=epoch, position=5).ignored == [reason]
    assert story.say(RecordType.HEARTBEAT, positions=(HeldPosition("r", epoch, 5),)).ignored == [reason]
    assert (story.holder(), story.world.resources["r"].position) == ("a", None)


def test_record_about_a_resource_of_another_member_changes_nothing() -> None:
    """Nor does one about a resource without holder."""
    story = Story()
    story.join("a")
    story.join("b")
    story.claim("r", "a")
    for name in ("r", "s"):
        for kind in (RecordType.RELEASE, RecordType.CLAIM_MESSAGES):
            applied = story.say(kind, "b", resource=name, epoch=2, position=5)
            assert applied.ignored == [Ignored.NOT_HOLDER]
    assert story.holder("r") == "a"


@pytest.mark.parametrize(
    "kind",
    [
        *(RecordType.HEARTBEAT, RecordType.LEAVE, RecordType.CLAIM, RecordType.RELEASE),
        *(RecordType.CLAIM_MESSAGES, RecordType.ASSIGN),
    ],
    ids=lambda kind: kind.name,
)
def test_record_of_an_unknown_member_or_another_instance_changes_nothing(kind: RecordType) -> None:
    """A member that was dropped joins again; an instance that was replaced stops."""
    story = Story()
    fields: dict[str, Any] = {"resource": "r"} if "resource" in FIELDS[kind] else {}
    if kind is RecordType.CLAIM_MESSAGES:
        fields["position"] = 1
    assert story.say(kind, "a", **fields).ignored == [Ignored.UNKNOWN_MEMBER]
    story.join("a")
    before = facts(story.world)
    assert story.say(kind, "a", instance="a2", **fields).ignored == [Ignored.OTHER_INSTANCE]
    assert {**before, "next_offset": 3} == facts(story.world)


def test_messages_are_claimed_up_to_their_end() -> None:
    """Never below the position, but from the very first message on; a new claim begins without."""
    story = Story()
    story.join()
    story.claim()
    story.say(RecordType.CLAIM_MESSAGES, resource="r", epoch=1, position=0)
    assert (story.applied.ignored, story.world.resources["r"].claimed_to) == ([], 0)
    story.say(RecordType.HEARTBEAT, positions=(HeldPosition("r", 1, 5),))
    assert story.say(RecordType.CLAIM_MESSAGES, resource="r", epoch=1, position=4).ignored == [Ignored.POSITION_BACK]
    story.say(RecordType.CLAIM_MESSAGES, resource="r", epoch=1, position=5)
    assert (story.applied.ignored, story.world.resources["r"].claimed_to) == ([], 5)
    story.say(RecordType.CLAIM_MESSAGES, resource="r", epoch=1, position=9)
    assert effects(story.applied) == [(Change.MESSAGES_CLAIMED, "a", "r")]
    assert story.world.resources["r"].claimed_to == 9
    story.claim()
    claimed = story.world.resources["r"]
    assert (claimed.claimed_to, claimed.position) == (None, 5)


# One client id, two instances.


def test_second_instance_is_refused_while_the_first_is_a_member() -> None:
    """It may join when the first is stale, or has left."""
    story = Story()
    story.join("a", instance="a1")
    story.claim("r")
    assert story.join("a", instance="a2").ignored == [Ignored.CLIENT_ID_IN_USE]
    assert story.world.members["a"].instance == "a1"
    story.pass_time(2 * T)
    assert effects(story.join("a", 1, instance="a2")) == [
        (Change.LAPSED, "a", "r"),
        (Change.DROPPED, "a", ""),
        (Change.JOINED, "a", ""),
    ]


def test_fast_reclaim_takes_the_claims_over_under_new_epochs() -> None:
    """The first instance is fenced; its tasks stay those of the client id."""
    story = Story()
    story.join("a", instance="a1")
    story.claim("r")
    story.claim("s")
    story.say(RecordType.ADD_TASK, resource="t")
    story.say(RecordType.ASSIGN, generation=0, assignments=(Assignment("t", "a"),))
    story.say(RecordType.DRAIN, member="a")
    applied = story.join("a", instance="a2", fast_reclaim=True)
    assert effects(applied) == [
        (Change.REPLACED, "a", ""),
        (Change.CLAIMED, "a", "r"),
        (Change.CLAIMED, "a", "s"),
    ]
    assert (applied.refreshed, story.epoch("r"), story.epoch("s")) == (True, story.offset, story.offset)
    assert (story.world.members["a"].is_draining, story.world.tasks["t"].client_id) == (False, "a")
    assert story.say(RecordType.HEARTBEAT, "a", instance="a1").ignored == [Ignored.OTHER_INSTANCE]


def test_fast_reclaim_in_a_paused_group_releases_the_claims() -> None:
    """No claim is granted while the group is paused."""
    story = Story()
    story.join("a", instance="a1")
    story.claim("r")
    story.say(RecordType.PAUSE_GROUP, duration_ms=T)
    applied = story.join("a", instance="a2", fast_reclaim=True)
    assert effects(applied) == [(Change.REPLACED, "a", ""), (Change.RELEASED, "a", "r")]
    assert not applied.refreshed


# Pauses and positions.


def test_paused_group_grants_and_renews_nothing_and_keeps_its_members() -> None:
    """Claims lapse 2T after the last renewal, though their holder is alive; it claims again afterwards."""
    story = Story()
    story.join("a")
    story.claim("r")
    story.say(RecordType.PAUSE_GROUP, duration_ms=60_000)
    assert story.claim("s").ignored == [Ignored.GROUP_PAUSED]
    assert story.say(RecordType.CLAIM_MESSAGES, resource="r", epoch=1, position=1).ignored == [Ignored.GROUP_PAUSED]
    story.pass_time(2 * T, "a")
    assert story.holder() == "a"
    applied = story.say(RecordType.HEARTBEAT, "a", after_ms=1)
    assert (effects(applied), applied.refreshed) == ([(Change.LAPSED, "a", "r")], False)
    story.say(RecordType.RESUME_GROUP)
    story.beat("a")
    assert (story.holder(), list(story.world.members)) == ("", ["a"])
    assert story.claim("r").refreshed
    story.pass_time(2 * T, "a")
    assert story.holder() == "a"


def test_pause_ends_by_the_broker_clock() -> None:
    """At its last millisecond it holds, then it is over."""
    story = Story()
    story.join("a")
    story.say(RecordType.PAUSE_GROUP, duration_ms=5 * T)
    story.pass_time(5 * T - 1, "a")
    assert story.world.is_paused
    assert effects(story.write(None, 1)) == [(Change.RESUMED, "", "")]
    assert story.say(RecordType.RESUME_GROUP).ignored == [Ignored.NOT_PAUSED]


def test_positions_are_set_only_while_paused_and_when_nothing_is_held() -> None:
    """They may go back then; None forgets the resource."""
    story = Story()
    story.join("a")
    story.claim("r")
    story.say(RecordType.HEARTBEAT, positions=(HeldPosition("r", 1, 9),))

    def set_position(position: int | None, resource: str = "r") -> list[Ignored]:
        return story.say(RecordType.SET_POSITION, "operator", resource=resource, position=position).ignored

    assert set_position(3) == [Ignored.NOT_PAUSED]
    story.say(RecordType.PAUSE_GROUP, "operator", duration_ms=60_000)
    assert set_position(3) == [Ignored.STILL_HELD]
    story.say(RecordType.RELEASE, resource="r", epoch=1, position=9)
    assert set_position(3) == []
    assert story.world.resources["r"].position == 3
    assert set_position(None) == []
    assert set_position(None) == [Ignored.UNKNOWN_RESOURCE]
    assert set_position(4, "new") == []
    assert list(story.world.resources) == ["new"]
