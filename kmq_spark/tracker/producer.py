"""
The transactional producer of one tracker, and the next one where it is over.

Rule 1: a transaction that was certainly not committed is sent again by a new producer; its start aborts the old one.
Rule 2: where the outcome is unknown the failure is raised: whoever decides reads the log to its end first.
Rule 3: a newer tracker keeps the queue: no producer is made once it has signed the group's offsets.

Source: KIP-98, KIP-588 for why a time-out looks like fencing.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from kmq_spark.errors import FencedError, KafkaClientError
from kmq_spark.kafka.transaction import TransactionalProducer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from confluent_kafka import TopicPartition

    from kmq_spark.errors import KmqError
    from kmq_spark.kafka.positions import TrackerPositions

logger = logging.getLogger(__name__)

NEW_PRODUCERS = 3
"""How many new producers one transaction may take: each needs a broker that answers."""

CLAIM_WAIT_S = 2.0
"""How long a tracker that was shut out waits for its successor to sign the group's offsets."""


class TrackerProducer:
    """
    Runs the transactions of one tracker.

    Args:
        config: librdkafka settings, `transactional.id` among them.
        timeout_ms: Bound on each call to the broker.
        positions: Reads the positions of the tracker's group.
        tracker_id: Who signs them.
        queue: For messages.
    """

    def __init__(
        self,
        config: Mapping[str, str | int | float | bool],
        timeout_ms: int,
        positions: TrackerPositions,
        tracker_id: str,
        queue: str,
    ) -> None:
        """Keep what is needed; `take` connects."""
        self._config = config
        self._timeout_ms = timeout_ms
        self._positions = positions
        self._tracker_id = tracker_id
        self._queue = queue
        self._producer: TransactionalProducer | None = None
        self._older_ids = {""}

    @property
    def is_open(self) -> bool:
        """Whether `take` was called, and `close` was not."""
        return self._producer is not None

    @property
    def current(self) -> TransactionalProducer:
        """The producer of the open transaction; the work of `run` sends through it."""
        if self._producer is None:
            raise KafkaClientError("the tracker's sender is closed: got a batch; call open() first")
        return self._producer

    @property
    def known_ids(self) -> frozenset[str]:
        """Ids of the trackers that had the queue up to this one, its own included."""
        return frozenset({*self._older_ids, self._tracker_id})

    def note_older(self, tracker_ids: Collection[str]) -> None:
        """Take note of the trackers that had the queue before."""
        self._older_ids |= set(tracker_ids)

    def take(self, known_ids: Collection[str]) -> None:
        """
        Make a producer, which fences older ones and aborts what they left open.

        Args:
            known_ids: Trackers that had the queue before; whoever else has signed is newer. Empty: take over from all.

        Raises:
            FencedError: A newer tracker has signed.
            KafkaClientError: The broker cannot be reached in time.
        """
        if self._producer is not None:
            self._producer.close()
        newer = self._newer_than(known_ids) if known_ids else frozenset()
        if newer:
            raise self._fenced_by(newer)
        self._producer = TransactionalProducer(self._config, self._timeout_ms)

    def close(self) -> None:
        """Give up what is open."""
        if self._producer is not None:
            self._producer.close()
            self._producer = None

    def run(
        self, work: Callable[[], None], positions: list[TopicPartition], group: object, progress: Callable[[], int]
    ) -> None:
        """
        Run one transaction, with a new producer where the old one is over and has certainly not committed it.

        A batch that fails instead costs a restart of the query, which takes seconds and reads the log again. Only an
        unknown outcome needs that.
        """
        for left in reversed(range(NEW_PRODUCERS + 1)):
            producer = self.current
            failure: KmqError
            try:
                producer.run(work, positions, group, progress)
            except FencedError as error:
                failure = self._by_whom(error)
                if isinstance(failure, FencedError) or producer.may_be_committed or not left:
                    raise failure from error
            except KafkaClientError as error:
                if not error.retriable or not producer.is_over or producer.may_be_committed or not left:
                    raise
                failure = error
            else:
                return
            logger.warning(
                "the transactional producer of %s is replaced, and its transaction sent again: %s",
                self._tracker_id, failure, extra={"action": "producer_replaced", "queue": self._queue},
            )  # fmt: skip
            self.take(self.known_ids)

    def _by_whom(self, error: FencedError) -> KmqError:
        """
        Tell a newer tracker from a transaction that the broker gave up.

        After `transaction.timeout.ms` of silence (a suspended process) the broker bumps the epoch itself, and the
        producer sees the same error. Whoever takes over signs the group's offsets first thing: the signature decides.
        """
        deadline_s = time.monotonic() + CLAIM_WAIT_S
        while time.monotonic() < deadline_s:
            newer = self._newer_than(self.known_ids)
            if newer:
                return self._fenced_by(newer)
            time.sleep(0.2)
        message = f"the broker gave up a transaction of {self._tracker_id}: {error}; opening a new one"
        return KafkaClientError(message, code="INVALID_PRODUCER_EPOCH", retriable=True)

    def _newer_than(self, known_ids: Collection[str]) -> frozenset[str]:
        return frozenset({at.tracker_id for at in self._positions.committed().values()}).difference(known_ids)

    def _fenced_by(self, newer: Collection[str]) -> FencedError:
        message = (
            f"tracker {self._tracker_id} of {self._queue} was fenced: "
            f"{', '.join(sorted(newer))} has taken over; stop this one"
        )
        return FencedError(message)
