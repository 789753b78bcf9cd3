"""
The transactional producer of one tracker, and its replacement after a fatal error.

Rule 1: A transaction that was certainly not committed is sent again by a new producer. `init_transactions` of the new
producer aborts the old transaction.
Rule 2: If the outcome is unknown, the error is raised. The tracker must read the log to its end before it decides
again.
Rule 3: Offsets that stay pending after an abort are discarded; otherwise no tracker could ever start again.
Rule 4: A newer tracker keeps the queue. Once it has signed the group's offsets, the older one creates no producer.

Source: KIP-98; KIP-588 for why a transaction timeout looks like fencing; KIP-890 for how offsets stay pending.
"""

from __future__ import annotations

import contextlib
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

MAX_REPLACEMENTS = 3
"""Most replacement producers for one transaction. Each one needs a broker that answers."""

SIGNATURE_WAIT_S = 2.0
"""How long a fenced producer waits for a newer tracker to sign the group's offsets."""


class _DiscardedError(Exception):
    """Aborts a transaction on purpose."""


def _discard() -> None:
    raise _DiscardedError


class TrackerProducer:
    """
    Runs the transactions of one tracker.

    Args:
        config: librdkafka settings of the producer, including `transactional.id`.
        timeout: Bound on each call to the broker, seconds.
        positions: Reads the committed offsets of the tracker's consumer group.
        tracker_id: The id with which this tracker signs these offsets.
        queue: Name for log lines and errors.
    """

    def __init__(
        self,
        config: Mapping[str, str | int | float | bool],
        timeout: float,
        positions: TrackerPositions,
        tracker_id: str,
        queue: str,
    ) -> None:
        """Store the settings; `open` connects."""
        self._config = config
        self._timeout = timeout
        self._positions = positions
        self._tracker_id = tracker_id
        self._queue = queue
        self._producer: TransactionalProducer | None = None
        self._older_ids = {""}

    @property
    def is_open(self) -> bool:
        """Whether there is a producer: `open` was called, and `close` was not called after it."""
        return self._producer is not None

    @property
    def current(self) -> TransactionalProducer:
        """The current producer; the *work* of `run` sends with it. Raises KafkaClientError if there is none."""
        if self._producer is None:
            raise KafkaClientError("the tracker's sender is closed: got a batch; call open() first")
        return self._producer

    @property
    def known_ids(self) -> frozenset[str]:
        """Ids of the trackers of this queue up to and including this one."""
        return frozenset({*self._older_ids, self._tracker_id})

    def note_older(self, tracker_ids: Collection[str]) -> None:
        """Add the ids of trackers that had the queue before this one."""
        self._older_ids |= set(tracker_ids)

    def open(self, known_ids: Collection[str]) -> None:
        """
        Create a producer, which fences older ones and aborts their open transactions.

        Args:
            known_ids: Trackers that had the queue before. A tracker with another id that has signed the offsets is
                newer. Empty: take over from every tracker.

        Raises:
            FencedError: A newer tracker has signed.
            KafkaClientError: The broker cannot be reached in time.
        """
        if self._producer is not None:
            self._producer.close()
        newer = self._newer_tracker_ids(known_ids) if known_ids else frozenset()
        if newer:
            raise self._fenced_by(newer)
        self._producer = TransactionalProducer(self._config, self._timeout)

    def close(self) -> None:
        """Close the producer. An open transaction is never committed."""
        if self._producer is not None:
            self._producer.close()
            self._producer = None

    def run(
        self, work: Callable[[], None], positions: list[TopicPartition], group: object, progress: Callable[[], int]
    ) -> None:
        """
        Run one transaction. Replace a producer that can write no more if it has certainly not committed it.

        Otherwise the batch would fail, and the query would restart and read the log again, which takes seconds. Only an
        unknown outcome needs that.

        Args:
            work: Sends the records; called again after an abort.
            positions: Offsets to commit with the transaction; may be empty.
            group: Group metadata, from `Consumer.consumer_group_metadata`; None without offsets.
            progress: A number that grows when an aborted attempt has changed what *work* sends next.

        Raises:
            FencedError: A newer tracker has taken over.
            KafkaClientError: The transaction failed, or its outcome is unknown.
        """
        for left in reversed(range(MAX_REPLACEMENTS + 1)):
            producer = self.current
            failure: KmqError
            try:
                producer.run(work, positions, group, progress)
            except FencedError as error:
                failure = self._fencing_error(error)
                if isinstance(failure, FencedError) or producer.is_possibly_committed or not left:
                    raise failure from error
            except KafkaClientError as error:
                if not error.retriable or not producer.has_ended or producer.is_possibly_committed or not left:
                    raise
                failure = error
            else:
                return
            logger.warning(
                "replacing the transactional producer of %s and sending its transaction again: %s",
                self._tracker_id, failure, extra={"action": "producer_replaced", "queue": self._queue},
            )  # fmt: skip
            self.open(self.known_ids)

    def discard_pending_offsets(self, places: list[TopicPartition], group: object) -> None:
        """
        Discard offsets that the broker keeps as pending: add offsets to a transaction and abort it.

        The broker then also discards the pending offsets of earlier transactions of this transactional id.

        Args:
            places: Any offsets of the group; they are never committed.
            group: As for `run`.

        Raises:
            FencedError: A newer tracker has taken over.
            KafkaClientError: The broker cannot be reached in time.
        """
        logger.warning(
            "cannot read the committed offsets of the tracker of %s: possibly the broker keeps offsets of an aborted "
            "transaction as pending; discarding these and reading again",
            self._queue, extra={"action": "pending_offsets", "queue": self._queue},
        )  # fmt: skip
        with contextlib.suppress(_DiscardedError):
            self.current.run(lambda: None, places, group, check=_discard)

    def _fencing_error(self, error: FencedError) -> KmqError:
        """
        Distinguish fencing by a newer tracker from a transaction that the broker aborted; return the error to raise.

        After `transaction.timeout.ms` without activity (a suspended process), the broker increases the producer epoch
        itself, and the producer gets the same error. A tracker that takes over first signs the group's offsets, so a
        new signature means fencing.
        """
        deadline_s = time.monotonic() + SIGNATURE_WAIT_S
        while time.monotonic() < deadline_s:
            newer = self._newer_tracker_ids(self.known_ids)
            if newer:
                return self._fenced_by(newer)
            time.sleep(0.2)
        message = f"the broker aborted a transaction of {self._tracker_id}: {error}; opening a new producer"
        return KafkaClientError(message, code="INVALID_PRODUCER_EPOCH", retriable=True)

    def _newer_tracker_ids(self, known_ids: Collection[str]) -> frozenset[str]:
        return frozenset({at.tracker_id for at in self._positions.committed().values()}).difference(known_ids)

    def _fenced_by(self, newer: Collection[str]) -> FencedError:
        message = (
            f"tracker {self._tracker_id} of {self._queue} was fenced: "
            f"newer tracker {', '.join(sorted(newer))} has taken over; this one ends"
        )
        return FencedError(message)
