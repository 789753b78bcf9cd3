"""
The result of one tracker batch for one markers partition, passed from the Spark side to the Kafka side.

Rule 1: values only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kmq_spark.core.decisions import Decisions
    from kmq_spark.core.state import Status


class UnreadableRecord(NamedTuple):
    """A record of the markers topic that cannot be read as a marker."""

    marker_offset: int
    error: str


@dataclass(frozen=True, slots=True)
class PartitionOutcome:
    """
    The result of folding one batch of one markers partition.

    Attributes:
        marker_partition: Number of the markers partition.
        status: Status of the partition after the batch.
        decisions: Redeliveries and dead letters to send.
        unreadable: Records that cannot be read as markers.
    """

    marker_partition: int
    status: Status
    decisions: Decisions
    unreadable: tuple[UnreadableRecord, ...] = ()
