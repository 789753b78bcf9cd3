"""
The exception classes of kmq-spark; `KmqError` is their base class.

Rule 1: an error text has the form *what is wrong: got value, what is allowed; what to do*. Lower case, no full stop,
values formatted with `!r`.
Rule 2: information on which a program may act is an attribute, not only text.
Rule 3: invalid input from the log never stops the tracker; a bug does.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class KmqError(Exception):
    """
    The base class of all errors of this package.

    Attributes:
        retriable: Whether the same call may succeed if it is repeated.
    """

    retriable: bool = False


class ConfigError(KmqError, ValueError):
    """A setting is missing, unknown or out of bounds; raised before any connection is opened."""


class SetupError(KmqError):
    """The machine lacks a requirement (Java, a jar, disk space, a network); the message says what to do."""


@contextmanager
def needing(extra: str, task: str) -> Iterator[None]:
    """Name the extra to install where an import in the block fails."""
    try:
        yield
    except ImportError as error:
        raise SetupError(
            f"cannot {task}: module {error.name!r} is not installed; run `pip install 'kmq-spark[{extra}]'`"
        ) from error


class TopicError(KmqError):
    """A topic is missing, or has a setting with which the queue cannot work; the message says how to repair it."""


class WireError(KmqError, ValueError):
    """
    A record cannot be read.

    Attributes:
        topic: Topic of the record; empty if unknown.
        partition: Partition of the record; -1 if unknown.
        offset: Offset of the record; -1 if unknown.
    """

    def __init__(self, message: str, *, topic: str = "", partition: int = -1, offset: int = -1) -> None:
        super().__init__(message)
        self.topic = topic
        self.partition = partition
        self.offset = offset


class MalformedRecordError(WireError):
    """The bytes are not a marker, or the marker has values out of bounds."""


class UnsupportedVersionError(WireError):
    """A marker has a version or type that this build does not know; upgrade readers before writers."""


class StateError(KmqError, ValueError):
    """The tracker's state in the checkpoint cannot be read by this build; a new checkpoint rebuilds the state."""


class LedgerError(KmqError):
    """A ledger cannot be read or written: it is missing, is not a ledger of kmq-spark, or has another version."""


class SinkError(KmqError):
    """A batch that an exactly-once sink must not write: rows, query or slots that do not fit what is committed."""


class LeaseLostError(KmqError):
    """The caller's lease ran out; the message may have been delivered again already, or will be."""


class UnreadableError(KmqError, ValueError):
    """
    The value of a message cannot be read by the consumer's deserializer; its bytes are in `Message.value`.

    A handler of `QueueConsumer.run` may let it through: the message becomes a dead letter.
    """


class BatchFailed(KmqError):  # noqa: N818  # programs raise it to `run`; nothing of ours raises it to a program
    """
    Some messages of a batch failed; the others are done.

    A handler of `QueueConsumer.run` raises it.

    Attributes:
        failures: Exception or text by index of the message.
    """

    def __init__(self, failures: Mapping[int, str | BaseException]) -> None:
        super().__init__(f"messages of a batch failed: got {failures!r}; the handler of `run` raises this")
        self.failures = failures


class ClaimLostError(KmqError):
    """
    A claim of a coordination group is over; another member may hold the resource.

    Attributes:
        resource: What was claimed.
        epoch: Epoch of the claim that is over.
    """

    def __init__(self, message: str, *, resource: str, epoch: int) -> None:
        super().__init__(message)
        self.resource = resource
        self.epoch = epoch


class UsageError(KmqError, RuntimeError):
    """The call is not allowed now: the client is closed, was created before a fork, or another thread receives."""


class FencedError(KmqError):
    """A newer tracker or producer has taken over; stop this one."""


class KafkaClientError(KmqError):
    """
    A Kafka client failed; raised `from` the client's own exception.

    Attributes:
        code: Name of the Kafka error, such as `_TRANSPORT` or `MSG_SIZE_TOO_LARGE`.
        retriable: Whether the client reports the error as retriable.
    """

    def __init__(self, message: str, *, code: str = "", retriable: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.retriable = retriable


class TransactionError(KafkaClientError):
    """
    A consumer's transaction of results and ENDs was not committed, or its outcome is unknown.

    Attributes:
        nothing_written: True if it is certain that neither a result nor an END was written; the consumer then still
            holds the messages. False if the broker could not be asked; the consumer then no longer holds them. They are
            redelivered if the transaction was not committed, and not redelivered if it was.
    """

    def __init__(self, message: str, *, code: str = "", retriable: bool = False, nothing_written: bool) -> None:
        super().__init__(message, code=code, retriable=retriable)
        self.nothing_written = nothing_written
