"""
The queue topic's client: fetch records, keep what nobody has room for yet, seek back, commit, serve the group.

Rule 1: one thread at a time; rebalance callbacks run inside its calls.
Rule 2: what is fetched and not started waits in the stash, in its order, and no position runs past it.
Rule 3: the position behind records that were passed over is committed with the next one, or after a while.
Rule 4: librdkafka keeps its pause flag of a partition over revoke and assign: what is assigned is resumed.
Rule 5: an exception may drop records at any step; `fetch_again` needs no memory of them, it seeks to what was taken.

Source: KIP-429 for what a rebalance takes away and what it leaves.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka import Message as KafkaMessage

from kmq_spark.consumer.callbacks import Callbacks
from kmq_spark.failpoints import failpoint
from kmq_spark.kafka.settings import client_error, make_client

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from kmq_spark.consumer.missing_offsets import MissingOffsets
    from kmq_spark.errors import KmqError

logger = logging.getLogger(__name__)

COMMIT_PASSED_S = 1.0
"""How long the position behind passed-over records may stay uncommitted: they are read again after a crash, no more."""

CONFIRM_S = 1.0
"""How long the first hand-over of a process waits for its position to be committed; a rebalance may hold it up."""

CONFIRM_POLL_S = 0.01

SERVE_S = 1.0
"""How often the group is served while all that is wanted lies in the stash."""

COMMIT_LOG_S = 10.0
"""Shortest time between two warnings about failed offset commits: in a rebalance every batch may have one."""

COMMITTED_TIMEOUT_S = 10.0
"""How long the broker may take to return the committed offsets of this group."""

_PASSING = frozenset({"_PARTITION_EOF", "_MAX_POLL_EXCEEDED", "_TRANSPORT", "_ALL_BROKERS_DOWN", "_TIMED_OUT"})
"""Errors in the place of a message that need no answer: librdkafka goes on, or joins the group again, by itself."""


_ERROR = KafkaMessage.error


class Fetcher:
    """
    The client that reads a queue topic in a group.

    Args:
        config: librdkafka settings of the consumer.
        topic: Queue topic.
        started_positions: Called with the partitions that go to another consumer; returns the positions behind what
            was started meanwhile.
        missing_offsets: Looks whether assigned partitions have committed offsets; None for no look.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        topic: str,
        started_positions: Callable[[set[int]], Mapping[int, int]],
        missing_offsets: MissingOffsets | None = None,
    ) -> None:
        """Join the group; partitions come with the first `fetch`."""
        self._topic = topic
        self._started_positions = started_positions
        self._missing_offsets = missing_offsets
        self._unchecked: set[int] = set()
        self.owned: set[int] = set()
        self._positions: dict[int, int] = {}
        self._uncommitted: dict[int, int] = {}
        self._has_confirmed = False
        self._failed_commits = 0
        self._commit_logged_at = float("-inf")
        self._committed_at = time.monotonic()
        self._served_at = time.monotonic()
        self._stash: list[KafkaMessage] = []
        self._error: KmqError | None = None
        self._paused: set[int] = set()
        self._callbacks = Callbacks()
        caught = self._callbacks.caught
        callbacks = {"error_cb": caught(self._on_error), "on_commit": caught(self._on_commit)}
        self.client = make_client(Consumer, {**config, **callbacks})
        assigned, revoked, lost = map(caught, (self._on_assign, self._on_revoke, self._on_lost))
        self.client.subscribe([topic], on_assign=assigned, on_revoke=revoked, on_lost=lost)

    def fetch(self, max_records: int, timeout: float, *, at_least: int = 1) -> list[KafkaMessage]:
        """
        Fetch records, as many as are there, waiting for the first alone.

        Args:
            max_records: Most records to return, at least 1.
            timeout: Seconds to wait for the first.
            at_least: How many to look for, without waiting, where the stash has fewer.

        Returns:
            At most *max_records*; where the stash has *at_least* as many, nothing is added to these.

        Raises:
            KmqError: The client reported an error that does not pass by itself.
        """
        self._raise_error()
        if self._uncommitted:
            self._commit_if_due()
        wanted = at_least - len(self._stash) if self._stash else max_records
        if wanted > 0:
            records = self._consume(wanted, 0.0 if self._stash else timeout)
            if self._stash:
                records, self._stash = self._stash + records, []
        else:
            self.serve()
            records, self._stash = self._stash[:max_records], self._stash[max_records:]
        if records and self._unchecked:
            self._check_offsets()
        return records

    def end_of(self, topic: str, timeout: float) -> int:
        """
        Return the end offset of partition 0 of any topic. Any thread may call it, but not after `close`.

        Raises:
            KmqError: The topic does not exist, may not be read, or the broker does not answer within *timeout* seconds.
        """
        try:
            _, end = self.client.get_watermark_offsets(TopicPartition(topic, 0), timeout=timeout)
        except KafkaException as error:
            raise client_error(error, f"cannot look for the end of {topic}") from error
        return end

    def put_back(self, records: Sequence[KafkaMessage]) -> None:
        """Let records wait that were fetched and not started."""
        self._stash = [*records, *self._stash]

    def commit(self, positions: Mapping[int, int], *, at_once: bool) -> None:
        """
        Commit positions of partitions that are still ours; the answer is not waited for.

        Args:
            positions: By partition, behind what was started or passed over.
            at_once: False where a repeat of what lies before would cost next to nothing.
        """
        owned = {partition: offset for partition, offset in positions.items() if partition in self.owned}
        self._positions.update(owned)
        self._uncommitted.update(owned)
        if at_once:
            self._send_commit()
            if owned and not self._has_confirmed:
                self._wait_for_confirmation()
        else:
            self._commit_if_due()

    def committed(self, positions: Mapping[int, int]) -> None:
        """Take note of positions that were committed by others, in the transaction of their STARTs."""
        self._positions.update({partition: at for partition, at in positions.items() if partition in self.owned})

    def is_behind(self, partition: int, offset: int) -> bool:
        """Return whether the position to be committed of a partition of ours covers all before an offset."""
        return self._positions.get(partition, -1) >= offset

    def idle(self, timeout: float) -> None:
        """
        Serve the group without fetching: rebalances go on while there is no room for messages.

        Args:
            timeout: Seconds to stay here.
        """
        running = self.owned - self._paused
        if running:
            self._paused |= running
            self.client.pause(self._places(running))
        if self._uncommitted:
            self._commit_if_due()
        self._served_at = time.monotonic()
        record = self.client.poll(timeout)
        if record is not None:
            self._stash += self._good([record])
        self._callbacks.raise_caught()

    def serve(self) -> None:
        """Serve the group without fetching, where that was not done for a second."""
        if time.monotonic() - self._served_at > SERVE_S:
            self.idle(0)

    def fetch_again(self, taken: Mapping[int, int], first: Mapping[int, int]) -> None:
        """
        Have every record fetched again that was fetched and not taken, wherever it is now.

        Args:
            taken: By partition, the position behind what is being started; where it has none, the position to be
                committed counts, or else *first*, or else the position that the group has.
            first: By partition, the first record that was being started and is to be fetched again.

        Raises:
            KmqError: It is not possible now; call it again before anything else is fetched.
        """
        self._stash = []
        assigned = {each.partition for each in self._call(self.client.assignment)}
        self._forget(self.owned - assigned)
        self.owned |= assigned
        places = self._call(self.client.position, self._places(assigned))
        given_out = {each.partition for each in places if each.offset >= 0}  # at least one record of it
        behind = {**first, **self._positions, **taken}
        behind.update(self._committed(given_out - behind.keys()))
        for partition in assigned & behind.keys():
            self._seek(TopicPartition(self._topic, partition, behind[partition]))

    def close(self, timeout: float) -> None:
        """
        Commit and leave the group, in a thread of its own, which goes on where it takes longer.

        A group of the classic protocol lets nobody commit or leave while a rebalance waits for another member; if that
        one is polled by the thread that is here, it waits for us.

        Args:
            timeout: Seconds.

        Raises:
            KmqError: The client reported an error.
        """
        failures: list[BaseException] = []

        def leave() -> None:
            try:
                # Runs `_on_revoke`.
                self.client.close()
            except BaseException as error:  # noqa: BLE001  # raised again by the thread that closes
                failures.append(error)

        thread = threading.Thread(target=leave, name=f"kmq-leave-{self._topic}", daemon=True)
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
                raise client_error(failure, f"cannot leave the group of {self._topic}") from failure
            raise failure

    def _check_offsets(self) -> None:
        """Look for the committed offsets of new partitions before anything of them is handed out and committed."""
        partitions, self._unchecked = self._unchecked, set()
        if self._missing_offsets is not None:
            self._missing_offsets.look(self.client, partitions)

    def _consume(self, max_records: int, timeout: float) -> list[KafkaMessage]:
        if self._paused:
            self.client.resume(self._places(self._paused))
            self._paused.clear()
        waiting_count = len(self._stash)
        try:
            records = self.client.consume(max_records, 0)
            if not records and timeout > 0:
                # A full batch would be waited for to the end of the time-out; the first record ends the wait here.
                records = self.client.consume(1, timeout)
                if records and max_records > 1:
                    # In the stash while more are read: a rebalance in there may take their partition away.
                    self._stash += self._good(records)
                    records = self.client.consume(max_records - 1, 0)
        except KafkaException as error:
            raise client_error(error, f"cannot receive from {self._topic}") from error
        self._served_at = time.monotonic()
        good = self._good(records)
        self._callbacks.raise_caught()
        if good or len(self._stash) > waiting_count:
            failpoint("consumer.fetched")
        elif not self._stash:
            self._raise_error()
        return good

    def _good(self, records: list[KafkaMessage]) -> list[KafkaMessage]:
        """Return the records that are no errors, and keep an error that does not pass by itself for the next fetch."""
        if not any(map(_ERROR, records)):
            return records
        for record in records:
            error = record.error()
            if error is not None and error.name() not in _PASSING:
                self._error = client_error(error, f"cannot receive from {self._topic}")
        return [record for record in records if record.error() is None]

    def _commit_if_due(self) -> None:
        if time.monotonic() - self._committed_at > COMMIT_PASSED_S:
            self._send_commit()

    def _send_commit(self) -> None:
        if not self._uncommitted:
            return
        positions, self._uncommitted = self._uncommitted, {}
        self._committed_at = time.monotonic()
        try:
            self.client.commit(offsets=self._offsets(positions), asynchronous=True)
            failpoint("consumer.commit-sent")
        except KafkaException as error:
            self._on_commit(error.args[0], self._offsets(positions))

    def _wait_for_confirmation(self) -> None:
        """
        Wait a little for the first commit of this process to be confirmed, before its messages are handed out.

        A message that kills its process at once would else be fetched by the next one as if nobody had ever had it,
        uncounted, again and again, and each time its lease ended one more copy of it would be sent.
        """
        until = time.monotonic() + CONFIRM_S
        while not self._has_confirmed and time.monotonic() < until:
            # The answer is served in here, and a record may come with it.
            record = self.client.poll(CONFIRM_POLL_S)
            if record is not None:
                self._stash += self._good([record])
            self._callbacks.raise_caught()
        self._has_confirmed = True

    def _seek(self, position: TopicPartition) -> None:
        try:
            self.client.seek(position)
        except KafkaException as error:
            if error.args[0].name() == "_STATE":
                return  # assigned just now: reading begins later, at the committed position
            # Going on from here would skip messages, and the next commit would lose them: only a new consumer,
            # which begins at the committed position, is right.
            raise client_error(error, f"cannot seek {self._topic} back; close this consumer, make a new one") from error

    def _committed(self, partitions: Collection[int]) -> dict[int, int]:
        """Return where the group begins to read partitions."""
        if not partitions:
            return {}
        found = self._call(self.client.committed, self._places(partitions), COMMITTED_TIMEOUT_S)
        return {each.partition: each.offset if each.offset >= 0 else OFFSET_BEGINNING for each in found}

    def _call(self, ask: Callable[..., list[TopicPartition]], *args: object) -> list[TopicPartition]:
        try:
            return ask(*args)
        except KafkaException as error:
            raise client_error(error, f"cannot look up positions of {self._topic}") from error

    def _places(self, partitions: Collection[int]) -> list[TopicPartition]:
        return [TopicPartition(self._topic, partition) for partition in partitions]

    def _offsets(self, positions: Mapping[int, int]) -> list[TopicPartition]:
        return [TopicPartition(self._topic, partition, offset) for partition, offset in positions.items()]

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self.owned.update(each.partition for each in partitions)
        self._unchecked.update(each.partition for each in partitions)
        if partitions:
            # Paused when they went away: librdkafka would leave them so.
            consumer.resume(partitions)
        self._log_rebalance("got", partitions)

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Commit what was handed out, or is about to be, before the next owner looks for the position."""
        gone = {each.partition for each in partitions}
        self._positions.update(self._started_positions(gone))
        positions = {partition: offset for partition, offset in self._positions.items() if partition in gone}
        if positions:
            try:
                consumer.commit(offsets=self._offsets(positions), asynchronous=False)
            except KafkaException as error:
                self._log_commit(error.args[0])
            failpoint("consumer.revoked")
        self._forget(gone)
        self._log_rebalance("gave up", partitions)

    def _on_lost(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Commit nothing: the partitions have another owner already."""
        self._forget({each.partition for each in partitions})
        self._log_rebalance("lost", partitions)

    def _forget(self, partitions: set[int]) -> None:
        self.owned -= partitions
        self._paused -= partitions
        self._unchecked -= partitions
        self._stash = [record for record in self._stash if record.partition() not in partitions]
        for partition in partitions:
            self._positions.pop(partition, None)
            self._uncommitted.pop(partition, None)

    def _log_rebalance(self, what: str, partitions: list[TopicPartition]) -> None:
        if not partitions:
            return
        numbers = sorted(each.partition for each in partitions)
        logger.info("%s partitions %s of %s", what, numbers, self._topic, extra={"action": "rebalanced"})

    def _on_commit(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        failed = [each for each in partitions if error is not None or each.error is not None]
        for each in failed:
            if each.partition in self._positions:
                self._uncommitted.setdefault(each.partition, self._positions[each.partition])
        reason = error or next((each.error for each in failed), None)
        if reason is not None:
            self._log_commit(reason)
            return
        self._has_confirmed = True
        failpoint("consumer.commit-done")

    def _log_commit(self, error: KafkaError) -> None:
        self._failed_commits += 1
        now = time.monotonic()
        if now - self._commit_logged_at < COMMIT_LOG_S:
            return
        logger.warning(
            "cannot commit positions of %s: %s; %d commits failed since the last warning, they are sent again",
            self._topic, error.str(), self._failed_commits, extra={"action": "commit_failed"},
        )  # fmt: skip
        self._commit_logged_at, self._failed_commits = now, 0

    def _on_error(self, error: KafkaError) -> None:
        if error.name() in {"_AUTHENTICATION", "_SSL", "_FATAL"}:
            self._error = client_error(error, f"cannot receive from {self._topic}")

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
