"""
What a resuming producer has committed: generation, sequence and position of its source.

Rule 1: a life is one process with a producer id. Each life has the generation of the one before, plus 1.
Rule 2: the sequence counts the committed messages of all lives, without a gap: first life, first message = 1.

Source: Kafka's proposal "Idempotent Producer" (pid, sequence, generation), where a producer could resume; KIP-98 kept
the retries of one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kmq_spark.core.names import is_name, name_error
from kmq_spark.errors import ConfigError

LONGEST_PRODUCER_ID = 100
"""Characters of a producer id: each message carries it in a header."""

MAX_COUNT = 2**63 - 1
"""Largest generation and sequence."""

SourcePosition = bytes | bool | int | float | str | list[Any] | dict[str, Any] | None
"""Where a producer is in its source: bytes or JSON; None before the first commit."""


@dataclass(frozen=True, slots=True)
class ProducerState:
    """What a producer has committed, when by its host's clock, and by which process."""

    generation: int
    sequence: int
    position: SourcePosition = None
    at_ms: int = 0
    by: str = ""


def check_producer_id(producer_id: object) -> str:
    """Return a producer id."""
    if not is_name(producer_id, LONGEST_PRODUCER_ID):
        raise name_error("producer", producer_id, LONGEST_PRODUCER_ID)
    return producer_id


def check_own_id(producer_id: object) -> str:
    """Return a producer id that a program may choose."""
    if slot_of(checked := check_producer_id(producer_id)) is not None:
        message = f"producer name is reserved: got {checked!r}, which a slot of a Spark sink has; choose another name"
        raise ConfigError(message)
    return checked


def slot_id(sink_id: str, slot: int) -> str:
    """Return the producer id of a slot of a Spark sink."""
    return f"{sink_id}.slot-{slot}"


def slot_of(producer_id: str) -> tuple[str, int] | None:
    """Return sink id and slot of a producer id; None where it is not that of a slot."""
    sink_id, separator, slot = producer_id.rpartition(".slot-")
    return (sink_id, int(slot)) if separator and slot.isdecimal() and slot.isascii() else None


def next_life(found: ProducerState | None, *, at_ms: int, by: str) -> ProducerState:
    """Return the state that a new life starts with, and writes first; *found* is the newest one of the id."""
    if found is None:
        return ProducerState(1, 0, None, at_ms, by)
    return ProducerState(found.generation + 1, found.sequence, found.position, at_ms, by)
