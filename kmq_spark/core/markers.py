"""
The types of the markers topic, independent of their encoding.

Rule 1: values only; no clock, no Kafka, no Spark.
Rule 2: names say which topic they refer to, queue or markers; no bare `offset` or `partition`.

Source: kafka-mq-go `pkg/proto/marker.proto` (V1), extended compatibly; ranges, TICK, RULES and TERM are additions of
kmq-spark.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kmq_spark.core.policy import QueueRules

MAX_QUEUE_PARTITION = 32_767
"""Largest queue partition that a marker may name; the packed table keeps 15 bits for it."""

MAX_MESSAGE_OFFSET = 2**48 - 1
"""Largest message offset that a marker may name; the packed table keeps 48 bits for it."""

MAX_MESSAGES_PER_MARKER = 100_000
"""Largest number of messages that one marker may cover; a range of 2**32 offsets is treated as hostile input."""

MAX_REDELIVER_AFTER_MS = 12 * 60 * 60 * 1000
"""Longest lease, 12 hours, as in SQS; a longer one is hostile input or a mistaken unit."""

MAX_DUE_AT_MS = 253_402_300_799_999
"""Latest instant that a deferral may name: the end of the year 9999, epoch milliseconds."""

MAX_DELIVERY_COUNT = 2**31 - 1
"""Largest delivery count that is kept; a larger one is reduced to this value."""

MAX_TEXT_CHARS = 1_000
"""Longest reason or consumer id that is kept. Both are copied into record headers, so longer ones are truncated."""

MAX_ERROR_CHARS = 300
"""Longest exception text that is kept. The state holds one text for each message whose last delivery failed."""

MAX_TERM = 2**63 - 1
"""Largest number of a term."""

_PLACE = re.compile(r"([0-9]{1,5}):([0-9]{1,15})")


class MarkerType(IntEnum):
    """The type of a marker; the numbers are those on the wire."""

    START = 0
    END = 1
    KEEPALIVE = 2
    TICK = 3
    RULES = 4
    TERM = 5


class Release(IntEnum):
    """What a KEEPALIVE does to the delivery; the numbers are those on the wire."""

    RENEWED = 0
    """The lease is renewed."""
    GIVEN_BACK = 1
    """The delivery ends; the message falls due after `redeliver_after_ms`, without backoff."""
    FAILED = 2
    """The delivery ends; the message falls due after `redeliver_after_ms` and the queue's backoff."""


class Outcome(IntEnum):
    """How a message ended; the numbers are those on the wire."""

    ACKED = 0
    REJECTED = 1
    EXPIRED = 2
    REDELIVERED = 3
    DEAD_LETTERED = 4


class MessageId(NamedTuple):
    """The identity of a message: its partition and offset in the queue topic."""

    queue_partition: int
    message_offset: int

    @property
    def text(self) -> str:
        """The text form, `partition:offset`, as used in headers and on the command line; `parse` reads it."""
        return f"{self.queue_partition}:{self.message_offset}"

    @classmethod
    def parse(cls, text: str | bytes | None) -> MessageId | None:
        """Parse `partition:offset`; return None if the text has another form or a number is out of bounds."""
        found = _PLACE.fullmatch(text.decode("latin-1") if isinstance(text, bytes) else text or "")
        if found is None or int(found[1]) > MAX_QUEUE_PARTITION or int(found[2]) > MAX_MESSAGE_OFFSET:
            return None
        return cls(int(found[1]), int(found[2]))


class OffsetRange(NamedTuple):
    """A range of `count` message offsets that begins at `first`."""

    first: int
    count: int  # type: ignore[assignment]  # hides `tuple.count`, which means nothing for a range


@dataclass(frozen=True, slots=True)
class Marker:
    """
    One record of the markers topic.

    Attributes:
        type: Type of the marker.
        queue_partition: Queue partition of all messages covered; -1 on a TICK, RULES and a TERM.
        ranges: Message offsets covered, ascending, without overlap; empty on a TICK, RULES and a TERM.
        redeliver_after_ms: START, KEEPALIVE: lease in milliseconds from the marker's append time. 0 on a KEEPALIVE
            means due at the next TICK (a release).
        delivery_count: START: number of deliveries of each message covered, including this one; at least 1.
        outcome: END: how the message ended.
        reason: END with REJECTED or DEAD_LETTERED: why. KEEPALIVE with FAILED: the handler's exception. Free text.
        consumer_id: The consumer or tracker that wrote the marker; free text.
        never_handed_out: KEEPALIVE: a release of messages that no handler saw. START: a deferral of messages that are
            handed out later. In both cases the delivery does not count.
        release: KEEPALIVE: whether it renews the lease or ends the delivery.
        due_at_ms: START of a deferral: the deadline is not before this instant, broker clock, epoch milliseconds; 0 =
            no such instant.
        rules: RULES: the queue's rules from this marker on.
        term: TERM: the number of the term that begins. TICK, END of a tracker: the term of its writer. 0 for none.
    """

    type: MarkerType
    queue_partition: int = -1
    ranges: tuple[OffsetRange, ...] = ()
    redeliver_after_ms: int = 0
    delivery_count: int = 1
    outcome: Outcome = Outcome.ACKED
    reason: str = ""
    consumer_id: str = ""
    never_handed_out: bool = False
    release: Release = Release.RENEWED
    due_at_ms: int = 0
    rules: QueueRules | None = None
    term: int = 0

    @property
    def is_by_tracker(self) -> bool:
        """Whether this is an END that only a tracker writes."""
        if self.type is not MarkerType.END:
            return False
        is_expired = self.outcome is Outcome.EXPIRED and self.term > 0
        return is_expired or self.outcome in {Outcome.REDELIVERED, Outcome.DEAD_LETTERED}

    @property
    def event(self) -> str:
        """What the marker says of a message, in a word, for its history."""
        if self.type is MarkerType.END:
            return self.outcome.name.lower().replace("_", "-")
        if self.type is MarkerType.START:
            return "deferred" if self.never_handed_out else "started"
        if self.never_handed_out:
            return "returned unseen"
        if self.release is Release.FAILED:
            return "failed"
        return "released" if self.release is Release.GIVEN_BACK or not self.redeliver_after_ms else "renewed"
