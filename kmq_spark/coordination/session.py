"""
A process in a group: reads the group's partition, heartbeats, and keeps what it holds.

Rule 1: one lock (`changed`) for world, holds and claims. Records get their sequence and their place in the client's
queue under it, so that both have the same order.
Rule 2: a hold that is over by the clock ends its claim before anything else is read: a renewal that arrives late does
not bring it back.
Rule 3: a claim that was lost is released a T after its hold was over, or lapses: the end of a hold is not the end of
the work under it.
Rule 4: every T/3 a heartbeat; a member that was dropped joins again under the same instance, without its claims.
Rule 5: no callback of the user runs under the lock, or in the thread that heartbeats.
"""

from __future__ import annotations

import logging
import time
from threading import Condition, RLock
from typing import TYPE_CHECKING, Any, Protocol

from kmq_spark.coordination.claim import Claim
from kmq_spark.coordination.leader import Leader
from kmq_spark.core.coordination.effects import Applied, Change, Ignored
from kmq_spark.core.coordination.holds import NEVER_HELD, Holds
from kmq_spark.core.coordination.records import HeldPosition, Record, RecordType
from kmq_spark.errors import ClaimLostError, FencedError, KafkaClientError, KmqError, UsageError
from kmq_spark.wire.coordination import encode_record

if TYPE_CHECKING:
    from collections.abc import Callable

    from kmq_spark.coordination.channel import LoggedBytes
    from kmq_spark.core.coordination.assign import Assign
    from kmq_spark.core.coordination.effects import Effect
    from kmq_spark.core.coordination.world import World
    from kmq_spark.wire.coordination_log import GroupLog

logger = logging.getLogger(__name__)

BEATS_PER_INTERVAL = 3
"""Heartbeats within T: two may be late before a hold is over."""

JOIN_AGAIN_MS = 2_000
"""A JOIN that is not read back within this time is written again, whatever T is: a broker just started loses some."""

POSITIONS_AT_ONCE = 900
"""Positions in one record: with the longest names it stays below the largest record."""

LONGEST_READ_S = 0.1
"""The thread looks that often whether it is to stop."""

_CLOCK = getattr(time, "CLOCK_BOOTTIME", None)


def now_ms() -> float:
    """Return milliseconds of a monotonic clock that also runs while the host sleeps, where the system has one."""
    return (time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)) * 1000


class LogChannel(Protocol):
    """
    The way to the group's partition.

    Attributes:
        failure: Why it is of no use any more; None while it is.
    """

    failure: KmqError | None

    def read(self, timeout_s: float) -> list[LoggedBytes]:
        """Return records that have arrived, in order; wait for the first one."""

    def write(self, value: bytes) -> None:
        """Hand a record over; in the order of the calls they are appended."""

    def serve(self) -> None:
        """Take the answers to what was written."""


class Session:
    """
    What one process knows and does in a group.

    Args:
        channel: To the group's partition, at the place where `log` ends.
        log: Read to the end of the partition.
        client_id: Client id of the member.
        instance: Instance of this process.
        join_fields: Fields of its JOIN.
        assign: Spreads the tasks when this member leads.
        snapshot_every_ms: Time after which the leader writes a snapshot, if there are new records.
        clock_ms: Monotonic clock, milliseconds.

    Attributes:
        changed: Lock of everything here; notified after each batch of records.
        claims: What this process holds, by resource.
        failure: Why the session is over; None while it lasts.
        leader: What this process does when its member leads the group.
        on_lost: Called with a claim that is over and was not released; must return at once.
        on_effects: Called with the effects of a batch, under the lock; must return at once.
        until_ms: When all holds end, by the monotonic clock.
    """

    def __init__(
        self,
        channel: LogChannel,
        log: GroupLog,
        client_id: str,
        *,
        instance: str,
        join_fields: dict[str, Any],
        assign: Assign,
        snapshot_every_ms: float,
        clock_ms: Callable[[], float] = now_ms,
    ) -> None:
        """Begin as an observer; `join` makes it a member."""
        self._clock_ms = clock_ms
        self.changed = Condition(RLock())
        self.claims: dict[str, Claim] = {}
        self.failure: KmqError | None = None
        self.on_lost: Callable[[Claim], None] = lambda _: None
        self.on_effects: Callable[[list[Effect]], None] = lambda _: None
        self.until_ms = NEVER_HELD
        self.client_id, self.instance = client_id, instance
        self._channel, self._log = channel, log
        self._holds = Holds(client_id, instance)
        self._join_fields = join_fields
        self._sequence = 0
        self._awaited: set[int] = set()
        self._answers: dict[int, Applied] = {}
        self._abandoned: set[int] = set()
        self._unsent: dict[str, HeldPosition] = {}
        self._release_at_ms: dict[str, float] = {}
        self._wants_membership = False
        self._is_join_read = False
        self._join_sequence = 0
        self._join_sent_ms = self._beat_ms = NEVER_HELD
        self.leader = Leader(self, assign, snapshot_every_ms, clock_ms)

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

    def send(self, kind: RecordType, *, awaited: bool = False, **fields: Any) -> int:
        """
        Write a record; return its sequence.

        Args:
            kind: Its type.
            awaited: Whether `answer_to` is going to ask for it.
            fields: Fields of its type.

        Raises:
            MalformedRecordError: A field is out of bounds.
            KmqError: The session is over, or the client takes no more records.
        """
        with self.changed:
            if self.failure is not None:
                raise self.failure
            sent_at_ms = self._clock_ms()
            value = encode_record(Record(kind, self.client_id, self.instance, self._sequence + 1, **fields))
            self._sequence += 1
            self._holds.note_sent(self._sequence, sent_at_ms)
            if awaited:
                self._awaited.add(self._sequence)
            self._channel.write(value)
            return self._sequence

    def answer_to(self, sequence: int, wait_s: float) -> Applied | None:
        """
        Wait until a record is read back.

        Args:
            sequence: Sequence of a record that was sent as awaited.
            wait_s: At most so long.

        Returns:
            What it led to; None where it was not read back in time.

        Raises:
            KmqError: The session is over.
        """
        with self.changed:
            self.changed.wait_for(lambda: sequence in self._answers or self.failure is not None, wait_s)
            self._awaited.discard(sequence)
            applied = self._answers.pop(sequence, None)
            if applied is None:
                self._abandoned.add(sequence)
                if self.failure is not None:
                    raise self.failure
            return applied

    def is_unanswered(self, sequence: int) -> bool:
        """Return whether a record was sent as awaited and has not been read back."""
        return sequence in self._awaited and sequence not in self._answers

    def forget_answer(self, sequence: int) -> None:
        """Keep no answer to a record that was sent as awaited."""
        self._answers.pop(sequence, None)
        self._awaited.discard(sequence)

    def join(self, wait_s: float) -> Applied | None:
        """Write a JOIN and wait until this instance is a member, or is refused; from now on the thread heartbeats."""
        with self.changed:
            self._wants_membership, self._is_join_read = True, False
            self._join_sequence = self.send(RecordType.JOIN, awaited=True, **self._join_fields)
            self._beat_ms = self._join_sent_ms = self._clock_ms()
            return self.answer_to(self._join_sequence, wait_s)

    def stop(self, *, leave: bool) -> None:
        """
        End every claim, then write what is left to say: the positions, and LEAVE.

        Args:
            leave: Whether to leave the group; else the claims lapse after 2T, or a successor takes them over.
        """
        with self.changed:
            # Else the thread would join again when it reads the LEAVE back.
            self._wants_membership = False
            for claim in list(self.claims.values()):
                claim.end("the coordinator was closed")
            self.claims.clear()
            if self.failure is None and self.is_member:
                self.beat()
                if leave:
                    self.send(RecordType.LEAVE)

    def after_fork(self) -> None:
        """Hold nothing in a child process; the lock may have been held when it was forked."""
        self.changed = Condition(RLock())
        self.until_ms = NEVER_HELD
        self.failure = UsageError("coordinator of the parent process: got a call after a fork; make one in the child")

    def beat(self) -> None:
        """Write a heartbeat with the positions that were not sent."""
        with self.changed:
            self._beat_ms = self._clock_ms()
            rows = list(self._unsent.values())
            self._unsent.clear()
            for start in range(0, max(1, len(rows)), POSITIONS_AT_ONCE):
                self.send(RecordType.HEARTBEAT, positions=tuple(rows[start : start + POSITIONS_AT_ONCE]))

    # Claims.

    def is_over(self, claim: Claim) -> bool:
        """Return whether a claim is over by the clock, and end it then."""
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

    def claim(self, resource: str, wait_s: float) -> Claim | None:
        """Write a CLAIM; return the claim where it was granted and the hold lasts."""
        sequence = self.send(RecordType.CLAIM, awaited=True, resource=resource)
        applied = self.answer_to(sequence, wait_s)
        if applied is None:
            message = f"claim of {resource!r} was not read back within {wait_s:g} s; check the broker"
            raise KafkaClientError(message, code="_TIMED_OUT", retriable=True)
        if Ignored.OVER_LIMIT in applied.ignored:
            message = f"cannot claim {resource!r}: the group has the most resources that it may have; use another group"
            raise UsageError(message)
        with self.changed:
            claim = self.claims.get(resource)
            is_granted = any(effect.change is Change.CLAIMED for effect in applied.effects)
            return claim if is_granted and claim is not None and claim.is_held else None

    def commit(self, claim: Claim, position: int, wait_s: float) -> None:
        """Note a position for the next heartbeat, or send it in one of its own; see `Claim.commit`."""
        row = HeldPosition(claim.resource, claim.epoch, position)
        with self.changed:
            claim.position = position
            if wait_s <= 0:
                self._unsent[claim.resource] = row
                return
            self._unsent.pop(claim.resource, None)
            sequence = self.send(RecordType.HEARTBEAT, awaited=True, positions=(row,))
        self._refuse(claim, self._confirmed(claim, sequence, wait_s), f"position {position}")

    def claim_messages(self, claim: Claim, end: int, wait_s: float) -> None:
        """See `Claim.claim_messages`."""
        until_s = time.monotonic() + wait_s
        sequence = self.send(
            RecordType.CLAIM_MESSAGES, awaited=True, resource=claim.resource, epoch=claim.epoch, position=end
        )
        self._refuse(claim, self._confirmed(claim, sequence, wait_s), f"messages up to {end}")
        self.commit(claim, end, max(0.001, until_s - time.monotonic()))

    def release(self, claim: Claim, position: int | None) -> None:
        """End a claim, then write its RELEASE."""
        with self.changed:
            if claim.end("it was released") and self.failure is None:
                self._forget(claim)
                self.send(RecordType.RELEASE, resource=claim.resource, epoch=claim.epoch, position=position)

    def _refuse(self, claim: Claim, applied: Applied, what: str) -> None:
        """Raise where a record about a claim changed nothing."""
        if applied.ignored:
            message = f"{what} of {claim.resource!r} changed nothing: {applied.ignored[0]}; stop working on it"
            raise ClaimLostError(message, resource=claim.resource, epoch=claim.epoch)

    def _confirmed(self, claim: Claim, sequence: int, wait_s: float) -> Applied:
        applied = self.answer_to(sequence, wait_s)
        if applied is None:
            message = f"record about {claim.resource!r} was not read back within {wait_s:g} s; check the broker"
            raise KafkaClientError(message, code="_TIMED_OUT", retriable=True)
        claim.check()
        return applied

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
        self.on_lost(claim)

    # The thread.

    def turn(self) -> None:
        """Heartbeat where it is time, and read what has arrived."""
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
                self.leader.note_change()
                self.on_effects(effects)
            self.leader.lead()
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

    def _take(self, logged: LoggedBytes) -> list[Effect]:
        """Apply a record, and note what it means for this process."""
        applied = self._log.read(logged.offset, logged.append_time_ms, logged.key, logged.value)
        record = self._log.record
        is_own = record is not None and (record.client_id, record.instance) == (self.client_id, self.instance)
        is_abandoned = False
        if record is not None and is_own:
            self._holds.note_read(record.sequence, refreshed=applied.refreshed)
            self.until_ms = self._holds.until_ms(self.world.heartbeat_ms)
            is_abandoned = record.sequence in self._abandoned
            self._abandoned = {one for one in self._abandoned if one > record.sequence}
            self._is_join_read = self._is_join_read or record.type is RecordType.JOIN
            # The first JOIN may be lost: any later one answers for it.
            sequence = self._join_sequence if record.type is RecordType.JOIN else record.sequence
            if sequence in self._awaited:
                self._answers[sequence] = applied
            if Ignored.CLIENT_ID_IN_USE in applied.ignored:
                logger.warning(
                    "client id %s is used by another instance; the next try is in %d ms",
                    self.client_id, self.heartbeat_ms, extra={"action": "join_refused"},
                )  # fmt: skip
        for effect in applied.effects:
            if effect.client_id == self.client_id:
                self._take_effect(effect, is_abandoned=is_abandoned, is_own=is_own)
        return applied.effects

    def _take_effect(self, effect: Effect, *, is_abandoned: bool, is_own: bool) -> None:
        """Note a change that is about this client id."""
        if effect.change is Change.REPLACED and not is_own and self._wants_membership:
            message = (
                f"another instance of client id {self.client_id!r} has taken over with fast_reclaim; "
                "use one client id for each process"
            )
            self.fail(FencedError(message))
        elif effect.change is Change.CLAIMED and self.is_member:
            self._grant(effect, is_abandoned=is_abandoned)
        elif effect.change in {Change.RELEASED, Change.LAPSED}:
            claim = self.claims.get(effect.resource)
            if claim is not None and claim.epoch == effect.epoch:
                lapsed = effect.change is Change.LAPSED
                self._lose(claim, "it was not renewed for 2T" if lapsed else "the log shows its release")

    def _grant(self, effect: Effect, *, is_abandoned: bool) -> None:
        before = self.claims.get(effect.resource)
        if before is not None:
            before.end("it was claimed again")
        position = self.world.resources[effect.resource].position
        claim = self.claims[effect.resource] = Claim(self, effect.resource, effect.epoch, position)
        if is_abandoned:
            # The caller has given up waiting.
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
                self.beat()
            else:
                # Its first JOIN has not arrived; or a JOIN was refused, or the member was dropped.
                self._beat_ms = self._join_sent_ms = time_ms
                again = {"fast_reclaim": False} if self._is_join_read else {}
                self.send(RecordType.JOIN, **{**self._join_fields, **again})
        except KafkaClientError as error:
            self._beat_ms = time_ms
            logger.warning("cannot heartbeat: %s", error, extra={"action": "heartbeat_failed"})

    def _release_rest(self) -> None:
        """Release what the log says this process holds and it does not: lost claims, and where a RELEASE was lost."""
        rest = self.world.members[self.client_id].held - self.claims.keys()
        self._release_at_ms = {name: at_ms for name, at_ms in self._release_at_ms.items() if name in rest}
        for name in rest:
            if self._clock_ms() >= self._release_at_ms.get(name, NEVER_HELD):
                self.send(RecordType.RELEASE, resource=name, epoch=self.world.resources[name].epoch)


def not_joined(group: str) -> UsageError:
    """Return the error of a call that needs a session."""
    return UsageError(f"group {group!r} was not joined: got a call before join, or after close; call join first")
