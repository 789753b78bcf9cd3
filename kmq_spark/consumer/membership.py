"""
The client of a consumer in its group: it joins, it is replaced if it has lost its group for good, and it leaves.

Rule 1: a client that has found no group coordinator for `LOST_S` is replaced, if a new client reaches the broker. By
then the group has given its partitions to other members.
Rule 2: no callback of a replaced client runs.
Rule 3: what may wait for a coordinator without end (`close`) runs in a thread of its own.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from confluent_kafka import Consumer, KafkaException, TopicPartition

from kmq_spark.consumer.callbacks import Callbacks
from kmq_spark.consumer.coordinator_contact import LOST_S, STATISTICS_MS, CoordinatorContact
from kmq_spark.kafka.client_errors import client_error
from kmq_spark.kafka.settings import make_client

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

PROBE_S = 3.0
"""Longest wait of a new client for an answer of the broker, before it takes the place of one without coordinator."""

LEAVE_POLL_S = 0.01


class Handlers(NamedTuple):
    """
    What the client calls. All run in the thread that uses the client.

    Attributes:
        on_assign: With the client and the partitions that it gets.
        on_revoke: With the client and the partitions that it gives back; offsets can still be committed.
        on_lost: With the client and the partitions that another member has already.
        on_commit: With the result of an offset commit.
        on_error: With an error of the client.
    """

    on_assign: Callable[..., None]
    on_revoke: Callable[..., None]
    on_lost: Callable[..., None]
    on_commit: Callable[..., None]
    on_error: Callable[..., None]


class Membership:
    """
    A client that has subscribed to a topic as a member of a group.

    Args:
        config: librdkafka settings of the consumer.
        topic: Topic.
        handlers: What the client calls.

    Attributes:
        client: The current client.
    """

    def __init__(self, config: Mapping[str, Any], topic: str, handlers: Handlers) -> None:
        """Create the client and subscribe."""
        self._config = {**config, "statistics.interval.ms": STATISTICS_MS}
        self._topic = topic
        self._handlers = handlers
        self._is_static = bool(config.get("group.instance.id"))
        callbacks = Callbacks()
        self._use(self._new_client(callbacks), callbacks)

    @property
    def is_lost(self) -> bool:
        """Whether the client has been without a coordinator for so long that `replace` is worth a try."""
        return self._contact.is_lost

    def raise_caught(self) -> None:
        """Raise the exception that a callback of the client has raised since the last call, if any."""
        self._callbacks.raise_caught()

    def replace(self) -> bool:
        """Replace the client if a new one reaches the broker; return whether it is replaced. Waits up to `PROBE_S`."""
        callbacks = Callbacks()
        client = self._new_client(callbacks)
        try:
            client.list_topics(self._topic, timeout=PROBE_S)
        except KafkaException:
            # The broker is away. The old client is as good as a new one.
            self._contact = CoordinatorContact()
            client.close()
            return False
        logger.warning(
            "replacing the Kafka client of %s: it has found no group coordinator for %g s, although the broker answers",
            self._topic, LOST_S, extra={"action": "client_replaced"},
        )  # fmt: skip
        self._callbacks.end()
        threading.Thread(
            target=_end_client, args=(self.client, self._is_static), name=f"kmq-replaced-{self._topic}", daemon=True
        ).start()
        self._use(client, callbacks)
        return True

    def leave(self, timeout: float, owned: Callable[[], set[int]]) -> None:
        """
        Commit and leave the consumer group, in a separate thread. After a timeout that thread continues.

        With the classic protocol, no member can commit or leave while a rebalance waits for another member. If the
        calling thread also polls that other member, the two wait for each other.

        Args:
            timeout: Seconds to wait for the thread.
            owned: Returns the partitions that are assigned.

        Raises:
            KmqError: The client reported an error.
        """
        failures: list[BaseException] = []

        def close() -> None:
            try:
                # Both calls run `on_revoke`.
                self._unsubscribe(timeout, owned)
                self.client.close()
            except BaseException as error:  # noqa: BLE001  # raised again by the calling thread
                failures.append(error)

        thread = threading.Thread(target=close, name=f"kmq-leave-{self._topic}", daemon=True)
        thread.start()
        thread.join(timeout)
        if thread.is_alive():
            logger.warning(
                "timed out after %g s leaving the consumer group of %s; leaving continues in the background, and until "
                "then offsets may be uncommitted and messages delivered again: poll the other consumers of this thread",
                timeout, self._topic, extra={"action": "leave_timed_out"},
            )  # fmt: skip
        self._callbacks.raise_caught()
        for failure in failures:
            if isinstance(failure, KafkaException):
                raise client_error(failure, f"cannot leave the consumer group of {self._topic}") from failure
            raise failure

    def _new_client(self, callbacks: Callbacks) -> Consumer:
        """Create a client that calls back through *callbacks*. It joins no group until `_use`."""
        wrap = callbacks.wrap
        ours = {
            "error_cb": wrap(self._handlers.on_error),
            "on_commit": wrap(self._handlers.on_commit),
            "stats_cb": wrap(self._on_statistics),
        }
        return make_client(Consumer, {**self._config, **ours})

    def _use(self, client: Consumer, callbacks: Callbacks) -> None:
        """Subscribe to the topic with a new client."""
        self.client, self._callbacks = client, callbacks
        self._contact = CoordinatorContact()
        handlers = self._handlers
        assigned, revoked, lost = map(callbacks.wrap, (handlers.on_assign, handlers.on_revoke, handlers.on_lost))
        client.subscribe([self._topic], on_assign=assigned, on_revoke=revoked, on_lost=lost)

    def _on_statistics(self, statistics: str) -> None:
        self._contact.observe(statistics)

    def _unsubscribe(self, timeout: float, owned: Callable[[], set[int]]) -> None:
        """
        Unsubscribe, and serve the events of the group until nothing is assigned.

        Without this, `close` of librdkafka 2.16 sometimes hangs the process if the consumer is joining its group. Seen:
        `rd_kafka_assign0` waits in the rebalance callback for a response that never comes, and holds Python's GIL.
        Probable cause: `rd_kafka_cgrp_op_serve` drops requests of a group that has ended.
        """
        # A static member must stay in its group until its session times out, so for it the danger remains.
        if not self._is_static:
            self.client.unsubscribe()
        until = time.monotonic() + timeout
        paused: set[int] = set()
        while True:
            if new := owned() - paused:
                # Drops the records that are fetched. Otherwise `poll` returns each of them before the next event.
                with contextlib.suppress(KafkaException):
                    self.client.pause([TopicPartition(self._topic, partition) for partition in new])
                paused |= new
            is_leaving = bool(owned()) and not self._is_static and time.monotonic() < until
            if self.client.poll(LEAVE_POLL_S if is_leaving else 0) is None and not is_leaving:
                return


def _end_client(client: Consumer, is_static: bool) -> None:  # noqa: FBT001  # arguments of a thread
    with contextlib.suppress(KafkaException, RuntimeError):
        if not is_static:
            client.unsubscribe()
        client.close()
