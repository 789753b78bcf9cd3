"""
The topic `<queue>.producers`: the newest position record of each producer id.

Rule 1: a new life reads up to an own record; one that only looks, to the high watermark: else it would take an older
record for the newest.
Rule 2: compacted and never deleted by age: a position that is gone means that everything is sent again.
Rule 3: one partition; a record that cannot be read fails the reader of its id and no other.

Source: Kafka Connect's topic of source offsets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from confluent_kafka.admin import AdminClient

from kmq_spark.errors import TopicError, WireError
from kmq_spark.kafka.log_reader import read_committed
from kmq_spark.kafka.lookups import settings_of
from kmq_spark.kafka.records import OutgoingRecord
from kmq_spark.kafka.settings import admin_config, make_client, new_client_id, reader_config
from kmq_spark.kafka.topic_rules import alter_command
from kmq_spark.kafka.topics import partition_count
from kmq_spark.wire.position import decode_state, encode_state

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kmq_spark.core.producing import ProducerState
    from kmq_spark.kafka.queue_topics import QueueTopics

PARTITION = 0


class Found(NamedTuple):
    """The newest record of one producer id; *problem* says why it cannot be read."""

    key: str
    state: ProducerState | None
    problem: str = ""


class PositionLog:
    """Reads the position records of one queue. Nothing is asked before the first call."""

    def __init__(
        self, topics: QueueTopics, bootstrap_servers: str, timeout: float, extra: Mapping[str, str] | None = None
    ) -> None:
        self.topic = topics.producers_topic
        self.queue_topic = topics.queue_topic
        self._bootstrap_servers = bootstrap_servers
        self._timeout = timeout
        self._config = reader_config(
            bootstrap_servers, f"{topics.consumer_group}.producers", new_client_id("positions"), extra
        )
        self._admin = make_client(AdminClient, admin_config(bootstrap_servers, extra=extra))

    def ensure(self) -> None:
        """Raise TopicError if the queue or the topic does not exist, or the topic deletes records."""
        self.queue_partition_count()
        if not self._exists():
            # A broker with an authorizer hides a topic from a user without the right to describe it.
            message = (
                f"topic {self.topic!r} does not exist, or is hidden from this user; run `kmq queue create "
                f"{self.queue_topic}`, or grant the access that `kmq acls {self.queue_topic}` lists"
            )
            raise TopicError(message)
        found = settings_of(self._admin, [self.topic], self._timeout, skip_errors=True).get(self.topic, {})
        if (policy := found.get("cleanup.policy", "compact")) != "compact":
            message = (
                f"topic {self.topic!r} would lose positions: got cleanup.policy={policy}, must be compact; run "
                f"`{alter_command(self.topic, 'cleanup.policy', 'compact')}`"
            )
            raise TopicError(message)

    def queue_partition_count(self) -> int:
        """Return the number of partitions of the queue topic. Raises TopicError if the queue does not exist."""
        if count := partition_count(self._admin, self.queue_topic, self._bootstrap_servers, self._timeout):
            return count
        message = f"queue {self.queue_topic!r} has no topic; run `kmq queue create {self.queue_topic}`"
        raise TopicError(message)

    def newest(self, key: str, ends: Mapping[int, int] | None = None) -> ProducerState | None:
        """Return the newest committed state of a producer id, below *ends* or by now; None if it has none."""
        value, offset = self._read(key, ends=ends).get(key, (None, -1))
        return None if value is None else decode_state(value, topic=self.topic, partition=PARTITION, offset=offset)

    def all(self, patience: float | None = None) -> list[Found]:
        """Return the newest record of every producer id that was not forgotten, by id; none if there is no topic."""
        if not self._exists():
            return []
        found = []
        for key, (value, offset) in sorted(self._read(None, patience).items()):
            if value is None:
                continue
            try:
                state = decode_state(value, topic=self.topic, partition=PARTITION, offset=offset)
            except WireError as error:
                found.append(Found(key, None, str(error)))
            else:
                found.append(Found(key, state))
        return found

    def _exists(self) -> bool:
        return partition_count(self._admin, self.topic, self._bootstrap_servers, self._timeout) > 0

    def record_of(self, key: str, state: ProducerState | None) -> OutgoingRecord:
        """Return the record that makes a state the newest one; None forgets the id."""
        value = None if state is None else encode_state(state)
        return OutgoingRecord(self.topic, PARTITION, key.encode(), value, [])

    def _read(
        self, wanted: str | None, patience: float | None = None, ends: Mapping[int, int] | None = None
    ) -> dict[str, tuple[bytes | None, int]]:
        """Return the newest value and its offset by key, of one key or of all."""
        newest: dict[str, tuple[bytes | None, int]] = {}
        key_wanted = None if wanted is None else wanted.encode()
        for record in read_committed(
            self._config, self.topic, [PARTITION], self._timeout, ends=ends, patience_s=patience
        ):
            key: Any = record.key()
            if key is not None and key_wanted in {None, key}:
                value: Any = record.value()
                newest[key.decode("utf-8", "replace")] = (value, record.offset() or 0)
        return newest
