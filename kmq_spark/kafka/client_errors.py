"""
Convert errors of the Kafka client into errors of this package.

Rule 1: The client's error code, and whether the client calls the error retriable, are attributes of our error.
Rule 2: The error code selects the advice in the text. The text never contains a value of the client's configuration.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any, TypeVar

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from kmq_spark.errors import FencedError, KafkaClientError, TopicError
from kmq_spark.kafka.client_log import connection_reasons

if TYPE_CHECKING:
    from collections.abc import Callable

    from kmq_spark.errors import KmqError

FENCED_NAMES = frozenset(
    {"_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH", "INVALID_PRODUCER_ID_MAPPING", "FENCED_INSTANCE_ID"}
)
"""A newer client with the same transactional id or group instance id has taken over, or the broker forgot this one."""

TEMPORARY_NAMES = frozenset(
    {
        # Of librdkafka. `_DESTROY_BROKER`: a broker disconnects while a request is in flight; `_NOENT`: a partition has
        # no leader at that moment.
        *("_TRANSPORT", "_ALL_BROKERS_DOWN", "_TIMED_OUT", "_MSG_TIMED_OUT", "_QUEUE_FULL", "_RESOLVE", "_WAIT_COORD"),
        *("_NOENT", "_DESTROY_BROKER", "BROKER_NOT_AVAILABLE"),
        # All that Kafka's own client repeats (`org.apache.kafka.common.protocol.Errors`), except for a missing topic.
        *("INVALID_MSG", "LEADER_NOT_AVAILABLE", "NOT_LEADER_FOR_PARTITION", "REQUEST_TIMED_OUT"),
        *("REPLICA_NOT_AVAILABLE", "NETWORK_EXCEPTION", "COORDINATOR_LOAD_IN_PROGRESS", "COORDINATOR_NOT_AVAILABLE"),
        *("NOT_COORDINATOR", "NOT_ENOUGH_REPLICAS", "NOT_ENOUGH_REPLICAS_AFTER_APPEND", "NOT_CONTROLLER"),
        *("CONCURRENT_TRANSACTIONS", "KAFKA_STORAGE_ERROR", "FETCH_SESSION_ID_NOT_FOUND"),
        *("INVALID_FETCH_SESSION_EPOCH", "LISTENER_NOT_FOUND", "FENCED_LEADER_EPOCH", "UNKNOWN_LEADER_EPOCH"),
        *("OFFSET_NOT_AVAILABLE", "PREFERRED_LEADER_NOT_AVAILABLE", "ELIGIBLE_LEADERS_NOT_AVAILABLE"),
        *("ELECTION_NOT_NEEDED", "UNSTABLE_OFFSET_COMMIT", "THROTTLING_QUOTA_EXCEEDED", "UNKNOWN_TOPIC_ID"),
        *("INCONSISTENT_TOPIC_ID", "SHARE_SESSION_NOT_FOUND", "INVALID_SHARE_SESSION_EPOCH"),
        "SHARE_SESSION_LIMIT_REACHED",
    }
)
"""Temporary failures; librdkafka marks none of them as retriable, because it has already repeated what it repeats."""

UNREACHABLE_NAMES = frozenset({"_TRANSPORT", "_ALL_BROKERS_DOWN", "_TIMED_OUT", "_MSG_TIMED_OUT", "_RESOLVE"})
"""Failures of a client whose broker did not respond."""

_MISSING_NAMES = frozenset({"_UNKNOWN_TOPIC", "UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_PARTITION"})

_ADVICE = {
    "_TRANSPORT": "check that the broker runs, and [kafka] bootstrap_servers and security.protocol",
    "_ALL_BROKERS_DOWN": "check that the broker runs, and [kafka] bootstrap_servers and security.protocol",
    "_NOENT": "check that the brokers run: a partition has no leader",
    "_RESOLVE": "check the host names in [kafka] bootstrap_servers",
    "_TIMED_OUT": "check that the broker runs, and [kafka] bootstrap_servers",
    "_MSG_TIMED_OUT": "check the broker; the record may or may not have been written",
    "_QUEUE_FULL": "wait for deliveries (call flush), or send more slowly",
    "_AUTHENTICATION": "check sasl.* and ssl.* in [kafka.extra]",
    "_SSL": "check ssl.* in [kafka.extra]",
    "MSG_SIZE_TOO_LARGE": "send a smaller message, or a reference to content that is stored elsewhere",
    "TOPIC_AUTHORIZATION_FAILED": "grant the access that `kmq acls` lists",
    "GROUP_AUTHORIZATION_FAILED": "grant the access that `kmq acls` lists",
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": "grant the access that `kmq acls` lists",
    "CLUSTER_AUTHORIZATION_FAILED": "grant the access that `kmq acls` lists",
    "INVALID_TRANSACTION_TIMEOUT": "lower transaction_timeout_ms, or raise transaction.max.timeout.ms of the brokers",
    "NOT_ENOUGH_REPLICAS": "wait until the replicas are back in sync",
}

_CONNECT_FAILURES = frozenset({"_TRANSPORT", "_ALL_BROKERS_DOWN", "_TIMED_OUT", "_RESOLVE", "_AUTHENTICATION", "_SSL"})

_CONCERNS_LISTENER = re.compile(r"SSL|SASL|certificate|listener|[Aa]uthentication")
_LISTENER_ADVICE = (
    "set security.protocol, sasl.* and ssl.* in [kafka.extra] as the broker's listener at this address requires"
)

_OTHER_ADVICE = "see the client's log lines of `kmq_spark.kafka.client`"

_RETRY_PAUSE_S = 0.1

Answer = TypeVar("Answer")


def client_error(cause: KafkaException | KafkaError, operation: str) -> KmqError:
    """
    Return our error for an error of the Kafka client.

    Args:
        cause: The exception or error of the client.
        operation: The operation that failed, in the form of our messages: `cannot send to orders`.

    Returns:
        `FencedError` if a newer client has fenced this one, `TopicError` if a topic or partition does not exist,
        `KafkaClientError` otherwise. Raise it `from` the cause.
    """
    error = cause.args[0] if isinstance(cause, KafkaException) else cause
    if not isinstance(error, KafkaError):
        return KafkaClientError(f"{operation}: {error}; {_OTHER_ADVICE}")
    name = error.name()
    if name in FENCED_NAMES:
        return FencedError(f"{operation}: fenced by a newer client ({name}); stop this one")
    if name in _MISSING_NAMES:
        return TopicError(f"{operation}: {error.str()} ({name}); create the queue with `kmq queue create`")
    advice = _ADVICE.get(name, _OTHER_ADVICE)
    return KafkaClientError(
        f"{operation}: {error.str()} ({name}); {advice}",
        code=name,
        retriable=error.retriable() or name in TEMPORARY_NAMES,
    )


def unreachable(cause: KafkaException, client: Any, bootstrap_servers: str) -> KmqError:  # noqa: ANN401  # as below
    """
    Return our error for a broker that did not respond, with librdkafka's own reason if there is one.

    The failed call itself reports only a time-out. Whether the broker is down, requires TLS or refuses the password is
    in the client's log only. `poll` delivers these log lines.

    Args:
        cause: The exception of the call.
        client: Producer or admin client (they have no common type). Not polled if it is a consumer: `poll` would
            consume a message.
        bootstrap_servers: Comma-separated `host:port`.
    """
    if isinstance(client, (Producer, AdminClient)):
        client.poll(0)
    operation = f"cannot reach broker at {bootstrap_servers}"
    error = client_error(cause, operation)
    reason = connection_reasons.of(bootstrap_servers)
    if not isinstance(error, KafkaClientError) or error.code not in _CONNECT_FAILURES or not reason:
        return error
    advice = _LISTENER_ADVICE if _CONCERNS_LISTENER.search(reason) else _ADVICE[error.code]
    message = f"{operation}: {reason} ({error.code}); {advice}"
    return KafkaClientError(message, code=error.code, retriable=error.retriable)


def has_old_leader_epoch(error: BaseException | None) -> bool:
    """
    Return whether the broker refused a request because the client's metadata are out of date.

    A partition has had a new leader since, or its leader has started again. librdkafka's admin client gets this error
    until it reads the metadata again, which it does every five minutes (`rd_kafka_admin_result_err_refresh`).
    """
    return isinstance(error, KafkaException) and error.args[0].name() == "FENCED_LEADER_EPOCH"


def advice_on(code: str) -> str | None:
    """Return the advice for a librdkafka error name; None if there is none."""
    return _ADVICE.get(code)


def retry_until_answered(call: Callable[[], Answer], operation: str, timeout_s: float) -> Answer:
    """
    Repeat a call while the broker returns a retriable error, for example while a coordinator moves or a broker starts.

    Args:
        call: A call of the client that changes nothing.
        operation: The operation that may fail, in the form of our messages.
        timeout_s: Seconds after which a retriable error is raised too.

    Returns:
        The result of the call.

    Raises:
        KmqError: The error is not retriable, or the time is over.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return call()
        except KafkaException as error:
            failure = client_error(error, operation)
            if not failure.retriable or time.monotonic() > deadline_s:
                raise failure from error
            time.sleep(_RETRY_PAUSE_S)
