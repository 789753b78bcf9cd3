"""Select dead letters with a filter: SQS' redrive and RabbitMQ's shovel move all messages or none."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from datetime import datetime
from typing import TYPE_CHECKING

from kmq_spark.core.markers import MessageId
from kmq_spark.errors import ConfigError

if TYPE_CHECKING:
    from kmq_spark.wire.dead_letter import DeadLetter


def parse_id(text: str) -> MessageId:
    """
    Parse the id of a dead letter, `partition:offset`.

    Raises:
        ConfigError: *text* is not of that form.
    """
    found = MessageId.parse(text) if isinstance(text, str) else None
    if found is None:
        message = (
            f"id of a dead letter is not allowed: got {text!r}; expected partition:offset such as '0:17'; "
            "`kmq dlq list` shows the ids"
        )
        raise ConfigError(message)
    return found


@dataclass(frozen=True, slots=True)
class DeadLetterFilter:
    """
    A filter of dead letters. A letter matches when every field that is set matches; at least one must be set.

    Attributes:
        reason: Text that the reason contains. With `*` (any text) or `?` (one character): a pattern that the whole
            reason matches.
        key: The message key; a `str` is compared as UTF-8.
        origin: `partition:offset` of the first copy in the queue topic.
        logical_queue: The logical queue.
        dead_before: Append time in the dead-letter topic is before this instant, an aware `datetime`.
        dead_after: Append time in the dead-letter topic is at or after this instant, an aware `datetime`.

    Raises:
        ConfigError: A value is not allowed, or no field is set.
    """

    reason: str | None = None
    key: str | bytes | None = None
    origin: str | None = None
    logical_queue: str | None = None
    dead_before: datetime | None = None
    dead_after: datetime | None = None

    def __post_init__(self) -> None:
        if all(getattr(self, each.name) is None for each in fields(self)):
            message = "the filter is empty: expected at least one field; to select all letters, set all"
            raise ConfigError(message)
        for name, kind in (("reason", str), ("key", str | bytes), ("origin", str), ("logical_queue", str)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, kind) or (value == "" and name != "key")):
                message = f"filter {name} is not allowed: got {value!r}; expected a text that is not empty"
                raise ConfigError(message)
        if self.origin is not None:
            parse_id(self.origin)
        for name in ("dead_before", "dead_after"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, datetime) or value.utcoffset() is None):
                message = f"filter {name} is not allowed: got {value!r}; expected an aware datetime; give it a tzinfo"
                raise ConfigError(message)
        if self.dead_before is not None and self.dead_after is not None and self.dead_after >= self.dead_before:
            message = f"filter can match nothing: got dead_after {self.dead_after} and dead_before {self.dead_before}"
            raise ConfigError(f"{message}; correct one of them")

    def matches(self, letter: DeadLetter) -> bool:
        """Return whether a dead letter matches."""
        key = self.key.encode() if isinstance(self.key, str) else self.key
        return (
            (self.reason is None or _reason_matches(self.reason, letter.reason))
            and (key is None or key == letter.key)
            and (self.origin is None or letter.origin == parse_id(self.origin))
            and (self.logical_queue is None or self.logical_queue == letter.logical_queue)
            and (self.dead_before is None or letter.dead_at_ms < _ms(self.dead_before))
            and (self.dead_after is None or letter.dead_at_ms >= _ms(self.dead_after))
        )


def _ms(instant: datetime) -> int:
    return round(instant.timestamp() * 1000)


def _reason_matches(wanted: str, reason: str) -> bool:
    # Not `fnmatch`: it reads `[` as a character class, and our reasons contain places such as `orders[0]@7`.
    if "*" not in wanted and "?" not in wanted:
        return wanted in reason
    pattern = re.escape(wanted).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(pattern, reason, re.DOTALL) is not None
