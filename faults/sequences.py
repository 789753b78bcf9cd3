"""
Read what a copier has sent, and check it: every line once, in order, under the right sequence.

Rule 1: no code of the producer is used here, and none of `kmq producer verify`: the checker's own reader, and header
names as text.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from faults.topics import read_topic

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MOST_NAMED = 5


class Sent(NamedTuple):
    """One committed record of a queue topic."""

    partition: int
    offset: int
    line: int
    producer: str
    generation: int
    sequence: int


def line_of(number: int, length: int = 60) -> bytes:
    """Return a line of a file that is copied: its number first."""
    return (b"%08d " % number).ljust(length, b".") + b"\n"


def read_sent(bootstrap_servers: str, topic: str) -> list[Sent]:
    """
    Read every committed record of a topic, partition by partition.

    Raises:
        TimeoutError: The end was not reached in time.
    """
    found: list[Sent] = []
    for record in read_topic(topic, bootstrap_servers):
        headers = {name: value or b"" for name, value in record.headers}
        numbers = int(headers["kmq-generation"]), int(headers["kmq-sequence"])
        line = int((record.value or b"")[:8])
        found.append(Sent(record.partition, record.offset, line, headers["kmq-producer"].decode(), *numbers))
    return sorted(found)


def violations(sent: Iterable[Sent], lines: int) -> list[str]:
    """
    Return what is wrong with the copy of a file of so many lines, one message each; empty where nothing is.

    The sequence of a line is its number: one message a line, no line left out, none twice.
    """
    records = sorted(sent)
    counts = Counter(record.line for record in records)
    found: list[str] = []
    _note(found, "line missing", [line for line in range(1, lines + 1) if line not in counts])
    _note(found, "line sent twice", [line for line, count in counts.items() if count > 1])
    _note(found, "no such line", [line for line in counts if not 1 <= line <= lines])
    _note(found, "sequence is not the line's number", [each for each in records if each.sequence != each.line])
    _note(
        found,
        "out of order in its partition",
        [
            after
            for before, after in itertools.pairwise(records)
            if before.partition == after.partition and before.sequence >= after.sequence
        ],
    )
    by_sequence = sorted(records, key=lambda record: record.sequence)
    _note(
        found,
        "older life behind a newer one",
        [after for before, after in itertools.pairwise(by_sequence) if before.generation > after.generation],
    )
    return found


def _note(found: list[str], what: str, which: Sequence[object]) -> None:
    found += [f"{what}: {one}" for one in which[:MOST_NAMED]]
    if len(which) > MOST_NAMED:
        found.append(f"{what}: and {len(which) - MOST_NAMED} more")
