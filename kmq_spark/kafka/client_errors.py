"""
Errors of the Kafka client: the table of their names, our errors for them, and the client's log.

Rule 1: an error text never contains a value of the client's configuration.
Rule 2: at most one log line of a kind passes in ten seconds: a broker that is down causes a line every 50 ms. Only
these lines contain the reason of a failed connection, so it is kept for the error of the call that timed out.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from kmq_spark.errors import FencedError, KafkaClientError, TopicError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from kmq_spark.errors import KmqError

FENCED = frozenset(
    {"_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH", "INVALID_PRODUCER_ID_MAPPING", "FENCED_INSTANCE_ID"}
)
"""A newer client with the same transactional id or group instance id has taken over, or the broker forgot this one."""

MISSING = frozenset({"_UNKNOWN_TOPIC", "UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_PARTITION"})
"""A topic or partition does not exist."""

DENIED = frozenset(f"{what}_AUTHORIZATION_FAILED" for what in ("TOPIC", "GROUP", "TRANSACTIONAL_ID", "CLUSTER"))
"""This client has no right to do it."""

REFUSED = MISSING | DENIED | {
    *("MSG_SIZE_TOO_LARGE", "INVALID_MSG", "INVALID_MSG_SIZE", "INVALID_RECORD", "INVALID_TIMESTAMP"),
    *("POLICY_VIOLATION", "RECORD_LIST_TOO_LARGE", "UNSUPPORTED_FOR_MESSAGE_FORMAT"),
}  # fmt: skip
"""The broker refuses a record for good: sent again, it would be refused again."""

TIMED_OUT = frozenset({"_MSG_TIMED_OUT", "_TIMED_OUT", "_TIMED_OUT_QUEUE"})

UNREACHABLE = TIMED_OUT | {"_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE"}
"""The broker did not respond."""

CONNECTING = UNREACHABLE | {"_AUTHENTICATION", "_SSL"}
"""The client has no connection."""

TEMPORARY = UNREACHABLE | {
    # Of librdkafka. `_DESTROY_BROKER`: a broker disconnects while a request is in flight; `_NOENT`: a partition has no
    # leader at that moment.
    *("_QUEUE_FULL", "_WAIT_COORD", "_NOENT", "_DESTROY_BROKER", "BROKER_NOT_AVAILABLE"),
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
}  # fmt: skip
"""Temporary failures; librdkafka marks none of them as retriable, because it has already repeated what it repeats."""

_GRANT = "grant the access that `kmq acls` lists"
_REACH = "check that the broker runs, and [kafka] bootstrap_servers and security.protocol"

ADVICE = {
    **dict.fromkeys(DENIED, _GRANT),
    "_TRANSPORT": _REACH,
    "_ALL_BROKERS_DOWN": _REACH,
    "_NOENT": "check that the brokers run: a partition has no leader",
    "_RESOLVE": "check the host names in [kafka] bootstrap_servers",
    "_TIMED_OUT": "check that the broker runs, and [kafka] bootstrap_servers",
    "_MSG_TIMED_OUT": "check the broker; the record may or may not have been written",
    "_QUEUE_FULL": "wait for deliveries (call flush), or send more slowly",
    "_AUTHENTICATION": "check sasl.* and ssl.* in [kafka.extra]",
    "_SSL": "check ssl.* in [kafka.extra]",
    "MSG_SIZE_TOO_LARGE": "send a smaller message, or a reference to content that is stored elsewhere",
    "INVALID_TRANSACTION_TIMEOUT": "raise transaction.max.timeout.ms of the brokers",
    "NOT_ENOUGH_REPLICAS": "wait until the replicas are back in sync",
}

_CONCERNS_LISTENER = re.compile(r"SSL|SASL|certificate|listener|[Aa]uthentication")
_LISTENER_ADVICE = (
    "set security.protocol, sasl.* and ssl.* in [kafka.extra] as the broker's listener at this address requires"
)

_OTHER_ADVICE = "see the client's log lines of `kmq_spark.kafka.client`"

_RETRY_PAUSE_S = 0.1

ANSWER_MARGIN_S = 5.0
"""How long after its own time-out an answer of the admin client is waited for."""

Answer = TypeVar("Answer")


def client_error(cause: KafkaException | KafkaError, operation: str) -> KmqError:
    """Return our error for an error of the Kafka client; *operation* is what failed: `cannot send to orders`."""
    error = cause.args[0] if isinstance(cause, KafkaException) else cause
    if not isinstance(error, KafkaError):
        return KafkaClientError(f"{operation}: {error}; {_OTHER_ADVICE}")
    name = error.name()
    if name in FENCED:
        return FencedError(f"{operation}: fenced by a newer client ({name}); stop this one")
    if name in MISSING:
        return TopicError(f"{operation}: {error.str()} ({name}); create the queue with `kmq queue create`")
    return KafkaClientError(
        f"{operation}: {error.str()} ({name}); {ADVICE.get(name, _OTHER_ADVICE)}",
        code=name,
        retriable=error.retriable() or name in TEMPORARY,
    )


def serve_reports(serve: Callable[[float], int], timeout: float, on_fatal: Callable[[KafkaError], None]) -> int:
    """
    Serve delivery reports by `poll` or `flush` of a producer; return its answer.

    The error that has ended the client is raised once, in whichever call comes first; `flush` loses it. It goes to
    *on_fatal*, before the reports that it causes are served.
    """
    try:
        return serve(timeout)
    except KafkaException as error:
        on_fatal(error.args[0])
    except SystemError:
        on_fatal(KafkaError(KafkaError._FATAL, "the client has ended", fatal=True))  # noqa: SLF001  # librdkafka's public name for it
    return serve(timeout)


def unreachable(cause: KafkaException, client: Any, bootstrap_servers: str) -> KmqError:  # noqa: ANN401  # as below
    """
    Return our error for a broker that did not respond, with librdkafka's own reason if there is one.

    The failed call itself reports only a time-out. Whether the broker is down, requires TLS or refuses the password is
    in the client's log only.
    """
    # `poll` delivers the lines of the log. A consumer is not polled: it would consume a message.
    if isinstance(client, (Producer, AdminClient)):
        client.poll(0)
    operation = f"cannot reach broker at {bootstrap_servers}"
    error = client_error(cause, operation)
    reason = client_log.reason_of(bootstrap_servers)
    if not isinstance(error, KafkaClientError) or error.code not in CONNECTING or not reason:
        return error
    advice = _LISTENER_ADVICE if _CONCERNS_LISTENER.search(reason) else ADVICE.get(error.code, _OTHER_ADVICE)
    if "OIDC" in reason:
        advice = ADVICE["_AUTHENTICATION"]
    message = f"{operation}: {reason} ({error.code}); {advice}"
    return KafkaClientError(message, code=error.code, retriable=error.retriable)


def has_old_metadata(error: BaseException | None) -> bool:
    """
    Return whether a request failed because the client's metadata are out of date.

    A partition is new (`_NOENT`), has had a new leader since, or its leader has started again. librdkafka's admin
    client fails so until it reads the metadata again, which it does every five minutes
    (`rd_kafka_admin_result_err_refresh`).
    """
    return isinstance(error, KafkaException) and error.args[0].name() in {"FENCED_LEADER_EPOCH", "_NOENT"}


def answer_of(future: Future[Answer], timeout_s: float) -> Answer:
    """
    Return an answer of the admin client, whose request has a time-out of *timeout_s*; without one, raise `_TIMED_OUT`.

    A process whose client thread is stuck never gets an answer (seen: a consumer without `close` that Python's garbage
    collector destroyed in this thread).
    """
    try:
        return future.result(timeout_s + ANSWER_MARGIN_S)
    except TimeoutError:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT)) from None  # noqa: SLF001  # librdkafka's public name


def retry_until_answered(call: Callable[[], Answer], operation: str, timeout_s: float) -> Answer:
    """Repeat a call while its error is retriable, for example while a coordinator moves or a broker starts."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return call()
        except KafkaException as error:
            failure = client_error(error, operation)
            if not failure.retriable or time.monotonic() > deadline_s:
                raise failure from error
            time.sleep(_RETRY_PAUSE_S)


MIN_INTERVAL_S = 10.0
"""Time between two lines of one kind. It still shows that a problem lasts, and when it ended."""

MAX_REMEMBERED = 1_000
"""Maximum number of kinds of lines, and of addresses, that are remembered. Above it all are forgotten."""

REASON_AGE_S = 60.0
"""How long the reason of a failed connection is valid."""

HARMLESS = {"GETPID": "retrying", "CONFWARN": "will be ignored by this"}
"""
librdkafka facilities, and the words that make a line of them harmless: a coordinator that starts, and a setting of
consumers alone in `extra`, which configures the producers of a consumer too.
"""

# The text of a line of the facility FAIL: "[thrd:…]: sasl_ssl://host:port/id: reason (after 3ms in …)".
_ADDRESS = re.compile(r"\]: (?:\w+://)?([^/\s]+)/\w+: (.*?)(?: \(after \d+ms.*)?$", re.DOTALL)


_TOKEN_SERVER = ""
"""In place of a broker's address: without a token (OAuth), librdkafka connects to no broker."""


class ClientLog(logging.Filter):
    """
    Lets one line per kind pass in `MIN_INTERVAL_S`, and keeps the reasons of failed connections by broker address.

    A kind is a level, a librdkafka facility and a client name: these two and the text are the arguments of a line.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._seen: dict[tuple[object, ...], tuple[float, int]] = {}
        self._reasons: dict[str, dict[bool, tuple[float, str]]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the line passes. A line that passes contains how many lines before it were suppressed."""
        args = tuple(map(str, record.args)) if isinstance(record.args, tuple) else ()
        facility, text = (args[0], args[-1]) if args else ("", "")
        words = HARMLESS.get(facility)
        if words is not None and words in text and record.levelno > logging.DEBUG:
            record.levelno, record.levelname = logging.DEBUG, "DEBUG"
            return client_logger.isEnabledFor(logging.DEBUG)
        kind, now = (record.levelno, record.msg, *args[:2]), time.monotonic()
        with self._lock:
            if facility == "FAIL" and (found := _ADDRESS.search(text)) is not None:
                # If the broker closes the connection, librdkafka only guesses the reason, and not every time.
                is_guess = found[2].startswith("Disconnected")
                _room_in(self._reasons).setdefault(found[1], {})[is_guess] = (now, found[2])
            if facility == "OIDC":
                _room_in(self._reasons)[_TOKEN_SERVER] = {False: (now, text.partition("]: ")[2])}
            last_at, suppressed = self._seen.get(kind, (-MIN_INTERVAL_S, 0))
            if now - last_at < MIN_INTERVAL_S:
                self._seen[kind] = (last_at, suppressed + 1)
                return False
            _room_in(self._seen)[kind] = (now, 0)
        if suppressed:
            record.msg = f"{record.msg} ({suppressed} similar lines suppressed)"
        return True

    def reason_of(self, bootstrap_servers: str) -> str:
        """Return why the latest connection to these addresses failed; empty if none failed."""
        since = time.monotonic() - REASON_AGE_S
        addresses = [address.strip().rpartition("://")[2] for address in bootstrap_servers.split(",")] + [_TOKEN_SERVER]
        with self._lock:
            kept = [
                (not is_guess, at, reason)
                for address in addresses
                for is_guess, (at, reason) in self._reasons.get(address, {}).items()
                if at >= since
            ]
        return max(kept, default=(False, 0.0, ""))[2]


def _room_in(remembered: dict[Any, Any]) -> dict[Any, Any]:
    if len(remembered) >= MAX_REMEMBERED:
        remembered.clear()
    return remembered


client_log = ClientLog()
client_logger = logging.getLogger("kmq_spark.kafka.client")
client_logger.addFilter(client_log)
