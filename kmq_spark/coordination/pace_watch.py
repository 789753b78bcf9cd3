"""
Release the partitions of a member that is stuck, or slower than the senders, so that another member takes them.

Rule: it runs in a thread of its own: a member that is stuck asks for no batch.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from confluent_kafka.admin import AdminClient

from kmq_spark.core.coordination.pace import Pace
from kmq_spark.errors import KmqError
from kmq_spark.kafka.lookups import EARLIEST, LATEST, offsets_of
from kmq_spark.kafka.settings import admin_config, make_client
from kmq_spark.rate_limit import RateLimit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kmq_spark.coordination.claim import Claim

logger = logging.getLogger(__name__)

LOOKS = 10
"""Looks within the time limit."""

_TIMEOUT_S = 15.0
_WARN_INTERVAL_S = 60.0


class PaceWatch:
    """
    Look at the partitions of one consumption from time to time.

    Args:
        topic: That is consumed.
        limit_s: How long a partition's holder may be behind, seconds.
        enough: Lag that counts as none, messages.
        held: Returns the claim of each partition that this member holds.
        is_working: Returns whether a message of a partition was handed out and is not processed.
        stuck_s: Returns for how long the application has had the batch under way, seconds; 0 where it has none.
        bootstrap_servers: Comma-separated `host:port`.
        extra: librdkafka settings.
    """

    def __init__(
        self,
        topic: str,
        limit_s: float,
        enough: int,
        *,
        held: Callable[[], Mapping[int, Claim]],
        is_working: Callable[[int], bool],
        stuck_s: Callable[[], float],
        bootstrap_servers: str,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        """Start the thread."""
        self._topic, self._limit_s, self._enough = topic, limit_s, enough
        self._held, self._is_working, self._stuck_s = held, is_working, stuck_s
        self._admin = make_client(AdminClient, admin_config(bootstrap_servers, extra=extra))
        self._paces: dict[tuple[int, int], Pace] = {}
        self._released_s: dict[int, float] = {}
        self._warning_limit = RateLimit(_WARN_INTERVAL_S)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"kmq-pace-{topic}", daemon=True)
        self._thread.start()

    def leaves_to_others(self, partition: int) -> bool:
        """Return whether this member released the partition a moment ago: others have `limit_s` to claim it."""
        return time.monotonic() - self._released_s.get(partition, float("-inf")) < self._limit_s

    def close(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._thread.join(_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stopping.wait(self._limit_s / LOOKS):
            try:
                self._look()
            except KmqError as error:
                # Without the topic's end there is nothing to judge.
                if self._warning_limit.allows():
                    logger.warning("cannot see whether %s is consumed fast enough: %s", self._topic, error)

    def _look(self) -> None:
        held = {partition: claim for partition, claim in self._held().items() if claim.is_held}
        ends = offsets_of(self._admin, self._topic, held, LATEST, _TIMEOUT_S)
        new = [partition for partition, claim in held.items() if claim.position is None]
        firsts = offsets_of(self._admin, self._topic, new, EARLIEST, _TIMEOUT_S)
        now_s = time.monotonic()
        paces = {
            (partition, claim.epoch): self._paces.get((partition, claim.epoch))
            or Pace(self._limit_s, self._enough, now_s)
            for partition, claim in held.items()
        }
        self._paces = paces
        is_stuck = self._stuck_s() >= self._limit_s
        for partition, claim in held.items():
            position = firsts[partition] if claim.position is None else claim.position
            is_behind = paces[partition, claim.epoch].is_behind(
                now_s, position, ends[partition], is_working=self._is_working(partition)
            )
            if is_behind or (is_stuck and position < ends[partition]):
                self._release(partition, claim, ends[partition] - position)

    def _release(self, partition: int, claim: Claim, lag: int) -> None:
        logger.warning(
            "releasing partition %d of %s: this member has been behind for %g s, %d messages wait",
            partition, self._topic, self._limit_s, lag,
            extra={"action": "claim_released_behind", "resource": claim.resource, "epoch": claim.epoch},
        )  # fmt: skip
        self._released_s[partition] = time.monotonic()
        claim.release()
