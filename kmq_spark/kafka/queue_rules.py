"""
The rules of a queue: records of the compacted topic `kmq.queues`.

Rule 1: The key is `queue` or `queue@subscription`. The value is JSON. The newest record is in
force. A subscription without a record has the rules of its queue.
Rule 2: There is one writer at a time, and no change is lost. A writer fences all other writers of the same key, writes
an own record, reads the topic up to it, compares versions, and writes in a transaction.
Rule 3: A queue without a record, or a topic that this client may not read, is not an error: the defaults apply.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from kmq_spark.core.backoff import Backoff, BackoffKind
from kmq_spark.core.durations import MIN_LEASE_MS, milliseconds, seconds
from kmq_spark.core.policy import DEFAULT_RULES, MAX_MAX_DELIVERIES, QueueRules
from kmq_spark.errors import ConfigError, FencedError, KafkaClientError, KmqError, TopicError
from kmq_spark.kafka.client_errors import DENIED
from kmq_spark.kafka.log_reader import LogReader, read_committed
from kmq_spark.kafka.lookups import bounds_of
from kmq_spark.kafka.own_record import own_tombstone, write_own
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.records import OutgoingRecord
from kmq_spark.kafka.settings import (
    MAX_MESSAGE_BYTES,
    admin_config,
    make_client,
    new_client_id,
    reader_config,
    transactional_producer_config,
)
from kmq_spark.kafka.topics import (
    DEFAULT_TIMEOUT,
    SEVEN_DAYS_S,
    QueueLayout,
    create_queue_topics,
    ensure_compacted_topic,
)
from kmq_spark.kafka.transaction import TransactionalProducer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta

    from confluent_kafka import Consumer, Message

logger = logging.getLogger(__name__)

RULES_TOPIC = "kmq.queues"

RULE_NAMES = ("max_deliveries", "backoff", "backoff_initial", "backoff_max", "backoff_jitter", "expired", "lease")
"""The rules of a queue, by their names in its record, in display order. Durations are seconds."""

RETRIES = {"max_deliveries": 12, "backoff": "exponential", "backoff_initial": 1.0, "backoff_max": 600.0}
"""
Rules of a new queue, where its creator names no others: a failing message is retried for 27 minutes, so that an outage
of ten makes no dead letters. Without jitter: messages that failed one after the other come back one after the other.
"""

MAX_RECORD_BYTES = 65_536

DEFAULT_LEASE_S = 30.0
"""Lease of a queue whose rules name none: the default of SQS's visibility timeout."""

LEASE_READ_TIMEOUT_S = 3.0
"""Maximum time that a consumer waits at its start for the rules of its queue."""

_BACKOFFS = {kind.name.lower(): kind for kind in BackoffKind}
_EXPIRED = {"drop": False, "dead-letter": True}


@dataclass(frozen=True, slots=True)
class StoredRules:
    """
    The rules of one queue, as its record has them.

    Attributes:
        name: Key of the record: the queue, or `queue@subscription`.
        rules: The rules that the tracker needs; their version counts the changes, from 1.
        lease_s: Lease of consumers that set none, seconds; None for `DEFAULT_LEASE_S`.
    """

    name: str
    rules: QueueRules = DEFAULT_RULES
    lease_s: float | None = None

    @property
    def version(self) -> int:
        """Number of changes, from 1; 0 for rules that are not written."""
        return self.rules.version

    def by_name(self) -> dict[str, Any]:
        """Return every rule by name; the lease is None where the queue names none."""
        rules, backoff = self.rules, self.rules.backoff
        return {
            "max_deliveries": rules.max_deliveries,
            "backoff": backoff.kind.name.lower(),
            "backoff_initial": backoff.initial_ms / 1000,
            "backoff_max": backoff.max_ms / 1000,
            "backoff_jitter": backoff.jitter,
            "expired": "dead-letter" if rules.dead_letters_expired else "drop",
            "lease": self.lease_s,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the version and every rule, by name."""
        return {"version": self.version, **self.by_name()}

    @property
    def text(self) -> str:
        """The rules as one line of text."""
        rules = ", ".join(f"{name} {value}" for name, value in self.by_name().items() if value is not None)
        return f"version {self.version} of {self.name}: {rules}"


def checked_version(name: str, found: StoredRules | None, expected: int | None = None) -> int:
    """Return the version of own rules, 0 for none; raise ConfigError if another one is expected."""
    version = found.version if found is not None and found.name == name else 0
    if expected is not None and version != expected:
        message = (
            f"the rules of {name} have another version: got version {version}, expected {expected}; "
            "review the change against that version and repeat it"
        )
        raise ConfigError(message)
    return version


def checked_rules(values: Mapping[str, Any], name: str = "", version: int = 0) -> StoredRules:
    """Check rules by name. Names outside `RULE_NAMES` are ignored; missing rules take their defaults."""
    found = {
        **StoredRules(name).by_name(),
        **{rule: values[rule] for rule in RULE_NAMES if values.get(rule) is not None},
    }
    for rule, allowed in (("backoff", _BACKOFFS), ("expired", _EXPIRED)):
        if found[rule] not in allowed:
            raise _not_allowed(rule, found[rule], f"one of {', '.join(allowed)}")
    limit, jitter, lease = found["max_deliveries"], found["backoff_jitter"], found["lease"]
    if type(limit) is not int or not 0 <= limit <= MAX_MAX_DELIVERIES:
        raise _not_allowed("max_deliveries", limit, f"0 to {MAX_MAX_DELIVERIES}")
    if isinstance(jitter, bool) or not isinstance(jitter, int | float) or not 0 <= jitter <= 1:
        raise _not_allowed("backoff_jitter", jitter, "0 to 1")
    backoff = Backoff(
        _BACKOFFS[found["backoff"]],
        milliseconds("backoff_initial", found["backoff_initial"], 1),
        milliseconds("backoff_max", found["backoff_max"], 1),
        float(jitter),
    )
    lease_s = None if lease is None else milliseconds("lease", lease, MIN_LEASE_MS) / 1000
    return StoredRules(name, QueueRules(version, limit, backoff, _EXPIRED[found["expired"]]), lease_s)


def named_rules(rules: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return rules that a program gives by name. Raises ConfigError for an unknown name."""
    given = dict(rules or {})
    if unknown := given.keys() - set(RULE_NAMES):
        raise ConfigError(f"unknown rule of a queue: got {sorted(unknown)}; expected of {', '.join(RULE_NAMES)}")
    return given


def _not_allowed(rule: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"rule {rule} of a queue is not allowed: got {value!r}; expected {expected}")


class RulesReader:
    """
    Reads the rules of one queue repeatedly. `refresh` opens the client, also after `close`.

    Attributes:
        is_unauthorized: Whether the last `refresh` was not authorized to read the topic.
        has_topic: Whether the last `refresh` found the topic.
    """

    def __init__(self, topics: QueueTopics, config: Mapping[str, Any], timeout: float) -> None:
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
        """Read new records; return the newest rules, None without any or without the right to read."""
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
                    self.note(record)
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

    def note(self, record: Message) -> None:
        """Take a record of the topic."""
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
            self._found[name] = _stored_of(name, value)
        except (ValueError, KmqError) as error:
            logger.warning(
                "ignoring record %d of %s, its rules cannot be read: %s", offset, RULES_TOPIC, error,
                extra={"action": "rules_ignored", "queue": name},
            )  # fmt: skip


def _stored_of(name: str, value: bytes) -> StoredRules:
    values = json.loads(value[:MAX_RECORD_BYTES])
    if not isinstance(values, dict):
        raise ConfigError(
            f"the rules of a queue must be a JSON object: got {type(values).__name__}; "
            "write them with `kmq queue alter`"
        )
    stored = checked_rules(values, name, int(values.get("version", 0)))
    if fault := stored.rules.fault():
        raise ConfigError(f"the rules of a queue are not valid: {fault}; write them with `kmq queue alter`")
    return stored


def read_rules(
    queue: str,
    *,
    bootstrap_servers: str,
    timeout: float = DEFAULT_TIMEOUT,
    extra: Mapping[str, str] | None = None,
) -> StoredRules | None:
    """Return the rules of a queue or of a group; None if it has none or this client may not read them."""
    topics = QueueTopics.parse(queue)
    config = reader_config(bootstrap_servers, topics.consumer_group, new_client_id("rules"), extra)
    reader = RulesReader(topics, config, timeout)
    try:
        return reader.refresh()
    finally:
        reader.close()


def lease_of(
    topics: QueueTopics, *, bootstrap_servers: str, timeout: float, extra: Mapping[str, str] | None = None
) -> float:
    """
    Return the lease of a consumer whose caller set none, seconds: that of the queue's rules.

    Best effort: the rules are read once. A consumer that may not read them, or gets no answer, takes the default.
    """
    timeout = min(timeout, LEASE_READ_TIMEOUT_S)
    try:
        stored = read_rules(str(topics), bootstrap_servers=bootstrap_servers, timeout=timeout, extra=extra)
    except KafkaClientError as error:
        logger.warning("cannot read the lease of queue %s, using %g s: %s", topics, DEFAULT_LEASE_S, error)
        stored = None
    return DEFAULT_LEASE_S if stored is None or stored.lease_s is None else stored.lease_s


def create_queue(
    queue: str,
    *,
    bootstrap_servers: str,
    partitions: int = 4,
    rules: Mapping[str, Any] | None = None,
    replication_factor: int = -1,
    retention: float | timedelta = SEVEN_DAYS_S,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    timeout: float | timedelta = DEFAULT_TIMEOUT,
    extra: Mapping[str, str] | None = None,
    is_exact: bool = False,
) -> QueueLayout:
    """
    Create the topics of a queue that do not exist, check all of them, and give the queue rules if it has none.

    Args:
        queue: Name of the queue, or `queue@subscription` for the topics of one of its subscriptions.
        bootstrap_servers: Comma-separated `host:port`.
        partitions: Partitions of each topic, 1 to 32,768. If the queue topic exists, the other topics have as many as
            it has.
        rules: Rules by name, of `max_deliveries`, `backoff`, `backoff_initial`, `backoff_max`, `backoff_jitter`,
            `expired`, `lease`; durations in seconds. By default 12 deliveries, and a backoff that grows from one second
            to ten minutes. A subscription has the rules of its queue by default.
        replication_factor: Replicas of each partition; -1 for the broker's default.
        retention: Retention of messages and markers, seconds or a timedelta; must be longer than the longest lease plus
            the longest outage. Dead letters are kept without limit.
        max_message_bytes: Largest message that a producer may send.
        timeout: Timeout of each request to the broker, seconds or a timedelta.
        extra: librdkafka settings.
        is_exact: Whether it is an error if the queue topic exists with another number of partitions.

    Returns:
        The layout of the queue. If all topics existed and are correct, and the queue has rules, nothing has changed.

    Raises:
        ConfigError: A value is out of bounds, or the queue already has other rules.
        TopicError: A topic exists and is not correct.
        KafkaClientError: The broker cannot be reached or rejects the request.
    """
    given = named_rules(rules)
    checked_rules(given)
    layout = create_queue_topics(
        queue,
        bootstrap_servers=bootstrap_servers,
        partitions=partitions,
        replication_factor=replication_factor,
        retention=retention,
        max_message_bytes=max_message_bytes,
        timeout=timeout,
        extra=extra,
        is_exact=is_exact,
    )
    reach: Any = {"bootstrap_servers": bootstrap_servers, "timeout": seconds("timeout", timeout), "extra": extra}
    until_s = time.monotonic() + reach["timeout"]
    found = read_rules(queue, **reach)
    while found is None or (given and not checked_version(queue, found)):
        wanted = checked_rules({**(RETRIES if found is None else found.by_name()), **given})
        try:
            found = write_rules(queue, wanted, expected_version=0, replication_factor=replication_factor, **reach)
        except (ConfigError, FencedError):
            # Another process creates the queue at the same time.
            if time.monotonic() > until_s:
                raise
            found = read_rules(queue, **reach)
    has, wants = found.by_name(), checked_rules({**found.by_name(), **given}).by_name()
    if other := {rule: wants[rule] for rule in wants if has[rule] != wants[rule]}:
        message = (
            f"queue {queue!r} has other rules already: got {other!r}, version {found.version} has "
            f"{ {rule: has[rule] for rule in other}!r}; change them with `kmq queue alter {queue}`"
        )
        raise ConfigError(message)
    return layout


def write_rules(
    queue: str,
    rules: StoredRules,
    *,
    expected_version: int,
    bootstrap_servers: str,
    timeout: float = DEFAULT_TIMEOUT,
    extra: Mapping[str, str] | None = None,
    replication_factor: int = -1,
) -> StoredRules:
    """Write the next version of a queue's rules. Create the topic if it does not exist."""
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
        ends = write_own(producer, [own_tombstone(RULES_TOPIC)])
        reading = reader_config(bootstrap_servers, topics.consumer_group, new_client_id("rules"), extra)
        reader = RulesReader(topics, reading, timeout)
        for found in read_committed(reading, RULES_TOPIC, [0], timeout, ends=ends):
            reader.note(found)
        version = checked_version(str(topics), reader.newest, expected_version)
        stored = StoredRules(str(topics), replace(rules.rules, version=version + 1), rules.lease_s)
        value = json.dumps(stored.to_dict()).encode()
        record = OutgoingRecord(RULES_TOPIC, 0, str(topics).encode(), value, [])
        producer.run(lambda: producer.send(record), [], None)
    finally:
        producer.close()
    return stored
