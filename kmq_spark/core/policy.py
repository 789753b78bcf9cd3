"""
What is done with a message whose lease ran out.

Rule 1: a function of the table and the queue's rules alone: the same log gives the same decisions.

Source: Kafka share groups for the limit (`group.share.delivery.count.limit`, 5); kmq and kafka-mq-go know none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from kmq_spark.core.backoff import Backoff


class DecisionAction(IntEnum):
    """What is to be done with a message."""

    REDELIVER = 1
    DEAD_LETTER = 2


@dataclass(frozen=True, slots=True)
class Rules:
    """
    The rules of one queue, as the fold of one markers partition needs them.

    Attributes:
        max_deliveries: Last allowed delivery; 0 = no limit. The default is that of Kafka's share groups.
        max_decisions_per_tick: Most messages that one TICK decides; the rest stays due for the next. What one TICK
            decides should fit into one Kafka transaction.
        decide_from_marker_offset: TICKs below this marker offset move the clock and decide nothing: every END that an
            earlier tracker committed lies below it, so nothing is decided twice.
        backoff: How much longer a message rests after a delivery whose lease ran out, or whose handler failed.
        dead_letters_expired: Whether a message whose time to live is over becomes a dead letter; else it is dropped.
    """

    max_deliveries: int = 5
    max_decisions_per_tick: int = 10_000
    decide_from_marker_offset: int = 0
    backoff: Backoff = field(default_factory=Backoff)
    dead_letters_expired: bool = False


def is_exhausted(delivery_count: int, rules: Rules) -> bool:
    """Return whether a message must not be delivered again."""
    return 0 < rules.max_deliveries <= delivery_count


def exhausted_reason(delivery_count: int, rules: Rules) -> str:
    """Return the text that a dead letter carries for it."""
    return f"delivery limit reached: {delivery_count} of {rules.max_deliveries}"
