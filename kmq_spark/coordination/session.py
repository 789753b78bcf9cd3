"""
One process in a group: it reads the group's partition, heartbeats, and keeps what it holds.

Rule 1: one lock (`changed`) protects world, holds and claims. Records get their sequence number and are queued under
it, so both have the same order.
Rule 2: when a hold is over by the clock, its claim ends before anything else is read. A late renewal changes nothing.
Rule 3: no function of a user is called under the lock, or in the thread that heartbeats.
Rule 4: a lost claim is released T after the end of its hold, or lapses: work under it may last longer than the hold.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from threading import Condition, RLock
from typing import TYPE_CHECKING, Any, Protocol

from kmq_spark.coordination.claim import Claim
from kmq_spark.core.coordination.effects import Applied, Change, Ignored
from kmq_spark.core.coordination.holds import NEVER_HELD, Holds
from kmq_spark.core.coordination.leader import ASSIGNMENTS_AT_ONCE, changes
from kmq_spark.core.coordination.records import HeldPosition, Record, RecordType
from kmq_spark.errors import FencedError, KafkaClientError, KmqError, UsageError, WireError
from kmq_spark.kafka.clock import now_s
from kmq_spark.wire.coordination import encode_record
from kmq_spark.wire.coordination_snapshot import snapshot_parts

if TYPE_CHECKING:
    from collections.abc import Callable

    from kmq_spark.coordination.channel import LoggedBytes
    from kmq_spark.core.coordination.effects import Effect
    from kmq_spark.core.coordination.leader import Duties
    from kmq_spark.core.coordination.world import World
    from kmq_spark.wire.coordination_log import GroupLog

logger = logging.getLogger(__name__)

BEATS_PER_INTERVAL = 3
"""Heartbeats within T: two may be late before a hold is over."""

JOIN_AGAIN_MS = 2_000
"""A JOIN that is not read back within this time is written again: a broker that has just started loses some."""

POSITIONS_AT_ONCE = 900
"""Positions in one record: with the longest names it stays below the largest record."""

LONGEST_READ_S = 0.1
"""Interval at which the thread checks whether it must stop."""

_JOIN = 0
"""Key of the answer to a JOIN. Not its sequence number, because a later JOIN may answer a lost one."""


def now_ms() -> float:
    """Return milliseconds of the clock of holds."""
    return now_s() * 1000


class LogChannel(Protocol):
    """The part of a `Channel` that a session uses."""

    failure: KmqError | None
    trouble: str

    def read(self, timeout_s: float) -> list[LoggedBytes]:
        """Return records that have arrived, in order; wait for the first one."""

    def write(self, value: bytes) -> None:
        """Pass a record on. Records are appended in the order of the calls."""

    def serve(self) -> None:
        """Take the answers to what was written."""


class Session:
    """
    One process in a group: an observer, until `join` makes it a member.

    `changed`: lock of everything here, notified after each batch of records. `claims`: by resource. `failure`: error
    that ended the session. `on_effects` is called with the effects of a batch, under the lock, and must return at once.
    `until_ms`: when all holds end, by the monotonic clock. *log* is read to the end of the partition, where *channel*
    continues.
    """

    def __init__(
        self,
        channel: LogChannel,
        log: GroupLog,
        client_id: str,
        *,
        instance: str,
        join_fields: dict[str, Any],
        duties: Duties,
        clock_ms: Callable[[], float] = now_ms,
    ) -> None:
        self._clock_ms = clock_ms
        self._pid = os.getpid()
        self.changed = Condition(RLock())
        self.claims: dict[str, Claim] = {}
        self.failure: KmqError | None = None
        self.on_effects: Callable[[list[Effect]], None] = lambda _: None
        self.until_ms = NEVER_HELD
        self.client_id, self.instance = client_id, instance
        self._channel, self._log = channel, log
        self._holds = Holds()
        self._join_fields, self._duties = join_fields, duties
        self._sequence = 0
        self._answers: dict[int, Applied | None] = {}
        self._given_up: set[int] = set()
        self._unsent: dict[str, HeldPosition] = {}
        self._release_at_ms: dict[str, float] = {}
        self._wants_membership = False
        self._is_join_read = False
        self._join_sent_ms = self._beat_ms = NEVER_HELD

    @property
    def world(self) -> World:
        """The group, as far as it was read."""
        return self._log.world

    @property
    def is_member(self) -> bool:
        """Whether this instance is a member, as far as the log was read."""
        member = self.world.members.get(self.client_id)
        return member is not None and member.instance == self.instance

    @property
    def heartbeat_ms(self) -> int:
        """T of the group, or the one that this process brings along."""
        return self.world.heartbeat_ms if self.world.members else int(self._join_fields["heartbeat_ms"])

    # Writing.

    def send(self, kind: RecordType, **fields: Any) -> int:
        """Write a record; return its sequence number."""
        with self.changed:
            if self.failure is not None:
                raise self.failure
            sent_at_ms = self._clock_ms()
            value = encode_record(Record(kind, self.client_id, self.instance, self._sequence + 1, **fields))
            self._sequence += 1
            self._holds.note_sent(self._sequence, sent_at_ms)
            self._channel.write(value)
            return self._sequence

    def ask(self, kind: RecordType, wait_s: float, **fields: Any) -> Applied:
        """Write a record and wait until it is read back; return its effects. After a time-out it may still come."""
        with self.changed:
            sequence = self.send(kind, **fields)
            key = _JOIN if kind is RecordType.JOIN else sequence
            self._answers[key] = None
            self.changed.wait_for(lambda: self._answers[key] is not None or self.failure is not None, wait_s)
            applied = self._answers.pop(key)
            if applied is not None:
                return applied
            if self.failure is not None:
                raise self.failure
            self._given_up.add(sequence)
        trouble = f" ({self._channel.trouble})" if self._channel.trouble else ""
        message = f"{kind.name} was not read back within {wait_s:g} s{trouble}; check the broker and the rights"
        raise KafkaClientError(message, code="_TIMED_OUT", retriable=True)

    def wait_for_record(self, offset: int, wait_s: float) -> None:
        """Wait until the record at an offset was read, or the session is over."""
        with self.changed:
            self.changed.wait_for(lambda: self.world.next_offset > offset or self.failure is not None, wait_s)

    def join(self, wait_s: float) -> Applied:
        """Write a JOIN and wait until this instance is a member, or is refused; from now on the thread heartbeats."""
        with self.changed:
            self._wants_membership, self._is_join_read = True, False
            self._beat_ms = self._join_sent_ms = self._clock_ms()
            return self.ask(RecordType.JOIN, wait_s, **self._join_fields)

    def stop(self, *, leave: bool) -> None:
        """
        End every claim, then write the positions and LEAVE.

        Without LEAVE the claims lapse after 2T, or a successor takes them over.
        """
        with self.changed:
            # Else the thread would join again when it reads the LEAVE back.
            self._wants_membership = False
            for claim in list(self.claims.values()):
                claim.end("the coordinator was closed")
            self.claims.clear()
            if self.failure is None and self.is_member:
                self._beat()
                if leave:
                    self.send(RecordType.LEAVE)

    @property
    def is_in_child(self) -> bool:
        """Whether this is a fork of the process that joined. It holds no claim, and must not wait for the lock."""
        return self._pid != os.getpid()

    def check_process(self) -> None:
        """Raise UsageError in a fork of the process that joined: only the parent is a member."""
        if self.is_in_child:
            message = "coordinator of the parent process: got a call after a fork; make one in the child"
            raise UsageError(message)

    # Claims.

    def is_over(self, claim: Claim) -> bool:
        """Return whether a claim is over by the clock, and end it then; in a fork every claim is over."""
        if self.is_in_child:
            return True
        if self._clock_ms() < self.until_ms:
            return False
        with self.changed:
            self._lose(claim, "no renewal was read back from the log for T")
        return True

    def may_claim(self, resource: str) -> bool:
        """Return whether a CLAIM would be granted, as far as the log was read."""
        world = self.world
        known, task = world.resources.get(resource), world.tasks.get(resource)
        return (
            self.is_member
            and not world.is_paused
            and (known is None or known.holder in {"", self.client_id})
            and (task is None or task.client_id == self.client_id)
        )

    def claim(self, resource: str, wait_s: float, topic_id: str = "") -> Claim | None:
        """Write a CLAIM; return the claim if it was granted and is still held."""
        applied = self.ask(RecordType.CLAIM, wait_s, resource=resource, topic_id=topic_id)
        if Ignored.OVER_LIMIT in applied.ignored:
            message = f"cannot claim {resource!r}: the group has the most resources that it may have; use another group"
            raise UsageError(message)
        with self.changed:
            claim = self.claims.get(resource)
            is_granted = any(effect.change is Change.CLAIMED for effect in applied.effects)
            return claim if is_granted and claim is not None and claim.is_held else None

    def note_position(self, claim: Claim, position: int) -> None:
        """Send a position with the next heartbeat."""
        with self.changed:
            claim.position = position
            self._unsent[claim.resource] = HeldPosition(claim.resource, claim.epoch, position)

    def send_position(self, claim: Claim, position: int, wait_s: float) -> Applied:
        """Send a position in a heartbeat of its own, and wait until it is read back."""
        with self.changed:
            self._unsent.pop(claim.resource, None)
            row = HeldPosition(claim.resource, claim.epoch, position)
            applied = self.ask(RecordType.HEARTBEAT, wait_s, positions=(row,))
            if not applied.ignored:
                claim.position = position
            return applied

    def release(self, claim: Claim, position: int | None) -> None:
        """End a claim, then write its RELEASE."""
        if self.is_in_child:
            return
        with self.changed:
            if claim.end("it was released") and self.failure is None:
                self._forget(claim)
                self.send(RecordType.RELEASE, resource=claim.resource, epoch=claim.epoch, position=position)

    def _forget(self, claim: Claim) -> None:
        if self.claims.get(claim.resource) is claim:
            del self.claims[claim.resource]
        self._unsent.pop(claim.resource, None)

    def _lose(self, claim: Claim, reason: str) -> None:
        """
        End a claim that was not released.

        Where the log still says that it is ours, it is released a T later: the work under it has that long to stop, as
        it would have if this process were suspended.
        """
        if not claim.end(reason):
            return
        self._forget(claim)
        self._release_at_ms[claim.resource] = self._clock_ms() + self.heartbeat_ms
        logger.warning(
            "claim of %s is over: %s", claim.resource, reason,
            extra={"action": "claim_lost", "resource": claim.resource, "epoch": claim.epoch},
        )  # fmt: skip

    # The thread.

    def turn(self) -> None:
        """Write a heartbeat if one is due, and read what has arrived."""
        self._channel.serve()
        with self.changed:
            self._end_holds()
            self._beat_if_due()
            until_beat_s = (self._next_beat_ms() - self._clock_ms()) / 1000
        logged = self._channel.read(max(0.0, min(LONGEST_READ_S, until_beat_s if self._wants_membership else 1.0)))
        with self.changed:
            self._end_holds()
            effects = [effect for one in logged for effect in self._take(one)]
            if self._log.unsupported:
                message = f"{self._log.unsupported}; this member cannot know what the group does and stops"
                self.fail(KafkaClientError(message, code="UNSUPPORTED_VERSION"))
            if self._channel.failure is not None:
                self.fail(self._channel.failure)
            if effects:
                self._duties.has_news = True
                self.on_effects(effects)
            if self._is_leading() and self._duties.is_snapshot_due(self.world, self._clock_ms()):
                self._write_snapshot()
            self.changed.notify_all()

    def fail(self, error: KmqError) -> None:
        """End the session: every claim is over, every call raises."""
        with self.changed:
            if self.failure is not None:
                return
            # First: other threads ask for both without the lock, and who sees the failure must not see a claim held.
            self.until_ms = NEVER_HELD
            self.failure = error
            logger.error("coordination ended: %s", error, extra={"action": "coordination_ended"})
            self._lose_all("the session ended")
            self.changed.notify_all()

    def _lose_all(self, reason: str) -> None:
        for claim in list(self.claims.values()):
            self._lose(claim, reason)

    def _end_holds(self) -> None:
        """End the claims whose hold is over by the clock."""
        if self.claims and self._clock_ms() >= self.until_ms:
            self._lose_all("no renewal was read back from the log for T")

    def _is_leading(self) -> bool:
        is_well = self._wants_membership and self.failure is None and self.is_member
        return is_well and self.world.leader == self.client_id

    def _write_snapshot(self) -> None:
        try:
            for part in snapshot_parts(self.world):
                self.send(RecordType.SNAPSHOT, snapshot=part)
        except (KafkaClientError, WireError) as error:
            logger.warning("cannot write a snapshot: %s", error, extra={"action": "snapshot_failed"})

    def _must_assign(self) -> bool:
        return self._is_leading() and self._duties.is_assign_due(self.world, self._clock_ms())

    def assign_tasks(self, wait_s: float = LONGEST_READ_S) -> None:
        """Assign the tasks if that is due within this time; after an error, try again after T. In another thread."""
        with self.changed:
            if not self.changed.wait_for(self._must_assign, wait_s):
                return
            self._duties.has_news = False
            world = replace(self.world, members=self.world.members.copy(), tasks=self.world.tasks.copy())
        try:
            rows = changes(world, self._duties.assign)
            with self.changed:
                if not self._is_leading() or self.world.generation != world.generation:
                    return
                starts = range(0, len(rows), ASSIGNMENTS_AT_ONCE)
                # Do not wait longer than T for a record to be read back.
                self._duties.note_assigns(len(starts), self._clock_ms() + self.heartbeat_ms)
                for start in starts:
                    part = tuple(rows[start : start + ASSIGNMENTS_AT_ONCE])
                    self.send(RecordType.ASSIGN, generation=world.generation, assignments=part)
        except Exception:
            logger.exception("cannot assign the tasks", extra={"action": "assign_failed"})
            with self.changed:
                self._duties.has_news = True
                self._duties.note_assigns(1, self._clock_ms() + self.heartbeat_ms)

    def _take(self, logged: LoggedBytes) -> list[Effect]:
        """Apply a record, and note what it says about this process."""
        applied = self._log.read(logged.offset, logged.append_time_ms, logged.key, logged.value)
        record = self._log.record
        is_own = record is not None and (record.client_id, record.instance) == (self.client_id, self.instance)
        is_given_up = False
        if record is not None and is_own:
            self._holds.note_read(record.sequence, refreshed=applied.refreshed)
            self.until_ms = self._holds.until_ms(self.world.heartbeat_ms)
            is_join = record.type is RecordType.JOIN
            key = _JOIN if is_join else record.sequence
            is_given_up = record.sequence in self._given_up
            self._given_up = {one for one in self._given_up if one > record.sequence}
            if key in self._answers:
                self._answers[key] = applied
            self._is_join_read = self._is_join_read or is_join
            if record.type is RecordType.ASSIGN:
                self._duties.note_assign_read()
            if Ignored.CLIENT_ID_IN_USE in applied.ignored:
                logger.warning(
                    "client id %s is used by another instance; the next try is in %d ms",
                    self.client_id, self.heartbeat_ms, extra={"action": "join_refused"},
                )  # fmt: skip
        for effect in applied.effects:
            if effect.client_id == self.client_id:
                self._take_effect(effect, is_given_up=is_given_up, is_own=is_own)
        return applied.effects

    def _take_effect(self, effect: Effect, *, is_given_up: bool, is_own: bool) -> None:
        """Act on a change that concerns this client id."""
        if effect.change is Change.REPLACED and not is_own and self._wants_membership:
            message = (
                f"another instance of client id {self.client_id!r} has taken over with fast_reclaim; "
                "use one client id for each process"
            )
            self.fail(FencedError(message))
        elif effect.change is Change.CLAIMED and self.is_member:
            self._grant(effect, is_given_up=is_given_up)
        elif effect.change is Change.POSITION_FORGOTTEN:
            logger.warning(
                "the topic of %s was deleted and created again: its position is forgotten", effect.resource,
                extra={"action": "position_forgotten", "resource": effect.resource, "epoch": effect.epoch},
            )  # fmt: skip
        elif effect.change in {Change.RELEASED, Change.LAPSED}:
            claim = self.claims.get(effect.resource)
            if claim is not None and claim.epoch == effect.epoch:
                lapsed = effect.change is Change.LAPSED
                self._lose(claim, "it was not renewed for 2T" if lapsed else "the log shows its release")

    def _grant(self, effect: Effect, *, is_given_up: bool) -> None:
        before = self.claims.get(effect.resource)
        if before is not None:
            before.end("it was claimed again")
        position = self.world.resources[effect.resource].position
        claim = self.claims[effect.resource] = Claim(self, effect.resource, effect.epoch, position)
        if is_given_up:
            # The caller does not wait for it any more.
            self.release(claim, None)

    def _next_beat_ms(self) -> float:
        """Return when the next HEARTBEAT or JOIN is due, by the monotonic clock."""
        if self.is_member:
            return self._beat_ms + self.heartbeat_ms / BEATS_PER_INTERVAL
        return self._join_sent_ms + (self.heartbeat_ms if self._is_join_read else min(self.heartbeat_ms, JOIN_AGAIN_MS))

    def _beat_if_due(self) -> None:
        time_ms = self._clock_ms()
        if not self._wants_membership or self.failure is not None:
            return
        if time_ms < self._next_beat_ms():
            return
        try:
            if self.is_member:
                self._release_rest()
                self._beat()
            else:
                # Its first JOIN has not arrived; or a JOIN was refused, or the member was dropped.
                self._beat_ms = self._join_sent_ms = time_ms
                again = {"fast_reclaim": False} if self._is_join_read else {}
                self.send(RecordType.JOIN, **{**self._join_fields, **again})
        except KafkaClientError as error:
            self._beat_ms = time_ms
            logger.warning("cannot heartbeat: %s", error, extra={"action": "heartbeat_failed"})

    def _beat(self) -> None:
        """Write a heartbeat with the positions that were not sent."""
        self._beat_ms = self._clock_ms()
        rows = list(self._unsent.values())
        for start in range(0, max(1, len(rows)), POSITIONS_AT_ONCE):
            self.send(RecordType.HEARTBEAT, positions=tuple(rows[start : start + POSITIONS_AT_ONCE]))
        # After the writes: those of a write that fails go with the next heartbeat.
        self._unsent.clear()

    def _release_rest(self) -> None:
        """Release what the log assigns to this process and it does not hold: its claim or its RELEASE was lost."""
        rest = self.world.held.get(self.client_id, set()) - self.claims.keys()
        self._release_at_ms = {name: at_ms for name, at_ms in self._release_at_ms.items() if name in rest}
        for name in rest:
            if self._clock_ms() >= self._release_at_ms.get(name, NEVER_HELD):
                self.send(RecordType.RELEASE, resource=name, epoch=self.world.resources[name].epoch)
