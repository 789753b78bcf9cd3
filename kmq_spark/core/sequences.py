"""
Check the sequence of a producer over the messages that a queue topic holds: holes, repeats, order.

Rule 1: a message that retention removed is no hole. A partition whose beginning was removed may have held any sequence
below the first one that it still has.
Rule 2: messages of one partition come in the order of the log, partitions in any order.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Sequences = NDArray[np.int64]

MOST_NAMED = 20
"""Holes and repeats that a report names one by one; the others are counted."""


@dataclass(frozen=True, slots=True)
class GenerationReport:
    """
    The messages of one life.

    Attributes:
        generation: Its number.
        first: Smallest sequence.
        last: Largest sequence.
        messages: Records, repeats included.
        missing: Sequences that are missing right before or between its messages.
        repeats: Records beyond the first one of a sequence.
    """

    generation: int
    first: int
    last: int
    messages: int
    missing: int
    repeats: int


@dataclass(frozen=True, slots=True)
class SequenceReport:
    """
    What the queue topic holds of one producer.

    Attributes:
        messages: Records, repeats included.
        first: Smallest sequence, 0 where there is no message.
        last: Largest sequence, 0 where there is no message.
        committed: Sequence of the position record, 0 where there is none.
        removed: Sequences that are missing and may have been removed by retention.
        missing: Sequences that are missing and cannot have been removed by retention.
        holes: The first of them, as first and last sequence of each hole.
        repeats: Records beyond the first one of a sequence.
        repeated: The first sequences that are repeated.
        out_of_order: Records whose sequence is not larger than that of an earlier record of their partition.
        generations: By life, in order.
    """

    messages: int
    first: int
    last: int
    committed: int
    removed: int
    missing: int
    holes: tuple[tuple[int, int], ...]
    repeats: int
    repeated: tuple[int, ...]
    out_of_order: int
    generations: tuple[GenerationReport, ...]

    @property
    def is_exact(self) -> bool:
        """Whether nothing is missing, repeated or out of order."""
        return not (self.missing or self.repeats or self.out_of_order)


class SequenceAudit:
    """
    Collects the sequences of one producer.

    Args:
        truncated: Partitions whose first records are gone.
    """

    def __init__(self, truncated: frozenset[int] = frozenset()) -> None:
        """Start with none."""
        self._truncated = truncated
        self._sequences: defaultdict[int, array[int]] = defaultdict(lambda: array("q"))
        self._first: dict[int, int] = {}
        self._newest: dict[int, int] = {}
        self._out_of_order = 0

    def add(self, partition: int, generation: int, sequence: int) -> None:
        """Add a record, in the order of its partition."""
        self._sequences[generation].append(sequence)
        newest = self._newest.get(partition, 0)
        if sequence <= newest:
            self._out_of_order += 1
        else:
            self._newest[partition] = sequence
        self._first[partition] = min(sequence, self._first.get(partition, sequence))

    def report(self, committed: int = 0) -> SequenceReport:
        """
        Return what was found.

        Args:
            committed: Sequence of the position record, read before the first record: all up to it must be there.
        """
        lives: dict[int, Sequences] = {
            generation: np.array(found, np.int64) for generation, found in sorted(self._sequences.items())
        }
        everything = np.concatenate(list(lives.values())) if lives else np.empty(0, np.int64)
        present, counts = np.unique(everything, return_counts=True)
        last = int(present[-1]) if len(present) else 0
        # Bounds on both sides, so that what is missing before the first and behind the last is a hole as well.
        marks = np.concatenate(([0], present, [max(last, committed) + 1]))
        begins, ends = marks[:-1] + 1, marks[1:] - 1
        is_hole = begins <= ends
        begins, ends = begins[is_hole], ends[is_hole]
        removed_below = self._removed_below(max(last, committed))
        removed = np.clip(np.minimum(ends, removed_below - 1) - begins + 1, 0, None)
        missing = ends - begins + 1 - removed
        begins = np.maximum(begins, removed_below)[missing > 0]
        ends = ends[missing > 0]
        repeated = present[counts > 1]
        return SequenceReport(
            messages=len(everything),
            first=int(present[0]) if len(present) else 0,
            last=last,
            committed=committed,
            removed=int(removed.sum()),
            missing=int(missing.sum()),
            holes=tuple(
                (int(first), int(end)) for first, end in zip(begins[:MOST_NAMED], ends[:MOST_NAMED], strict=True)
            ),
            repeats=int((counts - 1).sum()),
            repeated=tuple(map(int, repeated[:MOST_NAMED])),
            out_of_order=self._out_of_order,
            generations=self._lives(lives, begins, ends),
        )

    def _removed_below(self, end: int) -> int:
        """Return the sequence below which retention may have removed any."""
        bounds = [self._first.get(partition, end + 1) for partition in self._truncated]
        return max(bounds, default=0)

    @staticmethod
    def _lives(lives: dict[int, Sequences], begins: Sequences, ends: Sequences) -> tuple[GenerationReport, ...]:
        """Return a report of each life; what is missing counts for the life of the message behind the hole."""
        found = []
        before, seen = 0, np.empty(0, np.int64)
        for generation, sequences in lives.items():
            distinct = np.unique(sequences)
            last = max(before, int(distinct[-1]))
            # The holes of this life: those parts that lie between the last message of earlier lives and its own last.
            missing = np.clip(np.minimum(ends, last) - np.maximum(begins, before + 1) + 1, 0, None)
            repeats = len(sequences) - len(distinct) + int(np.isin(distinct, seen).sum())
            found.append(
                GenerationReport(
                    generation, int(distinct[0]), int(distinct[-1]), len(sequences), int(missing.sum()), repeats
                )
            )
            before, seen = last, np.union1d(seen, distinct)
        return tuple(found)
