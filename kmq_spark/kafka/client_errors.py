"""
Turn a Kafka client's failure into ours, in one place.

Rule 1: the client's error code and its word on retrying are kept as attributes.
Rule 2: the text says what to do, by the code; it never carries a value of the client's configuration.
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

_FENCED_NAMES = frozenset({"_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH", "FENCED_INSTANCE_ID"})

PASSING_NAMES = frozenset(
    {
        *("_TRANSPORT", "_ALL_BROKERS_DOWN", "_TIMED_OUT", "_MSG_TIMED_OUT", "_QUEUE_FULL", "_RESOLVE", "_WAIT_COORD"),
        # A broker that goes away with a request under way; a partition that has no leader just then.
        *("_NOENT", "_DESTROY_BROKER", "NETWORK_EXCEPTION", "REQUEST_TIMED_OUT"),
        *("NOT_COORDINATOR", "COORDINATOR_NOT_AVAILABLE", "COORDINATOR_LOAD_IN_PROGRESS"),
        *("LEADER_NOT_AVAILABLE", "NOT_LEADER_FOR_PARTITION", "BROKER_NOT_AVAILABLE", "KAFKA_STORAGE_ERROR"),
    }
)
"""Failures that pass by themselves and that librdkafka does not mark as retriable: it has retried already."""

UNREACHABLE_NAMES = frozenset({"_TRANSPORT", "_ALL_BROKERS_DOWN", "_TIMED_OUT", "_MSG_TIMED_OUT", "_RESOLVE"})
"""Failures of a client whose broker did not answer."""

_MISSING_NAMES = frozenset({"_UNKNOWN_TOPIC", "UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_PARTITION"})

_ADVICE = {
    "_TRANSPORT": "check that the broker runs, and [kafka] bootstrap_servers and security.protocol",
    "_ALL_BROKERS_DOWN": "check that the broker runs, and [kafka] bootstrap_servers and security.protocol",
    "_NOENT": "check that the brokers run: a partition has no leader",
    "_RESOLVE": "check the host names in [kafka] bootstrap_servers",
    "_TIMED_OUT": "check that the broker runs, and [kafka] bootstrap_servers",
    "_MSG_TIMED_OUT": "check the broker; the record may or may not have been written",
    "_QUEUE_FULL": "wait for deliveries (flush), or send more slowly",
    "_AUTHENTICATION": "check sasl.* and ssl.* in [kafka.extra]",
    "_SSL": "check ssl.* in [kafka.extra]",
    "MSG_SIZE_TOO_LARGE": "send a smaller message, or a reference to where its content is kept",
    "TOPIC_AUTHORIZATION_FAILED": "grant the access that `kmq acls` lists",
    "GROUP_AUTHORIZATION_FAILED": "grant the access that `kmq acls` lists",
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": "grant the access that `kmq acls` lists",
    "CLUSTER_AUTHORIZATION_FAILED": "grant the access that `kmq acls` lists",
    "INVALID_TRANSACTION_TIMEOUT": "lower transaction_timeout_ms, or raise transaction.max.timeout.ms of the brokers",
    "NOT_ENOUGH_REPLICAS": "wait until the replicas are back in sync",
}

_UNREACHED = frozenset({"_TRANSPORT", "_ALL_BROKERS_DOWN", "_TIMED_OUT", "_RESOLVE", "_AUTHENTICATION", "_SSL"})

_IS_OF_LISTENER = re.compile(r"SSL|SASL|certificate|listener|[Aa]uthentication")
_LISTENER_ADVICE = (
    "set security.protocol, sasl.* and ssl.* in [kafka.extra] as the broker's listener at this address wants them"
)

_OTHER_ADVICE = "see the client's log lines of `kmq_spark.kafka.client`"

_RETRY_PAUSE_S = 0.1

Answer = TypeVar("Answer")


def client_error(cause: KafkaException | KafkaError, doing: str) -> KmqError:
    """
    Return our error for a client's failure.

    Args:
        cause: What the client raised or reported.
        doing: What could not be done, in our message form: `cannot send to orders`.

    Returns:
        `FencedError` where a newer client has taken over, `TopicError` where a topic or partition is missing,
        `KafkaClientError` otherwise; to be raised `from` the cause.
    """
    error = cause.args[0] if isinstance(cause, KafkaException) else cause
    if not isinstance(error, KafkaError):
        return KafkaClientError(f"{doing}: {error}; {_OTHER_ADVICE}")
    name = error.name()
    if name in _FENCED_NAMES:
        return FencedError(f"{doing}: a newer client has taken over ({name}); stop this one")
    if name in _MISSING_NAMES:
        return TopicError(f"{doing}: {error.str()} ({name}); create the queue with `kmq queue create`")
    advice = _ADVICE.get(name, _OTHER_ADVICE)
    return KafkaClientError(
        f"{doing}: {error.str()} ({name}); {advice}",
        code=name,
        retriable=error.retriable() or name in PASSING_NAMES,
    )


def unreachable(cause: KafkaException, client: Any, bootstrap_servers: str) -> KmqError:  # noqa: ANN401  # as below
    """
    Return our error for a broker that did not answer, with librdkafka's own reason where there is one.

    A call only says that it timed out; whether the broker is down, wants TLS or refuses the password stands in the
    client's log, which is served by `poll`.

    Args:
        cause: What the call raised.
        client: Producer or admin client, which have no common type; a consumer's `poll` would take a message.
        bootstrap_servers: Comma-separated `host:port`.
    """
    if isinstance(client, (Producer, AdminClient)):
        client.poll(0)
    doing = f"cannot reach broker at {bootstrap_servers}"
    error = client_error(cause, doing)
    reason = connection_reasons.of(bootstrap_servers)
    if not isinstance(error, KafkaClientError) or error.code not in _UNREACHED or not reason:
        return error
    advice = _LISTENER_ADVICE if _IS_OF_LISTENER.search(reason) else _ADVICE[error.code]
    return KafkaClientError(f"{doing}: {reason} ({error.code}); {advice}", code=error.code, retriable=error.retriable)


def advice_on(code: str) -> str | None:
    """Return what to do about a failure of librdkafka, by its name; None where nothing particular is known."""
    return _ADVICE.get(code)


def until_answered(call: Callable[[], Answer], doing: str, timeout_s: float) -> Answer:
    """
    Ask the broker again while its answer is that it will know soon: a coordinator that moves, a broker that starts.

    Args:
        call: The client's call; changes nothing.
        doing: What cannot be done, in our message form.
        timeout_s: Seconds after which the failure stands.

    Raises:
        KmqError: It did not pass, or not in time.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return call()
        except KafkaException as error:
            failure = client_error(error, doing)
            if not failure.retriable or time.monotonic() > deadline_s:
                raise failure from error
            time.sleep(_RETRY_PAUSE_S)
