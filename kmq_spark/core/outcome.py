"""
What one batch of the tracker says about one markers partition: the value that travels from Spark to Kafka's side.

Rule 1: values only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kmq_spark.core.decisions import Decisions
    from kmq_spark.core.state import Status


class UnreadableRecord(NamedTuple):
    """A record of the markers topic that is no marker."""

    marker_offset: int
    error: str


@dataclass(frozen=True, slots=True)
class PartitionOutcome:
    """
    The result of folding one batch of one markers partition.

    Attributes:
        marker_partition: Markers partition.
        status: Where it stands after the batch.
        decisions: What is to be done.
        unreadable: Records set aside.
    """

    marker_partition: int
    status: Status
    decisions: Decisions
    unreadable: tuple[UnreadableRecord, ...] = ()
