"""What `kmq producer verify` says of the sequences that a queue topic holds."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kmq_spark.core.sequences import MOST_NAMED, SequenceAudit, SequenceReport


def audit_of(
    *records: tuple[int, int, int], committed: int = 0, truncated: frozenset[int] = frozenset()
) -> SequenceReport:
    """Return the report of some records: partition, generation, sequence."""
    audit = SequenceAudit(truncated)
    for record in records:
        audit.add(*record)
    return audit.report(committed)


def test_sequence_without_holes_is_exact() -> None:
    report = audit_of((0, 1, 1), (0, 1, 3), (0, 2, 4), (1, 1, 2), committed=4)
    assert report.is_exact
    assert (report.messages, report.first, report.last, report.holes) == (4, 1, 4, ())
    assert [(life.generation, life.first, life.last, life.messages) for life in report.generations] == [
        (1, 1, 3, 3),
        (2, 4, 4, 1),
    ]


def test_no_message_is_exact_where_none_was_committed() -> None:
    empty = audit_of()
    assert (empty.is_exact, empty.messages, empty.first, empty.last, empty.committed) == (True, 0, 0, 0, 0)
    assert SequenceAudit().report() == empty
    lost = audit_of(committed=3)
    assert (lost.holes, lost.committed, lost.last) == (((1, 3),), 3, 0)


def test_holes_are_named_at_the_beginning_in_between_and_at_the_end() -> None:
    report = audit_of((0, 1, 3), (0, 1, 4), (0, 2, 7), committed=9)
    assert (report.holes, report.missing) == (((1, 2), (5, 6), (8, 9)), 6)
    # The end belongs to no life: no message stands behind it.
    assert [life.missing for life in report.generations] == [2, 2]
    assert not report.is_exact


def test_repeat_is_named_within_a_life_and_across_lives() -> None:
    report = audit_of((0, 1, 1), (0, 1, 2), (1, 1, 2), (0, 2, 3), (1, 2, 1))
    assert (report.repeats, report.repeated) == (2, (1, 2))
    assert [life.repeats for life in report.generations] == [1, 1]
    # Partition 1 has 2 and then 1.
    assert report.out_of_order == 1
    # The same one again at once, and one that is older still.
    assert audit_of((0, 1, 1), (0, 1, 2), (0, 1, 2), (0, 1, 1)).out_of_order == 2


def test_messages_that_retention_removed_are_no_holes() -> None:
    """Partition 0 lost its beginning: anything below 5 may have been in it, not 7."""
    records = ((0, 1, 5), (1, 1, 2), (1, 1, 6), (1, 1, 8))
    report = audit_of(*records, truncated=frozenset({0}))
    assert (report.removed, report.holes) == (3, ((7, 7),))
    assert audit_of(*records).holes == ((1, 1), (3, 4), (7, 7))


def test_partition_that_was_removed_as_a_whole_explains_every_hole() -> None:
    report = audit_of((0, 1, 3), committed=5, truncated=frozenset({1}))
    assert (report.removed, report.missing, report.is_exact) == (4, 0, True)


def test_no_more_holes_and_repeats_are_named_than_fit_on_a_screen() -> None:
    report = audit_of(*((0, 1, 2 * number) for number in range(1, 101) for _ in range(2)))
    assert (len(report.holes), report.missing) == (MOST_NAMED, 100)
    assert (len(report.repeated), report.repeats) == (MOST_NAMED, 100)


RECORDS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(1, 30)), max_size=40)


@given(RECORDS, st.integers(0, 35), st.frozensets(st.integers(0, 2)))
def test_report_agrees_with_counting_one_by_one(
    records: list[tuple[int, int, int]], committed: int, truncated: frozenset[int]
) -> None:
    report = audit_of(*records, committed=committed, truncated=truncated)
    counts = Counter(sequence for _, _, sequence in records)
    end = max([*counts, committed], default=0)
    first_of = {
        partition: min((sequence for place, _, sequence in records if place == partition), default=end + 1)
        for partition in truncated
    }
    absent = [sequence for sequence in range(1, end + 1) if sequence not in counts]
    removed = [sequence for sequence in absent if any(sequence < first for first in first_of.values())]
    assert report.removed == len(removed)
    assert report.missing == len(absent) - len(removed)
    named = [sequence for first, last in report.holes for sequence in range(first, last + 1)]
    assert named == [sequence for sequence in absent if sequence not in removed]
    assert report.repeats == len(records) - len(counts)
    assert sum(life.repeats for life in report.generations) == report.repeats
    assert sum(life.messages for life in report.generations) == len(records)
    last = max(counts, default=0)
    assert sum(life.missing for life in report.generations) == sum(sequence <= last for sequence in named)
