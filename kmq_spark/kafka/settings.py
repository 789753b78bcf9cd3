"""
The librdkafka settings of each client. Every value that differs from the default has its reason here.

Rule 1: settings on which the guarantees depend cannot be overridden. All others can (`[kafka.extra]`).
Rule 2: settings come only from the operator, never from a message, a queue name or a row.

Source: librdkafka CONFIGURATION.md; KIP-98 (idempotence), KIP-429 (cooperative rebalancing).
"""

from __future__ import annotations

import ctypes
import difflib
import os
import re
import secrets
import socket
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from confluent_kafka import Consumer, KafkaException, Producer

from kmq_spark.client_properties import JAVA_ONLY_HINTS, is_java_only
from kmq_spark.errors import ConfigError
from kmq_spark.kafka.client_errors import client_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Client = TypeVar("Client")

MAX_MESSAGE_BYTES = 1_048_576
"""Default for the largest message (key, value, headers) of a producer; about Kafka's own default."""

BULK_TRANSACTION_TIMEOUT_MS = 60_000
"""Time-out of the large transactions of sinks and redrives. Brokers accept 15 minutes by default."""

REQUIRED_VALUES: dict[str, tuple[str, ...]] = {
    # A retried batch must not be duplicated or reordered.
    "enable.idempotence": ("true",),
    # A START that only one broker has may be lost with that broker, after its message was handed out.
    "acks": ("all", "-1"),
    "request.required.acks": ("all", "-1"),
    # The tracker redelivers in transactions: the records of an aborted one must stay invisible.
    "isolation.level": ("read_committed",),
    # A position may be committed only when the START of every message before it is durable.
    "enable.auto.commit": ("false",),
    "enable.auto.offset.store": ("false",),
    # A misspelled queue name must fail, and not create a topic with the wrong timestamp type.
    "allow.auto.create.topics": ("false",),
}
"""Settings on which the guarantees depend, with their allowed values."""

OWN_KEYS = frozenset({"bootstrap.servers", "transactional.id", "delivery.report.only.error", "message.max.bytes"})
"""Settings that have a parameter of their own, or whose value our code depends on."""

LIBRARY_KEYS = frozenset({"plugin.library.paths", "ssl.engine.location"})
"""Settings that load a shared library. (Java class names, which load code too, librdkafka does not know.)"""

MEMBER_KEYS = frozenset(
    {
        "group.id",
        "group.instance.id",
        "group.protocol",
        "group.remote.assignor",
        "heartbeat.interval.ms",
        "max.poll.interval.ms",
        "partition.assignment.strategy",
        "session.timeout.ms",
    }
)
"""Settings of a member of a consumer group: given in `extra`, they are for no other client of the program."""


def check_extra(extra: Mapping[str, str]) -> None:
    """Reject settings of the operator that would break a guarantee, load code, or belong to the Java client."""
    for key, value in extra.items():
        allowed = REQUIRED_VALUES.get(key, ())
        if is_java_only(key):
            ours = f" ({JAVA_ONLY_HINTS[key]})" if key in JAVA_ONLY_HINTS else ""
            problem = (
                "is not allowed in [kafka.extra]: got a key of the Java client; expected librdkafka's; put it into "
                f"[kafka.spark_extra], for Spark, and librdkafka's own key{ours} into [kafka.extra], or give one file "
                "for both with --command-config"
            )
        elif key in LIBRARY_KEYS:
            problem = "is not allowed: it loads a library into the process; remove it from [kafka.extra]"
        elif key in OWN_KEYS:
            problem = "is not allowed in [kafka.extra]: kmq-spark sets it itself; remove it"
        elif allowed and str(value).lower() not in allowed:
            problem = f"would break a guarantee: got {value!r}; expected {allowed[0]!r}; remove it from [kafka.extra]"
        else:
            continue
        raise ConfigError(f"setting {key} {problem}")


def new_client_id(role: str) -> str:
    """Return a client id that contains role, host and process id, and that is unique in this process."""
    return f"kmq-{role}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"


def _config(
    bootstrap_servers: str,
    client_id: str,
    own: Mapping[str, Any],
    extra: Mapping[str, str] | None,
    *,
    is_member: bool = False,
) -> dict[str, Any]:
    """Return the settings of any client, those of this kind of client, and the operator's."""
    if not bootstrap_servers:
        raise ConfigError("bootstrap_servers is empty: expected at least one host:port; set [kafka] bootstrap_servers")
    given = dict(extra or {})
    check_extra(given)
    return {
        "bootstrap.servers": bootstrap_servers,
        "client.id": client_id,
        # stdlib logging instead of lines on stderr; see client_errors.py.
        "logger": client_logger,
        # Do not log that the broker closed an idle connection: this is normal.
        "log.connection.close": False,
        # Reconnect within two seconds after a broker has started; the default waits up to ten.
        "reconnect.backoff.max.ms": 2_000,
        **own,
        **{key: value for key, value in given.items() if is_member or key not in MEMBER_KEYS},
    }


def admin_config(bootstrap_servers: str, client_id: str = "", extra: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the settings of an admin client."""
    return _config(bootstrap_servers, client_id or new_client_id("admin"), {}, extra)


_PRODUCER: dict[str, Any] = {
    "enable.idempotence": True,
    "acks": "all",
    "allow.auto.create.topics": False,
    # Reject a message that is too large at once, in the call, and not after a round trip.
    "message.max.bytes": MAX_MESSAGE_BYTES,
    # The partitioner of Java clients: messages with the same key get the same partition, from any client.
    "partitioner": "murmur2_random",
}


def producer_config(
    bootstrap_servers: str,
    client_id: str = "",
    extra: Mapping[str, str] | None = None,
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    delivery_timeout: float = 120.0,
) -> dict[str, Any]:
    """Return the settings of a producer of messages."""
    own = {
        **_PRODUCER,
        "message.max.bytes": max_message_bytes,
        # At 10,000 messages/s and more, 5 ms fill a batch. Below that rate, 5 ms are small against the broker's round
        # trip.
        "linger.ms": 5,
        "delivery.timeout.ms": round(delivery_timeout * 1000),
    }
    return _config(bootstrap_servers, client_id or new_client_id("producer"), own, extra)


def marker_producer_config(
    bootstrap_servers: str,
    client_id: str = "",
    extra: Mapping[str, str] | None = None,
    *,
    delivery_timeout_ms: int = 10_000,
) -> dict[str, Any]:
    """
    Return the settings of a consumer's producer of markers.

    *delivery_timeout_ms* is also the START's time-out: a retry must not write a START long after its messages were
    given up.
    """
    own = {
        **_PRODUCER,
        # The receive call waits for its START; ENDs are already batched.
        "linger.ms": 0,
        # Responses between leader and follower are small. With Nagle's algorithm, a single START would wait for a
        # delayed TCP acknowledgement.
        "socket.nagle.disable": True,
        "delivery.timeout.ms": delivery_timeout_ms,
    }
    return _config(bootstrap_servers, client_id or new_client_id("markers"), own, extra)


def transactional_producer_config(
    bootstrap_servers: str,
    transactional_id: str,
    client_id: str = "",
    extra: Mapping[str, str] | None = None,
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    transaction_timeout_ms: int = 60_000,
) -> dict[str, Any]:
    """Return the settings of a transactional producer: those of `producer_config`, with a transactional id."""
    config = producer_config(bootstrap_servers, client_id, extra, max_message_bytes=max_message_bytes)
    # librdkafka rejects a delivery time-out that is longer than the transaction's.
    config["delivery.timeout.ms"] = min(int(config["delivery.timeout.ms"]), transaction_timeout_ms)
    return {**config, "transactional.id": transactional_id, "transaction.timeout.ms": transaction_timeout_ms}


_READER: dict[str, Any] = {
    "isolation.level": "read_committed",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "allow.auto.create.topics": False,
    # The broker responds to an empty fetch after this time. With the default of 500 ms, a single message could wait
    # that long behind such a fetch.
    "fetch.wait.max.ms": 10,
    # With the default of 1000 ms the fetcher idles each time the local queue is full: 0.28 instead of 1.05 M
    # messages/s.
    "fetch.queue.backoff.ms": 2,
    # Messages of a partition that wait in the client. With the default of 64 MiB, four partitions fill 256 MiB, and
    # each message has left the processor's cache before it is used. With 1 MiB, batches of messages of 10 KiB are
    # small, which takes more time than the cache saves.
    "queued.max.messages.kbytes": 4_096,
}


def reader_config(
    bootstrap_servers: str, group: str, client_id: str = "", extra: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the settings of a consumer that assigns its partitions itself, joins no group and commits nothing."""
    return _config(bootstrap_servers, client_id or new_client_id("reader"), {**_READER, "group.id": group}, extra)


CLASSIC_MEMBER: dict[str, Any] = {
    # When a consumer joins or leaves, the others keep their partitions (KIP-429).
    "partition.assignment.strategy": "cooperative-sticky",
    # The partitions of a killed consumer are idle for this time, and the commits of the others wait for the rebalance
    # (the broker responds in order on each connection). The default of 45 s is longer than the default lease.
    "session.timeout.ms": 10_000,
    # A member learns of a rebalance from the response to its next heartbeat.
    "heartbeat.interval.ms": 1_000,
}
"""
Settings of a member of a classic group, which every broker supports.

With `group.protocol=consumer` (KIP-848, brokers from 4.0) the broker decides all of this, and no commit waits for a
rebalance. The partitions of a killed consumer are then idle for the broker's group.consumer.session.timeout.ms, 45 s
unless the operator lowers it.
"""


def consumer_config(
    bootstrap_servers: str, group: str, client_id: str = "", extra: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the settings of a queue's consumer. *extra* may have `MEMBER_KEYS`."""
    own = {
        **_READER,
        "group.id": group,
        # The first consumer of a queue receives the messages that were sent before it started.
        "auto.offset.reset": "earliest",
        # New partitions of the queue topic are read within half a minute; the default is five minutes.
        "topic.metadata.refresh.interval.ms": 30_000,
        # Of one partition in one response. With the default of 1 MiB, 2,000 messages of 1 KiB come from two
        # partitions, and a batch of them needs two STARTs, each a request of its own.
        "fetch.message.max.bytes": 4_194_304,
        **({} if (extra or {}).get("group.protocol") == "consumer" else CLASSIC_MEMBER),
    }
    return _config(bootstrap_servers, client_id or new_client_id("consumer"), own, extra, is_member=True)


class _Consumer(Consumer):
    """A consumer that a WeakSet can hold, which it cannot of the client's own class."""


class _Producer(Producer):
    """A producer that a WeakSet can hold."""


_KINDS: dict[Any, Any] = {Consumer: _Consumer, Producer: _Producer}
_clients: weakref.WeakSet[Any] = weakref.WeakSet()


def make_client(kind: Callable[[dict[str, Any]], Client], config: Mapping[str, Any]) -> Client:
    """Create a client. If librdkafka does not know a setting or rejects its value, name the setting in the error."""
    try:
        client: Client = _KINDS.get(kind, kind)(dict(config))
    except (KafkaException, TypeError, ValueError) as error:
        raise ConfigError(_explain(error, config)) from None
    _clients.add(client)
    return client


def _keep_in_child() -> None:
    for client in list(_clients):
        # One reference is never released: the threads of a client run in the parent alone, and to destroy a client
        # without its threads ends the process by a signal.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


os.register_at_fork(after_in_child=_keep_in_child)


def _explain(error: Exception, config: Mapping[str, Any]) -> str:
    """Return an error text that names the setting, but never its value: it may be a password."""
    text = str(error.args[0].str() if isinstance(error, KafkaException) and error.args else error)
    named = re.search(r'configuration property:? "([^"]+)"', text)
    # The name from the settings or, if the setting has two names, librdkafka's first one.
    key = named.group(1) if named else ""
    if "No such configuration property" in text:
        close = difflib.get_close_matches(key, sorted({*REQUIRED_VALUES, *config} - {key}), n=1)
        hint = f"did you mean {close[0]!r}?" if close else "see librdkafka's CONFIGURATION.md for the names"
        return f"unknown Kafka client setting: got {key!r} in [kafka.extra]; {hint}"
    if (unusable := re.search(r"(ssl\.[a-z.]+) failed: (.*)", text)) is not None:
        # OpenSSL's text for a file that is missing, unreadable or not PEM; it does not contain the path.
        return (
            f"Kafka client setting {unusable[1]} cannot be used: OpenSSL reports {unusable[2]!r}; give an existing, "
            "readable PEM file in [kafka.extra]"
        )
    if key:
        return f"Kafka client setting {key} is not allowed: librdkafka rejects its value; correct it in [kafka.extra]"
    return f"cannot create a Kafka client: {text}; correct [kafka.extra]"
