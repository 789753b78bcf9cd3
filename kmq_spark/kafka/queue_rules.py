"""
The rules of a queue: records of the compacted topic `kmq.queues`.

Rule 1: The key is `queue` or `queue@subscription`. The value is JSON with the names of the settings file. The newest
record is in force. A subscription without a record has the rules of its queue.
Rule 2: There is one writer at a time, and no change is lost. A writer first fences all other writers of the same key.
Then it reads the topic to its end, compares versions, and writes in a transaction.
Rule 3: A queue without a record, or a topic that this client may not read, is not an error: the settings apply.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from kmq_spark.config import QueueSettings, checked_queue_settings
from kmq_spark.core.backoff import Backoff, BackoffKind
from kmq_spark.core.markers import Marker, MarkerType
from kmq_spark.core.policy import QueueRules
from kmq_spark.errors import ConfigError, KafkaClientError, KmqError, TopicError
from kmq_spark.kafka.client_errors import DENIED
from kmq_spark.kafka.log_reader import LogReader
from kmq_spark.kafka.lookups import bounds_of
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.records import OutgoingRecord
from kmq_spark.kafka.settings import (
    admin_config,
    make_client,
    new_client_id,
    reader_config,
    transactional_producer_config,
)
from kmq_spark.kafka.topics import DEFAULT_TIMEOUT, ensure_compacted_topic
from kmq_spark.kafka.transaction import TransactionalProducer
from kmq_spark.wire.codec import encode_marker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from confluent_kafka import Consumer, Message

logger = logging.getLogger(__name__)

RULES_TOPIC = "kmq.queues"

RULE_NAMES = (
    "max_deliveries",
    "backoff",
    "backoff_initial_ms",
    "backoff_max_ms",
    "backoff_jitter",
    "expired",
    "lease_ms",
)
"""The rules of a queue, by their names in the settings file, in display order."""

MAX_RECORD_BYTES = 65_536

LEASE_READ_TIMEOUT_S = 3.0
"""Maximum time that a consumer waits at its start for the rules of its queue."""


@dataclass(frozen=True, slots=True)
class StoredRules:
    """
    The record of one queue.

    Attributes:
        name: Key of the record: the queue, or `queue@subscription`.
        version: Number of changes, from 1.
        settings: The rules, validated as those of a settings file.
    """

    name: str
    version: int
    settings: QueueSettings

    @property
    def rules(self) -> QueueRules:
        """The rules that the tracker needs."""
        return queue_rules_of(self.settings, self.version)

    def to_dict(self) -> dict[str, Any]:
        """Return the version and every rule, by name."""
        return {"version": self.version, **rules_by_name(self.settings)}

    @property
    def text(self) -> str:
        """The rules as one line of text."""
        rules = ", ".join(
            f"{name} {value}" for name, value in rules_by_name(self.settings).items() if value is not None
        )
        return f"version {self.version} of {self.name}: {rules}"

    def differing(self, local: QueueSettings) -> list[str]:
        """Return the rules that local settings set explicitly to another value, as `name = local (queue: own)`."""
        own = self.to_dict()
        return [
            f"{name} = {getattr(local, name)!r} (queue: {own[name]!r})"
            for name in RULE_NAMES
            if name in local.model_fields_set and own[name] is not None and getattr(local, name) != own[name]
        ]


def checked_version(name: str, found: StoredRules | None, expected: int | None = None) -> int:
    """
    Return the version of a queue's own rules; 0 if it has none. A group with the rules of its queue has none.

    Args:
        name: Queue, or `queue@subscription`.
        found: The rules that were read for it.
        expected: Required version; None for any.

    Raises:
        ConfigError: The version is another one.
    """
    version = found.version if found is not None and found.name == name else 0
    if expected is not None and version != expected:
        message = (
            f"the rules of {name} have another version: got version {version}, expected {expected}; "
            "review the change against that version and repeat it"
        )
        raise ConfigError(message)
    return version


def queue_rules_of(settings: QueueSettings, version: int) -> QueueRules:
    """Convert the rules of a settings file to those of `kmq_spark.core`."""
    backoff = Backoff(
        BackoffKind[settings.backoff.upper()],
        settings.backoff_initial_ms,
        settings.backoff_max_ms,
        settings.backoff_jitter,
    )
    return QueueRules(version, settings.max_deliveries, backoff, settings.expired == "dead-letter")


def rules_by_name(settings: QueueSettings) -> dict[str, Any]:
    """Return every rule by name. `lease_ms` is None if it was not set: then the settings of the consumers apply."""
    rules = {name: getattr(settings, name) for name in RULE_NAMES}
    return rules if "lease_ms" in settings.model_fields_set else {**rules, "lease_ms": None}


def checked_rules(values: Mapping[str, Any]) -> QueueSettings:
    """
    Validate rules by name. Names outside `RULE_NAMES` are ignored; missing rules take their defaults.

    Raises:
        ConfigError: A value is not allowed.
    """
    given = {name: values[name] for name in RULE_NAMES if values.get(name) is not None}
    return checked_queue_settings(given, "the rules of the queue")


class RulesReader:
    """
    Reads the rules of one queue repeatedly. `refresh` opens the client, also after `close`.

    Args:
        topics: Names of the queue, or of one of its groups.
        config: librdkafka settings of a reader, see `settings.reader_config`.
        timeout: Maximum time for each response of the broker.
        local: Settings of this process. A rule that they set explicitly to another value is logged.

    Attributes:
        is_unauthorized: Whether the last `refresh` was not authorized to read the topic.
        has_topic: Whether the last `refresh` found the topic.
    """

    def __init__(
        self, topics: QueueTopics, config: Mapping[str, Any], timeout: float, local: QueueSettings | None = None
    ) -> None:
        """Open no client yet."""
        self._local = local
        self._names = (str(topics), topics.queue)
        self._config = config
        self._reader: LogReader | None = None
        self._timeout = timeout
        self._next = 0
        self._found: dict[str, StoredRules] = {}
        self.is_unauthorized = self.has_topic = False

    @property
    def client(self) -> Consumer | None:
        """The client, which a child process must not use; None while none is open."""
        return None if self._reader is None else self._reader.client

    @property
    def newest(self) -> StoredRules | None:
        """The rules that the last `refresh` found."""
        return self._newest()

    def refresh(self) -> StoredRules | None:
        """
        Read new records and return the newest rules; None if the queue has none or this client may not read the topic.

        Raises:
            KafkaClientError: The broker cannot be reached in time.
        """
        reader = self._reader
        if reader is None:
            reader = self._reader = LogReader(self._config, RULES_TOPIC, self._timeout)
        try:
            first, end = bounds_of(reader.client, TopicPartition(RULES_TOPIC, 0), self._timeout)
            if end < self._next:
                # The topic was deleted and created again.
                self._next, self._found = 0, {}
            if max(first, self._next) < end:
                for record in reader.read({0: max(first, self._next)}):
                    self._store(record)
                self._next = reader.positions[0]
        except (TopicError, KafkaClientError) as error:
            self.is_unauthorized = isinstance(error, KafkaClientError) and error.code in DENIED
            self.has_topic = False
            if self.is_unauthorized or isinstance(error, TopicError):
                return self._newest()
            # A client that has lost its broker may never connect again: the next `refresh` uses a new one.
            self.close()
            raise
        self.is_unauthorized, self.has_topic = False, True
        return self._newest()

    def close(self) -> None:
        """Close the client; what was read is kept."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _newest(self) -> StoredRules | None:
        return next((self._found[name] for name in self._names if name in self._found), None)

    def _store(self, record: Message) -> None:
        # The type stub also allows what may be sent; what was read is always bytes.
        key: Any = record.key() or b""
        value: Any = record.value()
        offset = record.offset() or 0
        name = key.decode("utf-8", "replace")
        if name not in self._names:
            return
        if value is None:
            self._found.pop(name, None)
            return
        try:
            stored = self._found[name] = _stored_of(name, value)
        except (ValueError, KmqError) as error:
            logger.warning(
                "ignoring record %d of %s, its rules cannot be read: %s", offset, RULES_TOPIC, error,
                extra={"action": "rules_ignored", "queue": name},
            )  # fmt: skip
            return
        differing = stored.differing(self._local) if self._local is not None else []
        if differing:
            logger.warning(
                "the rules of %s (version %d) override the settings of this process: %s; remove these settings, or "
                "change the rules with `kmq queue alter`",
                name, stored.version, ", ".join(differing), extra={"action": "rules_differ", "queue": name},
            )  # fmt: skip


def _stored_of(name: str, value: bytes) -> StoredRules:
    values = json.loads(value[:MAX_RECORD_BYTES])
    if not isinstance(values, dict):
        raise ConfigError(
            f"the rules of a queue must be a JSON object: got {type(values).__name__}; "
            "write them with `kmq queue alter`"
        )
    stored = StoredRules(name, int(values.get("version", 0)), checked_rules(values))
    if fault := stored.rules.fault():
        raise ConfigError(f"the rules of a queue are not valid: {fault}; write them with `kmq queue alter`")
    return stored


def read_rules(
    queue: str,
    *,
    bootstrap_servers: str,
    timeout: float = DEFAULT_TIMEOUT,
    extra: Mapping[str, str] | None = None,
    local: QueueSettings | None = None,
) -> StoredRules | None:
    """
    Return the rules of a queue or of a group; None if it has none or this client may not read them.

    Args:
        queue: Queue, or `queue@subscription`.
        bootstrap_servers: Comma-separated `host:port`.
        timeout: Maximum time for each call to the broker.
        extra: librdkafka settings.
        local: As for `RulesReader`.

    Raises:
        ConfigError: The name is not allowed.
        KafkaClientError: The broker cannot be reached in time.
    """
    topics = QueueTopics.parse(queue)
    config = reader_config(bootstrap_servers, topics.consumer_group, new_client_id("rules"), extra)
    reader = RulesReader(topics, config, timeout, local)
    try:
        return reader.refresh()
    finally:
        reader.close()


def lease_of(
    topics: QueueTopics,
    local: QueueSettings | None = None,
    *,
    bootstrap_servers: str,
    timeout: float,
    extra: Mapping[str, str] | None = None,
) -> int:
    """
    Return the lease of a consumer whose caller set none, milliseconds: that of the queue, or that of the settings.

    Best effort: the rules are read once. A consumer that may not read them, or gets no response, uses its settings.

    Args:
        topics: Names of the queue.
        local: Settings of the consumer; None for the defaults. An explicit lease that differs from the queue's is
            logged.
        bootstrap_servers: Comma-separated `host:port`.
        timeout: Maximum time for each call to the broker.
        extra: librdkafka settings.
    """
    local = local or QueueSettings()
    # A consumer does not need the other rules.
    lease_alone = {"lease_ms": local.lease_ms} if "lease_ms" in local.model_fields_set else {}
    own_settings = checked_queue_settings(lease_alone, "[queue]")
    timeout = min(timeout, LEASE_READ_TIMEOUT_S)
    try:
        stored = read_rules(
            str(topics), bootstrap_servers=bootstrap_servers, timeout=timeout, extra=extra, local=own_settings
        )
    except KafkaClientError as error:
        logger.warning(
            "cannot read the lease of queue %s, using the lease of this consumer's settings: %s", topics, error
        )
        stored = None
    own = None if stored is None else stored.to_dict()["lease_ms"]
    return local.lease_ms if own is None else int(own)


def write_rules(
    queue: str,
    settings: QueueSettings,
    *,
    expected_version: int,
    bootstrap_servers: str,
    timeout: float = DEFAULT_TIMEOUT,
    extra: Mapping[str, str] | None = None,
    replication_factor: int = -1,
) -> StoredRules:
    """
    Write the next version of a queue's rules. Create the topic if it does not exist.

    Args:
        queue: Queue, or `queue@subscription`.
        settings: The rules.
        expected_version: The version that these rules replace; 0 if the queue has none.
        bootstrap_servers: Comma-separated `host:port`.
        timeout: Maximum time for each call to the broker.
        extra: librdkafka settings.
        replication_factor: Replicas of the topic if it is created; -1 for the broker's default.

    Returns:
        The rules that were written.

    Raises:
        ConfigError: The queue has another version by now.
        FencedError: Another process writes the rules of this queue at the same time; nothing was written.
        KafkaClientError: The broker cannot be reached or rejects the request.
    """
    topics = QueueTopics.parse(queue)
    admin = make_client(AdminClient, admin_config(bootstrap_servers, extra=extra))
    ensure_compacted_topic(RULES_TOPIC, replication_factor, admin, bootstrap_servers, timeout)
    config = transactional_producer_config(
        bootstrap_servers,
        f"{RULES_TOPIC}.{topics}",
        new_client_id("rules"),
        extra,
        max_message_bytes=1_000_000,
        transaction_timeout_ms=10_000,
    )
    producer = TransactionalProducer(config, timeout, role="writer of rules")
    try:
        # Read after fencing: whatever an older writer could commit is committed by now.
        found = read_rules(queue, bootstrap_servers=bootstrap_servers, timeout=timeout, extra=extra)
        version = checked_version(str(topics), found, expected_version)
        stored = StoredRules(str(topics), version + 1, settings)
        value = json.dumps(stored.to_dict()).encode()
        record = OutgoingRecord(RULES_TOPIC, 0, str(topics).encode(), value, [])
        producer.run(lambda: producer.send(record), [], None)
    finally:
        producer.close()
    return stored


def rules_record(rules: QueueRules, markers_topic: str, marker_partition: int, tracker_id: str) -> OutgoingRecord:
    """Return the RULES marker that puts these rules in force in a markers partition."""
    marker = Marker(MarkerType.RULES, consumer_id=tracker_id, rules=rules)
    return OutgoingRecord(markers_topic, marker_partition, None, encode_marker(marker), [])
