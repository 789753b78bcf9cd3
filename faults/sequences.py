"""
Read what was sent to a queue, and check it: every line or row once, under a sequence without a gap.

Rule 1: no code of the producer is used here, and none of `kmq producer verify`: the checker's own reader, and header
names as text.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from faults.topics import read_topic, record_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MOST_NAMED = 5


class Sent(NamedTuple):
    """One committed record of a queue topic; no producer, 0 and 0 where it has no headers of one."""

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
    """Read every committed record of a topic, partition by partition."""
    found: list[Sent] = []
    for record in map(record_of, read_topic(topic, bootstrap_servers)):
        generation, sequence = record.number("kmq-generation") or 0, record.number("kmq-sequence") or 0
        producer = (record.header("kmq-producer") or b"").decode()
        found.append(Sent(*record.place, int((record.value or b"")[:8]), producer, generation, sequence))
    return sorted(found)


def violations(sent: Iterable[Sent], lines: int) -> list[str]:
    """Return what is wrong with the copy of a file of *lines* lines: a line's sequence is its number."""
    records = sorted(sent)
    found = _lines(records, lines)
    found += _named("sequence is not the line's number", [each for each in records if each.sequence != each.line])
    return found + _order(records)


def sink_violations(sent: Iterable[Sent], rows: int) -> list[str]:
    """
    Return what is wrong with what a sink wrote of *rows* numbered rows.

    Each row is there once, each slot is a producer whose sequences have no gap, and the messages of a slot have the
    order of their sequences.
    """
    records = sorted(sent)
    by_producer: defaultdict[str, list[Sent]] = defaultdict(list)
    for record in records:
        by_producer[record.producer].append(record)
    found = _lines(records, rows) + _named("record without a producer", by_producer.pop("", []))
    for producer, own in sorted(by_producer.items()):
        counts = Counter(record.sequence for record in own)
        gaps = [each for each in range(1, max(counts) + 1) if each not in counts]
        found += _named(f"sequence missing of {producer}", gaps)
        found += _named(f"sequence repeated of {producer}", [each for each, count in counts.items() if count > 1])
        found += _order(own)
    return found


def _lines(records: Sequence[Sent], lines: int) -> list[str]:
    counts = Counter(record.line for record in records)
    return [
        *_named("line missing", [line for line in range(1, lines + 1) if line not in counts]),
        *_named("line sent twice", [line for line, count in counts.items() if count > 1]),
        *_named("no such line", [line for line in counts if not 1 <= line <= lines]),
    ]


def _order(records: Sequence[Sent]) -> list[str]:
    """Return where the records of one producer, sorted by partition and offset, are out of order."""
    by_sequence = sorted(records, key=lambda record: record.sequence)
    behind = [
        after
        for before, after in pairwise(records)
        if before.partition == after.partition and before.sequence >= after.sequence
    ]
    older = [after for before, after in pairwise(by_sequence) if before.generation > after.generation]
    return _named("out of order in its partition", behind) + _named("older life behind a newer one", older)


def _named(what: str, which: Sequence[object]) -> list[str]:
    rest = [f"{what}: and {len(which) - MOST_NAMED} more"] if len(which) > MOST_NAMED else []
    return [f"{what}: {one}" for one in which[:MOST_NAMED]] + rest
