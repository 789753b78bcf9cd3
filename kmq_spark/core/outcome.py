"""
The result of one tracker batch for one markers partition, passed from the Spark side to the Kafka side.

Rule 1: values only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kmq_spark.core.decisions import Decisions
    from kmq_spark.core.state import Status


@dataclass(frozen=True, slots=True)
class PartitionOutcome:
    """
    The result of folding one batch of one markers partition.

    Attributes:
        unreadable: What the first records say that cannot be read as markers; `Counters.unreadable` has their number.
    """

    marker_partition: int
    status: Status
    decisions: Decisions
    unreadable: tuple[str, ...] = ()
