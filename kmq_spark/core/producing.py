"""
The lives of a producer that resumes: its generation, its sequence, and what became of a transaction.

Rule 1: a life is one process with a producer id. Each life has the generation of the one before, plus 1.
Rule 2: the sequence counts the committed messages of all lives, without a gap: first life, first message = 1.
Rule 3: the position record in the log decides. A transaction whose outcome is unknown was committed if the record has
the sequence that the transaction would have written, and was not committed if it has the sequence before.

Source: Kafka's proposal "Idempotent Producer" (pid, sequence, generation), where a producer could resume; KIP-98 kept
the retries of one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from kmq_spark.core.names import is_name, name_error
from kmq_spark.errors import ConfigError

LONGEST_PRODUCER_ID = 100
"""Characters of a producer id: each message carries it in a header."""

MAX_COUNT = 2**63 - 1
"""Largest generation and sequence."""

SourcePosition = bytes | bool | int | float | str | list[Any] | dict[str, Any] | None
"""Where a producer is in its source: bytes or JSON; None before the first position."""


@dataclass(frozen=True, slots=True)
class ProducerState:
    """
    What a producer has committed.

    Attributes:
        generation: Number of the life that committed, the first is 1.
        sequence: Committed messages of all lives; the sequence of the newest one, 0 for none.
        position: Source position of the newest commit.
        at_ms: When it was committed, epoch milliseconds, clock of the producer's host.
        by: Process that committed: role, host and process id.
    """

    generation: int
    sequence: int
    position: SourcePosition = None
    at_ms: int = 0
    by: str = ""


class Outcome(Enum):
    """What became of a transaction, as the position record shows it."""

    COMMITTED = "committed"
    NOT_COMMITTED = "not committed"
    NEWER_LIFE = "newer life"
    """Another life has taken over, or the record was removed: this life ends."""


def check_producer_id(producer_id: object) -> str:
    """
    Return a producer id.

    Raises:
        ConfigError: It is none: 1 to 100 of A-Z a-z 0-9 . _ -.
    """
    if not is_name(producer_id, LONGEST_PRODUCER_ID):
        raise name_error("producer", producer_id, LONGEST_PRODUCER_ID)
    return producer_id


def check_own_id(producer_id: object) -> str:
    """
    Return a producer id that a program may choose.

    Raises:
        ConfigError: It is none, or it is that of a slot of a Spark sink.
    """
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
    """
    Return the state that a new life starts with, and writes first.

    Args:
        found: The newest committed state of the producer id; None for the first life.
        at_ms: Now, epoch milliseconds.
        by: The process.
    """
    if found is None:
        return ProducerState(1, 0, None, at_ms, by)
    return ProducerState(found.generation + 1, found.sequence, found.position, at_ms, by)


def outcome_of(found: ProducerState | None, before: ProducerState, after: ProducerState) -> Outcome:
    """
    Find out what became of a transaction whose commit has an unknown outcome.

    Args:
        found: The newest committed state, read after the open transaction of this producer id was ended.
        before: The state before the transaction, committed by this life.
        after: The state that the transaction would have written.

    Returns:
        NOT_COMMITTED also for a transaction without messages: it may be repeated.
    """
    if found is None or found.generation != before.generation:
        return Outcome.NEWER_LIFE
    if found.sequence == before.sequence:
        return Outcome.NOT_COMMITTED
    return Outcome.COMMITTED if found.sequence == after.sequence else Outcome.NEWER_LIFE
