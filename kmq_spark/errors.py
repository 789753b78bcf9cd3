"""
The errors that kmq-spark raises, in one tree.

Rule 1: a message says what is wrong: got what, what is allowed; what to do. Lower case, no full stop, values by `!r`.
Rule 2: what a program may act on is an attribute, not only text.
Rule 3: bad input from the log never ends the tracker; a bug does.
"""

from __future__ import annotations


class KmqError(Exception):
    """
    The root of every error of this package.

    Attributes:
        retriable: True where the same call may succeed when made again.
    """

    retriable: bool = False


class ConfigError(KmqError, ValueError):
    """A setting is missing, unknown or out of bounds; raised before any connection is made."""


class SetupError(KmqError):
    """The machine lacks something we need (Java, a jar, disk space, a network); the message says what to do."""


class TopicError(KmqError):
    """A topic is missing, or has a setting that the queue cannot work with; the message names the repair."""


class WireError(KmqError, ValueError):
    """
    Bytes that we cannot read.

    Attributes:
        topic: Topic the bytes came from, empty where unknown.
        partition: Partition, -1 where unknown.
        offset: Offset, -1 where unknown.
    """

    def __init__(self, message: str, *, topic: str = "", partition: int = -1, offset: int = -1) -> None:
        """Keep the place of the bytes beside the text."""
        super().__init__(message)
        self.topic = topic
        self.partition = partition
        self.offset = offset


class MalformedRecordError(WireError):
    """Bytes that are no marker, or a marker with values out of bounds."""


class UnsupportedVersionError(WireError):
    """A marker of a version or type that this build does not know; upgrade the reader before the writers."""


class StateError(KmqError, ValueError):
    """State in the tracker's checkpoint that this build cannot read; a new one is rebuilt from the markers topic."""


class LedgerError(KmqError):
    """A ledger that cannot be read or written: nothing there, not ours, or of another version; the message tells."""


class SinkError(KmqError):
    """A batch that an exactly-once sink must not write: rows, query or slots that do not fit what is committed."""


class LeaseLostError(KmqError):
    """The caller's lease ran out; the message may have been, or will be, delivered again."""


class ClaimLostError(KmqError):
    """
    A claim of a coordination group is over; another member may hold the resource.

    Attributes:
        resource: What was claimed.
        epoch: Of the claim that is over.
    """

    def __init__(self, message: str, *, resource: str, epoch: int) -> None:
        """Keep which claim is over beside the text."""
        super().__init__(message)
        self.resource = resource
        self.epoch = epoch


class UsageError(KmqError, RuntimeError):
    """A call that is not allowed now: a closed client, another process after a fork, a second receiving thread."""


class FencedError(KmqError):
    """A newer tracker or producer has taken over; stop this one."""


class KafkaClientError(KmqError):
    """
    A Kafka client failed; raised `from` the client's own exception.

    Attributes:
        code: Name of the Kafka error, such as `_TRANSPORT` or `MSG_SIZE_TOO_LARGE`.
        retriable: As the client says.
    """

    def __init__(self, message: str, *, code: str = "", retriable: bool = False) -> None:
        """Keep the client's error code and whether a retry may help."""
        super().__init__(message)
        self.code = code
        self.retriable = retriable


class TransactionError(KafkaClientError):
    """
    A consumer's transaction of results and ENDs was not committed, or nobody knows whether it was.

    Attributes:
        nothing_written: True where it is known that neither a result nor an END was written: the messages are held as
            before. False where the broker could not be asked: the messages are let go, and the log decides, so that
            they are redelivered if nothing was written and never if it was.
    """

    def __init__(self, message: str, *, code: str = "", retriable: bool = False, nothing_written: bool) -> None:
        """Keep what is known of the outcome."""
        super().__init__(message, code=code, retriable=retriable)
        self.nothing_written = nothing_written
