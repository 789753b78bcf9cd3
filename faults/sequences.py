"""
Read what was sent to a queue, and check it: every line or row once, under a sequence without a gap.

Rule 1: no code of the producer is used here, and none of `kmq producer verify`: the checker's own reader, and header
names as text.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple

from faults.topics import read_topic

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
    """
    Read every committed record of a topic, partition by partition.

    Raises:
        TimeoutError: The end was not reached in time.
    """
    found: list[Sent] = []
    for record in read_topic(topic, bootstrap_servers):
        headers = {name: value or b"" for name, value in record.headers}
        numbers = int(headers.get("kmq-generation", 0)), int(headers.get("kmq-sequence", 0))
        line = int((record.value or b"")[:8])
        producer = headers.get("kmq-producer", b"").decode()
        found.append(Sent(record.partition, record.offset, line, producer, *numbers))
    return sorted(found)


def violations(sent: Iterable[Sent], lines: int) -> list[str]:
    """
    Return what is wrong with the copy of a file of *lines* lines, one message each; empty where nothing is.

    The sequence of a line is its number: one message a line, no line left out, none twice.
    """
    records = sorted(sent)
    found = _line_violations(records, lines)
    _note(found, "sequence is not the line's number", [each for each in records if each.sequence != each.line])
    return found + _order_violations(records)


def sink_violations(sent: Iterable[Sent], rows: int) -> list[str]:
    """
    Return what is wrong with what a sink wrote of *rows* numbered rows, one message each; empty where nothing is.

    Each row is there once, each slot is a producer whose sequences have no gap, and the messages of a slot have the
    order of their sequences.
    """
    records = sorted(sent)
    found = _line_violations(records, rows)
    by_producer: defaultdict[str, list[Sent]] = defaultdict(list)
    for record in records:
        by_producer[record.producer].append(record)
    _note(found, "record without a producer", by_producer.pop("", []))
    for producer, own in sorted(by_producer.items()):
        counts = Counter(record.sequence for record in own)
        last = max(counts)
        _note(found, f"sequence missing of {producer}", [each for each in range(1, last + 1) if each not in counts])
        _note(found, f"sequence repeated of {producer}", [each for each, count in counts.items() if count > 1])
        found += _order_violations(own)
    return found


def repeated_rows(sent: Iterable[Sent]) -> int:
    """Return how many records repeat a row that another record has."""
    return sum(count - 1 for count in Counter(record.line for record in sent).values())


def _line_violations(records: Sequence[Sent], lines: int) -> list[str]:
    counts = Counter(record.line for record in records)
    found: list[str] = []
    _note(found, "line missing", [line for line in range(1, lines + 1) if line not in counts])
    _note(found, "line sent twice", [line for line, count in counts.items() if count > 1])
    _note(found, "no such line", [line for line in counts if not 1 <= line <= lines])
    return found


def _order_violations(records: Sequence[Sent]) -> list[str]:
    """Return where the records of one producer, sorted by partition and offset, are out of order."""
    found: list[str] = []
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
