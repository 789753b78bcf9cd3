"""
What a record of a coordination group led to: the changes of the world, and the reasons why something changed nothing.

Rule 1: the values do not change between versions: error texts contain them, and users search for those.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Change(StrEnum):
    """What a record, or the time that passed before it, changed."""

    JOINED = "joined"
    UPDATED = "updated"
    """Metadata of a member."""
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
    """It is no record, or a value is out of bounds. Given by the reader of the log."""
    UNSUPPORTED = "unsupported"
    """A newer version wrote it. Given by the reader of the log."""
    UNKNOWN_MEMBER = "unknown_member"
    OTHER_INSTANCE = "other_instance"
    """Its client id belongs to another instance now."""
    CLIENT_ID_IN_USE = "client_id_in_use"
    """JOIN under a client id whose other instance is not stale, without fast reclaim."""
    GROUP_PAUSED = "group_paused"
    NOT_PAUSED = "not_paused"
    STILL_HELD = "still_held"
    """SET_POSITION before every claim of the group was released or had lapsed."""
    HELD_BY_OTHER = "held_by_other"
    NOT_HOLDER = "not_holder"
    OLD_EPOCH = "old_epoch"
    FUTURE_EPOCH = "future_epoch"
    POSITION_BACK = "position_back"
    """A position before the one that stands."""
    NOT_ASSIGNED = "not_assigned"
    """CLAIM of a task that another member, or none, is assigned to."""
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
    """One change: of a member, of a resource or task, of a claim with its epoch; empty and -1 where it is of none."""

    change: Change
    client_id: str = ""
    resource: str = ""
    epoch: int = -1


class Applied:
    """What a record led to."""

    __slots__ = ("effects", "ignored", "refreshed")

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self.ignored: list[Ignored] = []
        self.refreshed = False
        """Whether the record renewed every claim of its writer."""

    def note(self, change: Change, client_id: str = "", resource: str = "", epoch: int = -1) -> None:
        """Add a change."""
        self.effects.append(Effect(change, client_id, resource, epoch))
