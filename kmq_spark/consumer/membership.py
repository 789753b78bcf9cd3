"""
The client of a consumer in its group: it joins, it is replaced if it has lost its group for good, and it leaves.

Rule 1: no callback raises inside a call of librdkafka, and none of a replaced client runs; see `Callbacks`.
Rule 2: what may wait for a coordinator without end (`close`) runs in a thread of its own.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, KafkaException, TopicPartition

from kmq_spark.kafka.client_errors import client_error
from kmq_spark.kafka.settings import make_client

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kmq_spark.consumer.fetcher import Fetcher

logger = logging.getLogger(__name__)

LOST_S = 30.0
"""Longest time without a coordinator. A client that can find it does so within `reconnect.backoff.max.ms` (10 s)."""

STATISTICS_MS = 5_000
"""Interval at which the client reports its state, `statistics.interval.ms`."""

PROBE_S = 3.0
"""Longest wait of a new client for an answer of the broker, before it takes the place of one without coordinator."""

LEAVE_POLL_S = 0.01

END_S = 5.0
"""Longest wait until a client that was replaced has given up its partitions."""

NO_COORDINATOR = f"it has found no group coordinator for {LOST_S:g} s, although the broker answers"


class Callbacks:
    """
    The callbacks of one client, wrapped so that none raises. `raise_caught` raises the last exception afterwards.

    If a callback raises inside `consume`, librdkafka drops a record that it has just taken from its internal queue, and
    leaving the group never completes after that. Ctrl+C can raise KeyboardInterrupt in any callback.
    """

    def __init__(self) -> None:
        self._raised: BaseException | None = None
        self._is_ended = False

    def wrap(self, callback: Callable[..., None]) -> Callable[..., None]:
        """Return a callback that never raises."""

        def call(*arguments: object) -> None:
            if self._is_ended:
                return
            try:
                callback(*arguments)
            except BaseException as error:  # noqa: BLE001  # raised again by `raise_caught`
                self._raised = error

        return call

    def end(self) -> None:
        """Ignore all further calls: another client has taken the place of this one."""
        self._is_ended = True

    def raise_caught(self) -> None:
        """Raise the exception that a callback has raised since the last call, if any."""
        error, self._raised = self._raised, None
        if error is not None:
            raise error


class CoordinatorContact:
    """
    Notice from a client's statistics that it has been without its group coordinator for `LOST_S`, by its own clock.

    librdkafka 2.16 removes a broker that is missing in the metadata. The metadata lists no broker at all if the only
    broker was suspended and has just resumed. The client then removes its only broker, and sometimes never connects
    again (`rd_kafka_broker_decommission`). A new client connects at once.
    """

    def __init__(self) -> None:
        self._away_since_us: int | None = None
        self.is_lost = False

    def observe(self, statistics: str) -> None:
        """Take time and state of the consumer group from the statistics, a JSON object (STATISTICS.md)."""
        report = json.loads(statistics)
        now_us: int = report["ts"]
        if report.get("cgrp", {}).get("state") == "up":
            self._away_since_us = None
        elif self._away_since_us is None:
            self._away_since_us = now_us
        self.is_lost = self._away_since_us is not None and now_us - self._away_since_us >= LOST_S * 1e6


class Membership:
    """A client that has subscribed to a topic as a member of a group: `client`, until `replace` makes another."""

    def __init__(self, config: Mapping[str, Any], topic: str, member: Fetcher) -> None:
        self._config = {**config, "statistics.interval.ms": STATISTICS_MS}
        self._topic = topic
        self._member = member
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

    def replace(self, why: str) -> bool:
        """
        Replace the client if a new one reaches the broker; return whether it is replaced. Waits up to `PROBE_S`.

        The group gives the partitions of the old one to other members.
        """
        callbacks = Callbacks()
        client = self._new_client(callbacks)
        try:
            client.list_topics(self._topic, timeout=PROBE_S)
        except KafkaException:
            # The broker is away. The old client is as good as a new one.
            self._contact = CoordinatorContact()
            client.close()
            return False
        logger.warning("replacing the Kafka client of %s: %s", self._topic, why, extra={"action": "client_replaced"})
        self._callbacks.end()
        threading.Thread(
            target=_end_client, args=(self.client, self._is_static), name=f"kmq-replaced-{self._topic}", daemon=True
        ).start()
        self._use(client, callbacks)
        return True

    def leave(self, timeout: float) -> None:
        """
        Commit and leave the consumer group, in a separate thread. After *timeout* seconds that thread continues.

        With the classic protocol, no member can commit or leave while a rebalance waits for another member. If the
        calling thread also polls that other member, the two wait for each other.
        """
        failures: list[BaseException] = []

        def close() -> None:
            try:
                # Both calls run `on_revoke`.
                self._unsubscribe(timeout)
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
            "error_cb": wrap(self._member.on_error),
            "on_commit": wrap(self._member.on_commit),
            "stats_cb": wrap(self._on_statistics),
        }
        return make_client(Consumer, {**self._config, **ours})

    def _use(self, client: Consumer, callbacks: Callbacks) -> None:
        self.client, self._callbacks = client, callbacks
        self._contact = CoordinatorContact()
        member = self._member
        assigned, revoked, lost = map(callbacks.wrap, (member.on_assign, member.on_revoke, member.on_lost))
        client.subscribe([self._topic], on_assign=assigned, on_revoke=revoked, on_lost=lost)

    def _on_statistics(self, statistics: str) -> None:
        self._contact.observe(statistics)

    def _unsubscribe(self, timeout: float) -> None:
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
            if new := self._member.owned - paused:
                # Drops the records that are fetched. Otherwise `poll` returns each of them before the next event.
                with contextlib.suppress(KafkaException):
                    self.client.pause([TopicPartition(self._topic, partition) for partition in new])
                paused |= new
            is_leaving = bool(self._member.owned) and not self._is_static and time.monotonic() < until
            if self.client.poll(LEAVE_POLL_S if is_leaving else 0) is None and not is_leaving:
                return


def _end_client(client: Consumer, is_static: bool) -> None:  # noqa: FBT001  # arguments of a thread
    until = time.monotonic() + END_S
    with contextlib.suppress(KafkaException, RuntimeError):
        if not is_static:
            client.unsubscribe()
        # An event of the group that `close` has to serve may hang the process, as in `_unsubscribe`.
        while (assigned := client.assignment()) and time.monotonic() < until:
            with contextlib.suppress(KafkaException):  # some are given up already
                client.pause(assigned)
            client.poll(LEAVE_POLL_S)
    with contextlib.suppress(KafkaException, RuntimeError):
        client.close()
