"""
The client of the coordination topic: join a group, claim resources, share tasks.

Rule 1: the log decides: a call returns after its record was read back.
Rule 2: a forked child process holds nothing and cannot use the coordinator.

Source: Marshal's `Marshaler` and `Consumer`.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from confluent_kafka.admin import AdminClient

from kmq_spark.coordination.channel import Channel, read_group_log
from kmq_spark.coordination.session import Session
from kmq_spark.coordination.topic import COORDINATION_TOPIC, check_coordination_topic
from kmq_spark.core.coordination.effects import Ignored
from kmq_spark.core.coordination.leader import Duties, snapshot_every_ms, sticky_balanced
from kmq_spark.core.coordination.records import (
    MAX_HEARTBEAT_MS,
    MAX_PAUSE_MS,
    MIN_HEARTBEAT_MS,
    Record,
    RecordType,
    is_group,
    record_fault,
)
from kmq_spark.core.coordination.world import Resource
from kmq_spark.core.durations import milliseconds
from kmq_spark.errors import ConfigError, KmqError, UsageError
from kmq_spark.kafka.settings import admin_config, make_client, new_client_id

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import timedelta
    from types import TracebackType

    from kmq_spark.coordination.claim import Claim
    from kmq_spark.core.coordination.effects import Effect
    from kmq_spark.core.coordination.leader import Assign
    from kmq_spark.core.coordination.world import Member, Task, World

logger = logging.getLogger(__name__)

_ANSWER_S = 10.0
_STOP_S = 5.0


@dataclass(frozen=True, slots=True)
class GroupView:
    """
    An immutable view of a group as of the last record that was read.

    Attributes:
        next_offset: Offset after that record.
        generation: Offset of the record that last changed the members; -1 before the first.
        leader: Client id of the leader; empty if there is no member.
        heartbeat: T, seconds; 0 before the first JOIN.
        clock_ms: The group's clock, used for `Member.seen_ms`.
        paused_until_ms: End of the pause, epoch milliseconds, broker clock; 0 if there is none.
        members: By client id.
        resources: Resources that are held or have a position, by name.
        tasks: By name.
    """

    next_offset: int
    generation: int
    leader: str
    heartbeat: float
    clock_ms: int
    paused_until_ms: int
    members: Mapping[str, Member]
    resources: Mapping[str, Resource]
    tasks: Mapping[str, Task]

    def holder(self, resource: str) -> str:
        """Return the client id of the holder of a resource or task; empty if it is free."""
        known = self.resources.get(resource)
        return "" if known is None else known.holder


def view_of(world: World) -> GroupView:
    """Return an immutable copy of a world."""
    return GroupView(
        world.next_offset,
        world.generation,
        world.leader,
        world.heartbeat_ms / 1000,
        world.clock_ms,
        world.paused_until_ms,
        MappingProxyType(dict(sorted(world.members.items()))),
        MappingProxyType(dict(sorted(world.resources.items()))),
        MappingProxyType(dict(sorted(world.tasks.items()))),
    )


class Coordinator:
    """
    One process in a group.

    Args:
        group: Name of the group, 1 to 200 of `A-Z a-z 0-9 . _ -`.
        bootstrap_servers: Comma-separated `host:port`.
        client_id: Name of the member; by default a random one. If the name is the same after a restart, the member can
            reclaim its claims. Two processes of a group must not use the same name at the same time.
        heartbeat: T, 0.1 to 60 seconds or a timedelta: a claim ends T after its last renewal, and others may claim the
            resource after 2T. The first member of an empty group sets T for the group.
        metadata: Any bytes that other members can read, at most 4,096.
        fast_reclaim: Take over the claims of the previous process with this *client_id* at once. Set it only if that
            process no longer runs.
        assign: Function that assigns tasks while this member is the leader, called in a separate thread; use the same
            one in all members.
        on_change: Called in a separate thread with the effects of each batch of records. A slow call delays only the
            next one.
        topic: The coordination topic.
        timeout: Timeout of each request to the broker while joining, seconds or a timedelta.
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
        heartbeat: float | timedelta = 2.0,
        metadata: bytes = b"",
        fast_reclaim: bool = False,
        assign: Assign = sticky_balanced,
        on_change: Callable[[Sequence[Effect]], None] | None = None,
        topic: str = COORDINATION_TOPIC,
        timeout: float | timedelta = 15.0,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        if not is_group(group):
            message = (
                f"group name is not allowed: got {group!r:.80}; expected 1 to 200 of A-Z a-z 0-9 . _ -; "
                "choose another name"
            )
            raise ConfigError(message)
        self.group = group
        self.client_id = client_id or new_client_id("member")
        self.instance = secrets.token_hex(8)
        self.bootstrap_servers, self.extra = bootstrap_servers, extra
        self._join_fields: dict[str, Any] = {
            "metadata": metadata,
            "heartbeat_ms": milliseconds("heartbeat", heartbeat, MIN_HEARTBEAT_MS, MAX_HEARTBEAT_MS),
            "fast_reclaim": fast_reclaim,
        }
        join = Record(RecordType.JOIN, self.client_id, self.instance, **self._join_fields)
        if fault := record_fault(join):
            raise ConfigError(f"{fault}; correct the arguments of Coordinator")
        self._assign, self._on_change = assign, on_change
        self._topic, self._timeout_s = topic, milliseconds("timeout", timeout) / 1000
        self.consumed_topics: set[str] = set()
        self.has_running_tasks = False
        self._session: Session | None = None
        self._channel: Channel | None = None
        self._thread: threading.Thread | None = None
        self._helpers: list[threading.Thread] = []
        self._changes: queue.SimpleQueue[list[Effect] | None] = queue.SimpleQueue()
        self._stopping = threading.Event()

    # Join and leave.

    def __enter__(self) -> Self:
        """Join."""
        self.join()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave."""
        self.close()

    def join(self, timeout: float | timedelta = 30.0) -> None:
        """
        Become a member of the group.

        Args:
            timeout: Maximum time, seconds or a timedelta. While another instance of the client id is a member, the join
                is repeated until then.

        Raises:
            TopicError: The topic does not exist, or is not set up correctly.
            UsageError: Another instance uses the client id, or this coordinator was used before.
            KafkaClientError: The broker cannot be reached, or the state of the group is unknown.
        """
        until_s = time.monotonic() + milliseconds("timeout", timeout) / 1000
        session = self._begin(until_s)
        self._start_helper("assign", self._lead, session)
        try:
            self._join(session, until_s)
        except BaseException:
            self.close()
            raise

    def watch(self, timeout: float | timedelta = 30.0) -> None:
        """
        Read the group without joining it: to inspect or pause it, set positions, or add tasks.

        Args:
            timeout: Maximum time, seconds or a timedelta.

        Raises:
            KmqError: As `join`.
        """
        self._begin(time.monotonic() + milliseconds("timeout", timeout) / 1000)

    def close(self, *, leave: bool = True) -> None:
        """
        Stop. First of all, every claim ends. A second call does nothing, nor does one in a forked child.

        Args:
            leave: Whether to release the claims and leave the group. If False, or while a handler of a stopped
                `TaskRunner` still runs, the claims stay until 2T have passed; a process that starts before with the
                same client id and `fast_reclaim` takes them over.
        """
        if self._session is not None and self._session.is_in_child:
            return
        leave = leave and not self.has_running_tasks
        session, channel, thread, helpers = self._session, self._channel, self._thread, self._helpers
        self._session, self._channel, self._thread, self._helpers = None, None, None, []
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
        self._changes.put(None)
        for helper in helpers:
            if helper is not threading.current_thread():  # `on_change` may call this
                helper.join(_STOP_S)

    # Claims.

    def claim(self, resource: str, timeout: float | timedelta = 0.0, *, topic_id: str = "") -> Claim | None:
        """
        Claim a resource.

        Args:
            resource: Name of the resource, 1 to 255 characters. A task must be assigned to this member.
            timeout: How long to wait while another member holds it or the group is paused; seconds or a timedelta.
            topic_id: Where positions are offsets of a Kafka topic, its id: the position of another one is forgotten.

        Returns:
            The claim, also if this process already had it; None if it was not granted in time.

        Raises:
            MalformedRecordError: The name is out of bounds.
            KafkaClientError: The record was not read back in time.
            KmqError: The session has ended.
        """
        session = self._joined()
        until_s = time.monotonic() + milliseconds("timeout", timeout) / 1000
        while True:
            with session.changed:
                if session.failure is not None:
                    raise session.failure
                known = session.claims.get(resource)
                of_topics = {"", session.world.resources.get(resource, Resource()).topic_id}
                if known is not None and known.is_held and topic_id in of_topics:
                    return known
                may_claim = session.may_claim(resource)
            if may_claim and (claim := session.claim(resource, _ANSWER_S, topic_id)) is not None:
                return claim
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return None
            with session.changed:
                session.changed.wait_for(
                    lambda: session.may_claim(resource) or session.failure is not None, min(left_s, _ANSWER_S)
                )

    def holders(self, prefix: str) -> dict[str, str]:
        """Return the holders of the held resources whose names begin so; raise if the session is over."""
        session = self._joined()
        with session.changed:
            if session.failure is not None:
                raise session.failure
            resources = session.world.resources.items()
            return {name: each.holder for name, each in resources if each.holder and name.startswith(prefix)}

    @property
    def claims(self) -> dict[str, Claim]:
        """The claims of this process by resource, including those of a fast reclaim."""
        session = self._joined()
        with session.changed:
            return dict(session.claims)

    # Tasks.

    def add_task(self, task: str, payload: bytes = b"") -> None:
        """Add a task, or change its payload. The leader assigns it to a member."""
        self._write(RecordType.ADD_TASK, resource=task, payload=payload)

    def remove_task(self, task: str) -> None:
        """Remove a task. Its holder notices this and releases it."""
        self._write(RecordType.REMOVE_TASK, resource=task)

    def drain(self, client_id: str = "") -> None:
        """Assign no more tasks to a member (default: this one). The leader moves its tasks to others."""
        self._write(RecordType.DRAIN, member=client_id or self.client_id)

    @property
    def assigned(self) -> dict[str, bytes]:
        """The tasks that are assigned to this member, with their payloads. Claim a task before you run it."""
        session = self._joined()
        with session.changed:
            return {
                name: task.payload for name, task in session.world.tasks.items() if task.client_id == self.client_id
            }

    # Operation.

    def pause(self, duration: float | timedelta) -> None:
        """Pause the group for at most *duration* (seconds or a timedelta): claims are neither granted nor renewed."""
        self._write(RecordType.PAUSE_GROUP, duration_ms=milliseconds("duration", duration, 1, MAX_PAUSE_MS))

    def resume(self) -> None:
        """End the pause of the group."""
        self._write(RecordType.RESUME_GROUP)

    def set_position(self, resource: str, position: int | None) -> None:
        """Set the position of a resource, or remove it (None). The group must be paused, and no resource held."""
        self._write(RecordType.SET_POSITION, resource=resource, position=position)

    def view(self) -> GroupView:
        """Return the current members, resources, tasks, leader and generation."""
        session = self._joined()
        with session.changed:
            return view_of(session.world)

    def wait_for(self, condition: Callable[[GroupView], bool], timeout: float | timedelta) -> bool:
        """
        Wait until a condition holds.

        Args:
            condition: Called with `view()`, in this thread, after each batch of records.
            timeout: Maximum time, seconds or a timedelta.

        Returns:
            Whether the condition holds.
        """
        session = self._joined()
        until_s = time.monotonic() + milliseconds("timeout", timeout) / 1000
        while True:
            with session.changed:
                if session.failure is not None:
                    raise session.failure
                view = view_of(session.world)
            if condition(view):  # without the lock: heartbeats go on
                return True
            if (left_s := until_s - time.monotonic()) <= 0:
                return False
            session.wait_for_record(view.next_offset, left_s)

    @property
    def failure(self) -> KmqError | None:
        """Why the session has ended; None if it has not."""
        session = self._session
        return None if session is None else session.failure

    # Internal.

    def _joined(self) -> Session:
        if self._session is None:
            message = f"group {self.group!r} is not joined: got a call before join or after close; call join first"
            raise UsageError(message)
        self._session.check_process()
        return self._session

    def _write(self, kind: RecordType, **fields: Any) -> None:
        """Write a record and wait until it is read back; raise a `UsageError` if it changed nothing."""
        applied = self._joined().ask(kind, _ANSWER_S, **fields)
        if applied.ignored:
            message = f"{kind.name} changed nothing in group {self.group!r}: {applied.ignored[0]}; {_ADVICE[kind]}"
            raise UsageError(message)

    def _begin(self, until_s: float) -> Session:
        """Read the state of the group, and start the threads."""
        if self._session is not None or self._stopping.is_set():
            message = f"coordinator of group {self.group!r} was used before: got a second join; make a new one"
            raise UsageError(message)
        admin = make_client(AdminClient, admin_config(self.bootstrap_servers, extra=self.extra))
        retention_ms = check_coordination_topic(admin, self._topic, self.bootstrap_servers, self._timeout_s)
        heartbeat_ms = int(self._join_fields["heartbeat_ms"])
        channel = self._channel = Channel(
            self._topic,
            self.group,
            self.bootstrap_servers,
            new_client_id("coordination"),
            delivery_timeout_ms=max(1_000, 2 * heartbeat_ms),
            extra=self.extra,
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
            duties=Duties(self._assign, snapshot_every_ms(retention_ms)),
        )
        if self._on_change is not None:
            session.on_effects = self._changes.put
            self._start_helper("callbacks", self._call_back)
        self._thread = threading.Thread(
            target=self._run, args=(session, self._stopping), name=f"kmq-coordination-{self.group}", daemon=True
        )
        self._thread.start()
        return session

    def _join(self, session: Session, until_s: float) -> None:
        while True:
            applied = session.join(max(1.0, until_s - time.monotonic()))
            if not applied.ignored:
                break
            if applied.ignored[0] is not Ignored.CLIENT_ID_IN_USE or time.monotonic() > until_s:
                reason = applied.ignored[0]
                message = (
                    f"cannot join group {self.group!r} as {self.client_id!r}: {reason}; use one client id for each "
                    "process, or fast_reclaim=True if the other one no longer runs"
                )
                raise UsageError(message)
            with session.changed:
                session.changed.wait_for(
                    lambda: self.client_id not in session.world.members or session.failure is not None,
                    min(session.heartbeat_ms / 1000, max(0.0, until_s - time.monotonic())),
                )
        if session.heartbeat_ms != self._join_fields["heartbeat_ms"]:
            logger.warning(
                "group %s has T=%g s; this member was given %g s and uses that of the group",
                self.group, session.heartbeat_ms / 1000, self._join_fields["heartbeat_ms"] / 1000,
                extra={"action": "interval_adopted"},
            )  # fmt: skip

    def _run(self, session: Session, stopping: threading.Event) -> None:
        """Heartbeat and read until stopped; in a thread."""
        try:
            while not stopping.is_set() and session.failure is None:
                session.turn()
        except KmqError as error:
            session.fail(error)
        except Exception as error:
            logger.exception("coordination of group %s ended", self.group, extra={"action": "coordination_ended"})
            session.fail(KmqError(f"coordination of group {self.group!r} ended: {error!r}; see the log"))

    def _start_helper(self, name: str, target: Callable[..., None], *arguments: object) -> None:
        """Start a thread for functions of the user."""
        name = f"kmq-coordination-{name}-{self.group}"
        helper = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        self._helpers.append(helper)
        helper.start()

    def _lead(self, session: Session) -> None:
        """Assign tasks whenever this member leads, until stopped; in a thread."""
        while not self._stopping.is_set() and session.failure is None:
            session.assign_tasks()

    def _call_back(self) -> None:
        """Call `on_change` with what has arrived, until closed; in a thread."""
        assert self._on_change is not None
        while (effects := self._changes.get()) is not None:
            try:
                self._on_change(effects)
            except Exception:
                logger.exception("a callback of the coordinator failed", extra={"action": "callback_failed"})


_ADVICE = {
    RecordType.ADD_TASK: "remove tasks, or use another group",
    RecordType.REMOVE_TASK: "see `view` for the tasks",
    RecordType.DRAIN: "see `view` for the members",
    RecordType.PAUSE_GROUP: "see docs/coordination.md",
    RecordType.RESUME_GROUP: "the pause is over",
    RecordType.SET_POSITION: "pause the group, and wait until nothing is held",
}
