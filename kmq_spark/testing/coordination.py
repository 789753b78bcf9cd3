"""
The rules of a coordination group, from the table in docs/coordination.md: the specification that the fold is compared
with.

Rule 1: slow and plain: every question is answered by looking at everything. Where this and `core.coordination.fold`
differ, one of them is wrong, and this one is easier to read.
Rule 2: nothing shared with the fold but the values that go in and come out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kmq_spark.core.coordination.effects import Change, Effect, Ignored
from kmq_spark.core.coordination.records import RecordType

if TYPE_CHECKING:
    from kmq_spark.core.coordination.records import Record

LIMITS = {"members": 5_000, "resources": 50_000, "tasks": 10_000}

# What a record needs of its writer, and what it finds where that is missing.
BY_MEMBERS = {
    RecordType.HEARTBEAT,
    RecordType.LEAVE,
    RecordType.CLAIM,
    RecordType.RELEASE,
    RecordType.CLAIM_MESSAGES,
    RecordType.ASSIGN,
}


class ModelGroup:
    """
    One group.

    Attributes:
        state: Everything that a world has, under the names of `World.view`; what can be computed is not in it.
    """

    def __init__(self) -> None:
        """Begin before the first record."""
        self.state: dict[str, Any] = {
            "next_offset": 0,
            "clock_ms": 0,
            "last_append_ms": -1,
            "newest_append_ms": 0,
            "heartbeat_ms": 0,
            "generation": -1,
            "paused_until_ms": 0,
            "snapshot_at": -1,
            "members": {},
            "resources": {},
            "tasks": {},
        }
        self.effects: list[Effect] = []
        self.ignored: list[Ignored] = []
        self.refreshed = False

    def apply(self, offset: int, append_time_ms: int, record: Record | None) -> None:
        """
        Apply a record; `effects`, `ignored` and `refreshed` are of the last one.

        Args:
            offset: Offset of the record.
            append_time_ms: Negative: it says nothing of the time.
            record: None for one of another group, or an unreadable one.
        """
        state = self.state
        self.effects, self.ignored, self.refreshed = [], [], False
        if offset < state["next_offset"]:
            self.ignored.append(Ignored.REPEATED)
            return
        state["next_offset"] = offset + 1
        if append_time_ms >= 0:
            self._time(append_time_ms)
            self._stale(offset)
        if record is None:
            return
        if (reason := self._refusal(record, offset)) is not None:
            self.ignored.append(reason)
            return
        getattr(self, f"_{record.type.name.lower()}")(record, offset)

    def view(self) -> dict[str, Any]:
        """Return what `World.view` returns."""
        members = {
            name: {
                **member,
                "held": sorted(one for one, resource in self.state["resources"].items() if resource["holder"] == name),
                "tasks": sorted(one for one, task in self.state["tasks"].items() if task["client_id"] == name),
            }
            for name, member in self.state["members"].items()
        }
        return {**self.state, "members": members, "leader": self._leader()}

    # Time.

    def _time(self, append_time_ms: int) -> None:
        state = self.state
        if state["last_append_ms"] >= 0 and append_time_ms > state["last_append_ms"]:
            passed = append_time_ms - state["last_append_ms"]
            state["clock_ms"] += min(passed, state["heartbeat_ms"] // 2)
        state["last_append_ms"] = append_time_ms
        state["newest_append_ms"] = max(state["newest_append_ms"], append_time_ms)
        if state["paused_until_ms"] and state["newest_append_ms"] >= state["paused_until_ms"]:
            state["paused_until_ms"] = 0
            self.effects.append(Effect(Change.RESUMED))

    def _stale(self, offset: int) -> None:
        state = self.state
        limit = 2 * state["heartbeat_ms"]
        by_renewal = sorted(state["members"].items(), key=lambda one: (one[1]["renewed_ms"], one[1]["joined_at"]))
        for name, member in by_renewal:
            if state["clock_ms"] - member["renewed_ms"] > limit:
                self._release_all(name, Change.LAPSED)
        by_heartbeat = sorted(state["members"].items(), key=lambda one: (one[1]["seen_ms"], one[1]["joined_at"]))
        for name, member in by_heartbeat:
            if state["clock_ms"] - member["seen_ms"] > limit:
                self._gone(name, Change.DROPPED, offset)

    # Why a record does nothing at all.

    def _refusal(self, record: Record, offset: int) -> Ignored | None:
        state = self.state
        member = state["members"].get(record.client_id)
        needs_member = record.type in BY_MEMBERS or (record.type is RecordType.SNAPSHOT and state["members"])
        if needs_member and member is None:
            return Ignored.UNKNOWN_MEMBER
        if needs_member and member["instance"] != record.instance:
            return Ignored.OTHER_INSTANCE
        finder = getattr(self, f"_why_not_{record.type.name.lower()}", None)
        reason: Ignored | None = finder(record, offset) if finder else None
        return reason

    def _why_not_join(self, record: Record, _: int) -> Ignored | None:
        members = self.state["members"]
        member = members.get(record.client_id)
        if member is None:
            return Ignored.OVER_LIMIT if len(members) >= LIMITS["members"] else None
        return None if member["instance"] == record.instance or record.fast_reclaim else Ignored.CLIENT_ID_IN_USE

    def _why_not_claim(self, record: Record, _: int) -> Ignored | None:
        state = self.state
        if state["paused_until_ms"]:
            return Ignored.GROUP_PAUSED
        holder = state["resources"].get(record.resource, {}).get("holder", "")
        if holder and holder != record.client_id:
            return Ignored.HELD_BY_OTHER
        if record.resource in state["tasks"] and state["tasks"][record.resource]["client_id"] != record.client_id:
            return Ignored.NOT_ASSIGNED
        return self._no_room("resources", record.resource)

    def _why_not_release(self, record: Record, _: int) -> Ignored | None:
        return self._not_under(record.client_id, record.resource, record.epoch)

    def _why_not_claim_messages(self, record: Record, _: int) -> Ignored | None:
        if self.state["paused_until_ms"]:
            return Ignored.GROUP_PAUSED
        reason = self._not_under(record.client_id, record.resource, record.epoch)
        if reason is not None:
            return reason
        position = self.state["resources"][record.resource]["position"]
        assert record.position is not None
        return Ignored.POSITION_BACK if position is not None and record.position < position else None

    def _why_not_resume_group(self, _: Record, __: int) -> Ignored | None:
        return None if self.state["paused_until_ms"] else Ignored.NOT_PAUSED

    def _why_not_set_position(self, record: Record, _: int) -> Ignored | None:
        state = self.state
        if not state["paused_until_ms"]:
            return Ignored.NOT_PAUSED
        if any(resource["holder"] for resource in state["resources"].values()):
            return Ignored.STILL_HELD
        if record.position is None:
            return None if record.resource in state["resources"] else Ignored.UNKNOWN_RESOURCE
        return self._no_room("resources", record.resource)

    def _why_not_add_task(self, record: Record, _: int) -> Ignored | None:
        return self._no_room("tasks", record.resource)

    def _why_not_remove_task(self, record: Record, _: int) -> Ignored | None:
        return None if record.resource in self.state["tasks"] else Ignored.UNKNOWN_TASK

    def _why_not_drain(self, record: Record, _: int) -> Ignored | None:
        return None if record.member in self.state["members"] else Ignored.UNKNOWN_MEMBER

    def _why_not_assign(self, record: Record, _: int) -> Ignored | None:
        generation = self.state["generation"]
        if record.generation < generation:
            return Ignored.OLD_GENERATION
        if record.generation > generation:
            return Ignored.FUTURE_GENERATION
        return None if self._leader() == record.client_id else Ignored.NOT_LEADER

    def _why_not_snapshot(self, record: Record, offset: int) -> Ignored | None:
        assert record.snapshot is not None
        if record.snapshot.as_of > offset:
            return Ignored.FUTURE_SNAPSHOT
        return Ignored.NOT_LEADER if self.state["members"] and self._leader() != record.client_id else None

    def _not_under(self, client_id: str, resource: str, epoch: int) -> Ignored | None:
        claim = self.state["resources"].get(resource)
        if claim is None or claim["holder"] != client_id:
            return Ignored.NOT_HOLDER
        if epoch == claim["epoch"]:
            return None
        return Ignored.OLD_EPOCH if epoch < claim["epoch"] else Ignored.FUTURE_EPOCH

    def _no_room(self, what: str, name: str) -> Ignored | None:
        known = self.state[what]
        return Ignored.OVER_LIMIT if name not in known and len(known) >= LIMITS[what] else None

    # What a record does.

    def _join(self, record: Record, offset: int) -> None:
        state = self.state
        if not state["members"]:
            state["heartbeat_ms"] = record.heartbeat_ms
        before = state["members"].get(record.client_id)
        same = before is not None and before["instance"] == record.instance
        state["members"][record.client_id] = {
            "instance": record.instance,
            "joined_at": before["joined_at"] if before is not None and same else offset,
            "metadata": record.metadata,
            "is_draining": before["is_draining"] if before is not None and same else False,
            "seen_ms": state["clock_ms"],
            "renewed_ms": before["renewed_ms"] if before else 0,
        }
        state["generation"] = offset
        if before is None:
            self.effects.append(Effect(Change.JOINED, record.client_id))
        elif same:
            self.effects.append(Effect(Change.UPDATED, record.client_id))
        else:
            self.effects.append(Effect(Change.REPLACED, record.client_id))
            self._successor(record.client_id, offset)
        self._fresh(record.client_id)

    def _successor(self, client_id: str, offset: int) -> None:
        if self.state["paused_until_ms"]:
            self._release_all(client_id, Change.RELEASED)
            return
        for name, resource in sorted(self.state["resources"].items()):
            if resource["holder"] == client_id:
                resource["epoch"], resource["claimed_to"] = offset, None
                self.effects.append(Effect(Change.CLAIMED, client_id, name, offset))

    def _heartbeat(self, record: Record, _: int) -> None:
        self._fresh(record.client_id)
        for resource, epoch, position in record.positions:
            reason = self._not_under(record.client_id, resource, epoch)
            if reason is not None:
                self.ignored.append(reason)
            else:
                self._move(resource, position)

    def _leave(self, record: Record, offset: int) -> None:
        self._release_all(record.client_id, Change.RELEASED)
        self._gone(record.client_id, Change.LEFT, offset)

    def _claim(self, record: Record, offset: int) -> None:
        resources = self.state["resources"]
        position = resources.get(record.resource, {}).get("position")
        resources[record.resource] = {
            "holder": record.client_id, "epoch": offset, "position": position, "claimed_to": None,
        }  # fmt: skip
        self.effects.append(Effect(Change.CLAIMED, record.client_id, record.resource, offset))
        self._fresh(record.client_id)

    def _release(self, record: Record, _: int) -> None:
        if record.position is not None:
            self._move(record.resource, record.position)
        self._free(record.client_id, record.resource, Change.RELEASED)

    def _claim_messages(self, record: Record, _: int) -> None:
        resource = self.state["resources"][record.resource]
        resource["claimed_to"] = record.position
        self.effects.append(Effect(Change.MESSAGES_CLAIMED, record.client_id, record.resource, resource["epoch"]))

    def _pause_group(self, record: Record, _: int) -> None:
        self.state["paused_until_ms"] = self.state["newest_append_ms"] + record.duration_ms
        self.effects.append(Effect(Change.PAUSED))

    def _resume_group(self, _: Record, __: int) -> None:
        self.state["paused_until_ms"] = 0
        self.effects.append(Effect(Change.RESUMED))

    def _set_position(self, record: Record, _: int) -> None:
        resources = self.state["resources"]
        if record.position is None:
            del resources[record.resource]
        else:
            free = {"holder": "", "epoch": -1, "claimed_to": None}
            resources[record.resource] = {**resources.get(record.resource, free), "position": record.position}
        self.effects.append(Effect(Change.POSITION_SET, "", record.resource))

    def _add_task(self, record: Record, _: int) -> None:
        before = self.state["tasks"].get(record.resource, {"client_id": ""})
        self.state["tasks"][record.resource] = {**before, "payload": record.payload}
        self.effects.append(Effect(Change.TASK_ADDED, before["client_id"], record.resource))

    def _remove_task(self, record: Record, _: int) -> None:
        task = self.state["tasks"].pop(record.resource)
        self.effects.append(Effect(Change.TASK_REMOVED, task["client_id"], record.resource))

    def _drain(self, record: Record, offset: int) -> None:
        self.state["members"][record.member]["is_draining"] = True
        self.state["generation"] = offset
        self.effects.append(Effect(Change.DRAINING, record.member))

    def _assign(self, record: Record, _: int) -> None:
        members, tasks = self.state["members"], self.state["tasks"]
        for name, client_id in record.assignments:
            if name not in tasks:
                self.ignored.append(Ignored.UNKNOWN_TASK)
            elif client_id and client_id not in members:
                self.ignored.append(Ignored.UNKNOWN_MEMBER)
            elif tasks[name]["client_id"] != client_id:
                if client_id and members[client_id]["is_draining"]:
                    self.ignored.append(Ignored.MEMBER_DRAINING)
                    continue
                if tasks[name]["client_id"]:
                    self.effects.append(Effect(Change.UNASSIGNED, tasks[name]["client_id"], name))
                if client_id:
                    self.effects.append(Effect(Change.ASSIGNED, client_id, name))
                tasks[name]["client_id"] = client_id

    def _snapshot(self, record: Record, offset: int) -> None:
        assert record.snapshot is not None
        if record.snapshot.part + 1 == record.snapshot.parts:
            self.state["snapshot_at"] = offset
            self.effects.append(Effect(Change.SNAPSHOT, record.client_id))

    # What several records do.

    def _leader(self) -> str:
        members = self.state["members"]
        return min(members, key=lambda name: members[name]["joined_at"]) if members else ""

    def _fresh(self, client_id: str) -> None:
        member = self.state["members"][client_id]
        member["seen_ms"] = self.state["clock_ms"]
        if not self.state["paused_until_ms"]:
            member["renewed_ms"] = self.state["clock_ms"]
            self.refreshed = True

    def _move(self, resource: str, position: int) -> None:
        known = self.state["resources"][resource]
        if known["position"] is not None and position < known["position"]:
            self.ignored.append(Ignored.POSITION_BACK)
        else:
            known["position"] = position

    def _release_all(self, client_id: str, change: Change) -> None:
        for name in sorted(self.state["resources"]):
            if self.state["resources"][name]["holder"] == client_id:
                self._free(client_id, name, change)

    def _free(self, client_id: str, name: str, change: Change) -> None:
        resource = self.state["resources"][name]
        self.effects.append(Effect(change, client_id, name, resource["epoch"]))
        resource["holder"], resource["claimed_to"] = "", None
        if resource["position"] is None:
            del self.state["resources"][name]

    def _gone(self, client_id: str, change: Change, offset: int) -> None:
        del self.state["members"][client_id]
        self.state["generation"] = offset
        self.effects.append(Effect(change, client_id))
        for name in sorted(self.state["tasks"]):
            if self.state["tasks"][name]["client_id"] == client_id:
                self.state["tasks"][name]["client_id"] = ""
                self.effects.append(Effect(Change.UNASSIGNED, client_id, name))
