"""
Select dead letters with a filter.

Rule 1: A letter matches when every field of the filter that is set matches. A field that is None matches every letter.

Source: SQS' redrive and RabbitMQ's shovel move all messages or none; their users asked for a filter.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import TYPE_CHECKING

from kmq_spark.core.markers import MAX_DUE_AT_MS, MessageId
from kmq_spark.errors import ConfigError

if TYPE_CHECKING:
    from kmq_spark.wire.dead_letter import DeadLetter


def parse_id(text: str) -> MessageId:
    """
    Parse the id of a dead letter.

    Args:
        text: `partition:offset`.

    Raises:
        ConfigError: *text* is not of that form.
    """
    found = MessageId.parse(text) if isinstance(text, str) else None
    if found is None:
        message = (
            f"id of a dead letter is not allowed: got {text!r}, partition:offset such as '0:17'; "
            "`kmq dlq list` shows the ids"
        )
        raise ConfigError(message)
    return found


@dataclass(frozen=True, slots=True)
class DeadLetterFilter:
    """
    A filter of dead letters. A letter matches when every field that is set matches.

    Attributes:
        reason: Text that the reason contains. With `*` (any text) or `?` (one character): a pattern that the whole
            reason matches.
        key: The message key; a `str` is compared as UTF-8.
        origin: `partition:offset` of the first copy in the queue topic.
        queue: The logical queue.
        dead_before: Append time in the dead-letter topic is before this instant: epoch milliseconds or an aware
            `datetime`.
        dead_after: Append time in the dead-letter topic is at or after this instant: epoch milliseconds or an aware
            `datetime`.

    Raises:
        ConfigError: A value is not allowed.
    """

    reason: str | None = None
    key: str | bytes | None = None
    origin: str | None = None
    queue: str | None = None
    dead_before: int | datetime | None = None
    dead_after: int | datetime | None = None

    def __post_init__(self) -> None:
        """Check the values. A filter that cannot match any letter is an error."""
        for name in ("reason", "queue", "origin"):
            if not isinstance(value := getattr(self, name), str | None) or value == "":
                message = (
                    f"filter {name} is not allowed: got {value!r}, allowed is a text that is not empty; leave it out"
                )
                raise ConfigError(message)
        if not isinstance(self.key, str | bytes | None):
            message = f"filter key is not allowed: got {self.key!r}, allowed is text or bytes; correct it"
            raise ConfigError(message)
        if self.origin is not None:
            parse_id(self.origin)
        before, after = _instant("dead_before", self.dead_before), _instant("dead_after", self.dead_after)
        if before is not None and after is not None and after >= before:
            message = f"filter can match nothing: got dead_after {after!r}, must be less than dead_before {before!r}"
            raise ConfigError(f"{message}; correct one of them")

    @property
    def is_empty(self) -> bool:
        """Whether no field is set, so that every letter matches."""
        return all(getattr(self, each.name) is None for each in fields(self))

    def matches(self, letter: DeadLetter) -> bool:
        """Return whether a dead letter matches."""
        key = self.key.encode() if isinstance(self.key, str) else self.key
        before, after = _instant("dead_before", self.dead_before), _instant("dead_after", self.dead_after)
        return (
            (self.reason is None or _reason_matches(self.reason, letter.reason))
            and (key is None or key == letter.key)
            and (self.origin is None or letter.origin == parse_id(self.origin))
            and (self.queue is None or self.queue == letter.queue)
            and (before is None or letter.dead_at_ms < before)
            and (after is None or letter.dead_at_ms >= after)
        )


def filter_of(where: DeadLetterFilter | Mapping[str, object] | None) -> DeadLetterFilter:
    """
    Return the filter that the caller's argument describes.

    Args:
        where: A filter, its fields by name, or None for a filter that matches every letter.

    Raises:
        ConfigError: A field is unknown, or a value is not allowed.
    """
    if isinstance(where, DeadLetterFilter):
        return where
    if not isinstance(where, Mapping | None):
        message = f"filter is not allowed: got {where!r}, a DeadLetterFilter or a mapping of its fields; correct it"
        raise ConfigError(message)
    known = [each.name for each in fields(DeadLetterFilter)]
    for name in where or ():
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
            message = f"unknown field of a filter: got {name!r}; {hint}"
            raise ConfigError(message)
    return DeadLetterFilter(**(where or {}))  # type: ignore[arg-type]  # its `__post_init__` rejects a wrong type


def _instant(name: str, value: object) -> int | None:
    """Validate an instant and return it as epoch milliseconds; None for None."""
    if value is None:
        return None
    if isinstance(value, datetime):
        if value.utcoffset() is None:
            message = f"filter {name} has no time zone: got {value!r}, an aware datetime; give it a tzinfo"
            raise ConfigError(message)
        return round(value.timestamp() * 1000)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_DUE_AT_MS:
        message = f"filter {name} is not allowed: got {value!r}, epoch milliseconds or an aware datetime; correct it"
        raise ConfigError(message)
    return value


def _reason_matches(wanted: str, reason: str) -> bool:
    # Not `fnmatch`: it reads `[` as a character class, and our reasons contain places such as `orders[0]@7`.
    if "*" not in wanted and "?" not in wanted:
        return wanted in reason
    pattern = re.escape(wanted).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(pattern, reason, re.DOTALL) is not None
