"""
The effects of a record of a coordination group: what it changed, or why it changed nothing.

Rule 1: the values do not change between versions: error texts contain them, and users search for them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Change(StrEnum):
    """What changed because of a record, or of the time that passed before it."""

    JOINED = "joined"
    UPDATED = "updated"
    """The metadata of a member."""
    REPLACED = "replaced"
    """The instance of a member, by fast reclaim."""
    LEFT = "left"
    DROPPED = "dropped"
    """A member without a heartbeat for 2T."""
    DRAINING = "draining"
    CLAIMED = "claimed"
    RELEASED = "released"
    LAPSED = "lapsed"
    """A claim that was not renewed for 2T."""
    MESSAGES_CLAIMED = "messages_claimed"
    PAUSED = "paused"
    RESUMED = "resumed"
    POSITION_SET = "position_set"
    POSITION_FORGOTTEN = "position_forgotten"
    """It was of a Kafka topic that was deleted and created again."""
    TASK_ADDED = "task_added"
    TASK_REMOVED = "task_removed"
    ASSIGNED = "assigned"
    UNASSIGNED = "unassigned"
    SNAPSHOT = "snapshot"


class Ignored(StrEnum):
    """Why a record, or an entry of it, changed nothing."""

    REPEATED = "repeated"
    """It was applied before."""
    UNREADABLE = "unreadable"
    """The bytes are not a record, or a value is out of bounds; the reader of the log sets this."""
    UNSUPPORTED = "unsupported"
    """A newer version wrote it; the reader of the log sets this."""
    UNKNOWN_MEMBER = "unknown_member"
    OTHER_INSTANCE = "other_instance"
    """Another instance has taken over the client id."""
    CLIENT_ID_IN_USE = "client_id_in_use"
    """JOIN without fast reclaim while another instance of the client id is a member."""
    GROUP_PAUSED = "group_paused"
    NOT_PAUSED = "not_paused"
    STILL_HELD = "still_held"
    """SET_POSITION before every claim of the group was released or had lapsed."""
    HELD_BY_OTHER = "held_by_other"
    NOT_HOLDER = "not_holder"
    OLD_EPOCH = "old_epoch"
    FUTURE_EPOCH = "future_epoch"
    POSITION_BACK = "position_back"
    """The position is below the current one."""
    NOT_ASSIGNED = "not_assigned"
    """CLAIM of a task that is not assigned to this member."""
    NOT_LEADER = "not_leader"
    OLD_GENERATION = "old_generation"
    FUTURE_GENERATION = "future_generation"
    FUTURE_SNAPSHOT = "future_snapshot"
    UNKNOWN_TASK = "unknown_task"
    UNKNOWN_RESOURCE = "unknown_resource"
    MEMBER_DRAINING = "member_draining"
    OVER_LIMIT = "over_limit"
    """More members, resources or tasks than a group may have."""


class Effect(NamedTuple):
    """One change, with the member, the resource or task and the epoch of the claim that it concerns, if any."""

    change: Change
    client_id: str = ""
    resource: str = ""
    epoch: int = -1


class Applied:
    """The effects of one record."""

    __slots__ = ("effects", "ignored", "refreshed")

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self.ignored: list[Ignored] = []
        self.refreshed = False
        """Whether the record renewed all claims of its writer."""

    def note(self, change: Change, client_id: str = "", resource: str = "", epoch: int = -1) -> None:
        """Add a change."""
        self.effects.append(Effect(change, client_id, resource, epoch))
