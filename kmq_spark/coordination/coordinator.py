"""
Join a group, claim what one member at a time may hold, and spread tasks: the client of the coordination topic.

Rule 1: whatever this process believes, the log decides: a call returns when its record was read back.
Rule 2: callbacks run in a thread of their own, one after the other; a slow one delays the next one and no heartbeat.
Rule 3: a process that was forked from this one holds nothing, and cannot use the coordinator.

Source: Marshal's `Marshaler` and `Consumer`; its options are named in docs/coordination.md.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any, Self

from confluent_kafka.admin import AdminClient

from kmq_spark.coordination.callbacks import Callbacks
from kmq_spark.coordination.channel import Channel
from kmq_spark.coordination.consumption import Consumption
from kmq_spark.coordination.group_log import read_group_log
from kmq_spark.coordination.leader import snapshot_every_ms
from kmq_spark.coordination.session import Session, not_joined
from kmq_spark.coordination.topic import COORDINATION_TOPIC, DEFAULT_TIMEOUT, check_coordination_topic
from kmq_spark.core.coordination.assign import sticky_balanced
from kmq_spark.core.coordination.effects import Ignored
from kmq_spark.core.coordination.records import (
    Record,
    RecordType,
    is_group,
    record_fault,
)
from kmq_spark.errors import ConfigError, KafkaClientError, KmqError, UsageError
from kmq_spark.kafka import forks
from kmq_spark.kafka.settings import admin_config, make_client, new_client_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    from kmq_spark.coordination.claim import Claim
    from kmq_spark.coordination.consumption import Mode
    from kmq_spark.core.coordination.assign import Assign
    from kmq_spark.core.coordination.effects import Applied, Effect

logger = logging.getLogger(__name__)

_ANSWER_S = 10.0
_STOP_S = 5.0


class Coordinator:
    """
    One process in a group.

    Args:
        group: Name of the group, 1 to 200 of `A-Z a-z 0-9 . _ -`.
        bootstrap_servers: Comma-separated `host:port`.
        client_id: Name of the member, stable over restarts if you want it to find its claims again; empty for a random
            one. No two processes of a group may use one at a time.
        heartbeat_ms: T: a hold ends T after its last renewal, and others may claim after 2T. 100 to 60,000. The first
            member of an empty group decides; later ones adopt it.
        metadata: Free bytes that other members see, at most 4,096.
        fast_reclaim: Your promise that no other process uses *client_id* any more: take its claims over at once.
        assign: How tasks are spread while this member leads; use the same function in all members.
        on_lost: Called with each claim that is over and was not released.
        on_change: Called with the effects of each batch of records.
        topic: The coordination topic.
        timeout: Bound on each call to the broker while joining.
        extra: librdkafka settings.

    Raises:
        ConfigError: A value is out of bounds.
    """

    def __init__(
        self,
        group: str,
        *,
        bootstrap_servers: str,
        client_id: str = "",
        heartbeat_ms: int = 2_000,
        metadata: bytes = b"",
        fast_reclaim: bool = False,
        assign: Assign = sticky_balanced,
        on_lost: Callable[[Claim], None] | None = None,
        on_change: Callable[[Sequence[Effect]], None] | None = None,
        topic: str = COORDINATION_TOPIC,
        timeout: float = DEFAULT_TIMEOUT,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        """Check the values; `join` connects."""
        if not is_group(group):
            message = (
                f"group name is not allowed: got {group!r:.80}, 1 to 200 of A-Z a-z 0-9 . _ -; choose another name"
            )
            raise ConfigError(message)
        self.group = group
        self.client_id = client_id or new_client_id("member")
        self.instance = secrets.token_hex(8)
        self._join_fields: dict[str, Any] = {
            "metadata": metadata,
            "heartbeat_ms": heartbeat_ms,
            "fast_reclaim": fast_reclaim,
        }
        join = Record(RecordType.JOIN, self.client_id, self.instance, **self._join_fields)
        if fault := record_fault(join):
            raise ConfigError(f"{fault}; correct the arguments of Coordinator")
        self._assign, self._callbacks = assign, Callbacks(on_lost, on_change)
        self._topic, self._timeout, self._extra = topic, timeout, extra
        self._bootstrap_servers = bootstrap_servers
        self._session: Session | None = None
        self._channel: Channel | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        forks.watch(self)

    # Coming and going.

    def __enter__(self) -> Self:
        """Join."""
        self.join()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave."""
        self.close()

    def join(self, timeout_s: float = 30.0) -> None:
        """
        Become a member of the group.

        Args:
            timeout_s: Longest time. A client id whose other instance is a member is tried again until then.

        Raises:
            TopicError: The topic does not exist, or does not fit.
            UsageError: The client id is used by another instance, or this coordinator was used before.
            KafkaClientError: The broker cannot be reached, or the group's world cannot be known.
        """
        until_s = time.monotonic() + timeout_s
        session = self._begin(until_s)
        try:
            self._join(session, until_s)
        except BaseException:
            self.close()
            raise

    def watch(self, timeout_s: float = 30.0) -> None:
        """
        Follow the group without being a member: to look, to pause it, to set positions, to add tasks.

        Args:
            timeout_s: Longest time.

        Raises:
            KmqError: As `join`.
        """
        self._begin(time.monotonic() + timeout_s)

    def close(self, *, leave: bool = True) -> None:
        """
        Stop. Every claim is over before anything else is done; a second call does nothing.

        Args:
            leave: Whether to release the claims and leave the group. False: others wait for 2T, and a process that
                starts with the same client id and `fast_reclaim` before that takes the claims over.
        """
        session, channel, thread = self._session, self._channel, self._thread
        self._session = self._channel = self._thread = None
        if session is not None:
            try:
                session.stop(leave=leave)
            except KmqError as error:
                # The claims lapse by themselves after 2T.
                logger.warning("cannot leave group %s: %s", self.group, error, extra={"action": "leave_failed"})
        self._stopping.set()
        if thread is not None:
            thread.join(_STOP_S)
        if channel is not None:
            channel.flush(_STOP_S if leave else 1.0)
            channel.close()
        self._callbacks.stop()

    # Claims.

    def claim(self, resource: str, timeout_s: float = 0.0) -> Claim | None:
        """
        Claim a resource.

        Args:
            resource: Its name, 1 to 255 characters; for a task, this member must be assigned to it.
            timeout_s: How long to wait while another member holds it, or the group is paused.

        Returns:
            The claim, or None where it was not granted in time. A claim that this process has already is returned.

        Raises:
            MalformedRecordError: The name is out of bounds.
            KafkaClientError: The record was not read back.
            KmqError: The session is over.
        """
        session = self._joined()
        until_s = time.monotonic() + timeout_s
        while True:
            with session.changed:
                if session.failure is not None:
                    raise session.failure
                known = session.claims.get(resource)
                if known is not None and known.is_held:
                    return known
                may_claim = session.may_claim(resource)
            if may_claim and (claim := session.claim(resource, _ANSWER_S)) is not None:
                return claim
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return None
            with session.changed:
                session.changed.wait_for(
                    lambda: session.may_claim(resource) or session.failure is not None, min(left_s, _ANSWER_S)
                )

    @property
    def claims(self) -> dict[str, Claim]:
        """What this process holds, by resource; after a fast reclaim, what it took over."""
        session = self._joined()
        with session.changed:
            return dict(session.claims)

    # Tasks.

    def add_task(self, task: str, payload: bytes = b"") -> None:
        """Add a task, or change its payload; the leader assigns it."""
        self._written(RecordType.ADD_TASK, resource=task, payload=payload)

    def remove_task(self, task: str) -> None:
        """Remove a task; its holder sees it and releases."""
        self._written(RecordType.REMOVE_TASK, resource=task)

    def drain(self, client_id: str = "") -> None:
        """Let a member, this one by default, get no more tasks; the leader gives those it has to others."""
        self._written(RecordType.DRAIN, member=client_id or self.client_id)

    @property
    def assigned(self) -> dict[str, bytes]:
        """The tasks that this member is to run, with their payloads; `claim` each before you run it."""
        session = self._joined()
        with session.changed:
            return {
                name: task.payload for name, task in session.world.tasks.items() if task.client_id == self.client_id
            }

    def consume(
        self,
        topic: str,
        *,
        mode: Mode = "at-least-once",
        max_messages: int = 500,
        most_claims: int = 0,
        auto_ack: bool = True,
        idle_s: float | None = None,
        release_if_behind_s: float | None = None,
    ) -> Consumption:
        """
        Consume a topic: the members of the group share its partitions, one owner each.

            with me.consume("clicks") as batches:
                for batch in batches:
                    ...

        Args:
            topic: Its name.
            mode: `at-least-once`, or `at-most-once`.
            max_messages: Most messages in a batch.
            most_claims: Most partitions that this member takes; 0 = no limit.
            auto_ack: At least once: asking for the next batch acknowledges the one before. False: `Batch.ack` does.
            idle_s: End after so long without a message, seconds; None: never.
            release_if_behind_s: Release a partition where this member has been stuck, or slower than the senders, for
                so long, seconds, 1 to 86,400, and leave it to the others for as long again. None: never.

        Raises:
            ConfigError: A value is out of bounds.
        """
        return Consumption(
            self,
            topic,
            bootstrap_servers=self._bootstrap_servers,
            mode=mode,
            max_messages=max_messages,
            most_claims=most_claims,
            auto_ack=auto_ack,
            idle_s=idle_s,
            release_if_behind_s=release_if_behind_s,
            extra=self._extra,
        )

    # The operator.

    def pause(self, duration_ms: int) -> None:
        """Pause the group: no claim is granted and none renewed; at most for that many milliseconds."""
        self._written(RecordType.PAUSE_GROUP, duration_ms=duration_ms)

    def resume(self) -> None:
        """End the pause of the group."""
        self._written(RecordType.RESUME_GROUP)

    def set_position(self, resource: str, position: int | None) -> None:
        """Set the position of a resource, or forget it; the group must be paused, and nothing held any more."""
        self._written(RecordType.SET_POSITION, resource=resource, position=position)

    def view(self) -> dict[str, Any]:
        """Return the world of the group as plain values: members, resources, tasks, leader, generation."""
        session = self._joined()
        with session.changed:
            return session.world.view()

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], timeout_s: float) -> bool:
        """
        Wait until the world of the group is as wanted.

        Args:
            condition: Asked with `view()` after each batch of records.
            timeout_s: At most so long.

        Returns:
            Whether it is.
        """
        session = self._joined()
        with session.changed:
            session.changed.wait_for(lambda: session.failure is not None or condition(session.world.view()), timeout_s)
            if session.failure is not None:
                raise session.failure
            return condition(session.world.view())

    @property
    def failure(self) -> KmqError | None:
        """Why the session is over; None while it lasts."""
        session = self._session
        return None if session is None else session.failure

    def after_fork(self) -> Iterable[object]:
        """Give up in a child process; see `kmq_spark.kafka.forks`."""
        session, channel = self._session, self._channel
        self._session = self._channel = self._thread = None
        self._callbacks.after_fork()
        self._stopping = threading.Event()
        # The child would be a second process of this instance.
        self._stopping.set()
        if session is not None:
            session.after_fork()
        return () if channel is None else channel.clients

    # Within.

    def _joined(self) -> Session:
        if self._session is None:
            raise not_joined(self.group)
        return self._session

    def _written(self, kind: RecordType, **fields: Any) -> Applied:
        """Write a record and wait for it; raise where it changed nothing."""
        session = self._joined()
        applied = session.answer_to(session.send(kind, awaited=True, **fields), _ANSWER_S)
        if applied is None:
            trouble = "" if self._channel is None or not self._channel.trouble else f" ({self._channel.trouble})"
            message = f"{kind.name} was not read back within {_ANSWER_S:g} s{trouble}; check the broker and the rights"
            raise KafkaClientError(message, code="_TIMED_OUT", retriable=True)
        if applied.ignored:
            message = f"{kind.name} changed nothing in group {self.group!r}: {applied.ignored[0]}; {_ADVICE[kind]}"
            raise UsageError(message)
        return applied

    def _begin(self, until_s: float) -> Session:
        """Read the group's world, and start the thread."""
        if self._session is not None or self._stopping.is_set():
            message = f"coordinator of group {self.group!r} was used before: got a second join; make a new one"
            raise UsageError(message)
        admin = make_client(AdminClient, admin_config(self._bootstrap_servers, extra=self._extra))
        retention_ms = check_coordination_topic(admin, self._topic, self._bootstrap_servers, self._timeout)
        heartbeat_ms = int(self._join_fields["heartbeat_ms"])
        channel = self._channel = Channel(
            self._topic,
            self.group,
            self._bootstrap_servers,
            new_client_id("coordination"),
            delivery_timeout_ms=max(1_000, 2 * heartbeat_ms),
            extra=self._extra,
        )
        try:
            log = read_group_log(channel, self.group, until_s)
        except BaseException:
            channel.close()
            self._channel = None
            raise
        session = self._session = Session(
            channel,
            log,
            self.client_id,
            instance=self.instance,
            join_fields=self._join_fields,
            assign=self._assign,
            snapshot_every_ms=snapshot_every_ms(retention_ms),
        )
        self._callbacks.start(session, self.group)
        self._thread = threading.Thread(
            target=self._run, args=(session, self._stopping), name=f"kmq-coordination-{self.group}", daemon=True
        )
        self._thread.start()
        return session

    def _join(self, session: Session, until_s: float) -> None:
        while True:
            applied = session.join(max(0.1, until_s - time.monotonic()))
            if applied is None:
                message = f"JOIN of {self.client_id!r} was not read back in time; check the broker"
                raise KafkaClientError(message, code="_TIMED_OUT", retriable=True)
            if not applied.ignored:
                break
            if applied.ignored[0] is not Ignored.CLIENT_ID_IN_USE or time.monotonic() > until_s:
                reason = applied.ignored[0]
                message = (
                    f"cannot join group {self.group!r} as {self.client_id!r}: {reason}; use one client id for each "
                    "process, or fast_reclaim=True where the other one is gone"
                )
                raise UsageError(message)
            with session.changed:
                session.changed.wait_for(
                    lambda: self.client_id not in session.world.members or session.failure is not None,
                    min(session.heartbeat_ms / 1000, max(0.0, until_s - time.monotonic())),
                )
        if session.heartbeat_ms != self._join_fields["heartbeat_ms"]:
            logger.warning(
                "group %s has heartbeat_ms=%d, this member was given %d and uses that of the group",
                self.group, session.heartbeat_ms, self._join_fields["heartbeat_ms"],
                extra={"action": "interval_adopted"},
            )  # fmt: skip

    def _run(self, session: Session, stopping: threading.Event) -> None:
        """Heartbeat and read until stopped; in the thread."""
        try:
            while not stopping.is_set() and session.failure is None:
                session.turn()
        except KmqError as error:
            session.fail(error)
        except Exception as error:
            logger.exception("coordination of group %s ended", self.group, extra={"action": "coordination_ended"})
            session.fail(KmqError(f"coordination of group {self.group!r} ended: {error!r}; see the log"))


_ADVICE = {
    RecordType.ADD_TASK: "remove tasks, or use another group",
    RecordType.REMOVE_TASK: "see `view` for the tasks",
    RecordType.DRAIN: "see `view` for the members",
    RecordType.PAUSE_GROUP: "see docs/coordination.md",
    RecordType.RESUME_GROUP: "the pause is over",
    RecordType.SET_POSITION: "pause the group, and wait until nothing is held",
}
