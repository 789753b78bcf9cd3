"""
Decide whether a message whose lease ran out is redelivered or dead-lettered.

Rule 1: the decision depends only on the table and the queue's rules. The same log gives the same decisions.

Source: the delivery limit is that of Kafka share groups (`group.share.delivery.count.limit`, 5); kmq and kafka-mq-go
have no such limit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from kmq_spark.core.backoff import Backoff, BackoffKind

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_RULES_VERSION = 2**53
"""Largest version of a queue's rules; JSON readers represent integers exactly up to this value."""

MAX_MAX_DELIVERIES = 10_000
"""Largest delivery limit that a queue may have."""

MAX_BACKOFF_MS = 12 * 60 * 60 * 1000
"""Longest backoff, 12 hours, the same as the longest lease."""


class DecisionAction(IntEnum):
    """What the tracker does with a decided message."""

    REDELIVER = 1
    DEAD_LETTER = 2


@dataclass(frozen=True, slots=True)
class QueueRules:
    """
    The rules of a queue, as a RULES marker contains them.

    Attributes:
        version: Number of the change that set these rules, from 1; 0 for the defaults.
        max_deliveries: Last allowed delivery; 0 = no limit. The default is that of Kafka's share groups.
        backoff: Extra delay before redelivery, after a delivery whose lease ran out or whose handler failed.
        dead_letters_expired: Whether an expired message becomes a dead letter; otherwise it is dropped.
    """

    version: int
    max_deliveries: int = 5
    backoff: Backoff = field(default_factory=Backoff)
    dead_letters_expired: bool = False

    def fault(self) -> str:
        """Return a text that names the first value out of bounds; empty if all values are within bounds."""
        backoff = self.backoff
        bounds: tuple[tuple[str, float, float, float], ...] = (
            ("version", self.version, 1, MAX_RULES_VERSION),
            ("max_deliveries", self.max_deliveries, 0, MAX_MAX_DELIVERIES),
            ("backoff_initial_ms", backoff.initial_ms, 0, MAX_BACKOFF_MS),
            ("backoff_max_ms", backoff.max_ms, 0, MAX_BACKOFF_MS),
            ("backoff_jitter", backoff.jitter, 0, 1),
        )
        for name, value, smallest, largest in bounds:
            if not smallest <= value <= largest:
                return f"{name} out of bounds: got {value!r}, allowed {smallest} to {largest}"
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Return the rules as JSON values, by their names in the settings file."""
        return {
            "version": self.version,
            "max_deliveries": self.max_deliveries,
            "backoff": self.backoff.kind.name.lower(),
            "backoff_initial_ms": self.backoff.initial_ms,
            "backoff_max_ms": self.backoff.max_ms,
            "backoff_jitter": self.backoff.jitter,
            "expired": "dead-letter" if self.dead_letters_expired else "drop",
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> QueueRules:
        """Read what `to_dict` returned; other keys are ignored."""
        try:
            kind = BackoffKind[str(values["backoff"]).upper()]
            initial_ms, max_ms = int(values["backoff_initial_ms"]), int(values["backoff_max_ms"])
            backoff = Backoff(kind, initial_ms, max_ms, float(values["backoff_jitter"]))
            expired = {"drop": False, "dead-letter": True}[values["expired"]]
            rules = cls(int(values["version"]), int(values["max_deliveries"]), backoff, expired)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"cannot read the rules of a queue: got {dict(values)!r}") from error
        if fault := rules.fault():
            raise ValueError(f"cannot read the rules of a queue: {fault}")
        return rules


DEFAULT_RULES = QueueRules(version=0)
"""The rules of a queue that has no record of its own."""


_LAST_ERROR = "; last error: "


def is_exhausted(delivery_count: int, rules: QueueRules) -> bool:
    """Return whether a message has reached its delivery limit."""
    return 0 < rules.max_deliveries <= delivery_count


def exhausted_reason(delivery_count: int, rules: QueueRules, last_error: str = "") -> str:
    """Return the reason of a dead letter at the delivery limit, with the exception of the last delivery if known."""
    return with_last_error(f"delivery limit reached: {delivery_count} of {rules.max_deliveries}", last_error)


def with_last_error(reason: str, last_error: str) -> str:
    """Return *reason* with *last_error* appended, unless there is no error or the reason contains one already."""
    return f"{reason}{_LAST_ERROR}{last_error}" if last_error and _LAST_ERROR not in reason else reason
