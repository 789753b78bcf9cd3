"""The decisions of a batch in the order of their payloads: each of them once, whatever was decided twice."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

from confluent_kafka import Message
from hypothesis import given
from hypothesis import strategies as st

from kmq_spark.core.decisions import Decision
from kmq_spark.core.markers import Outcome
from kmq_spark.core.outcome import PartitionOutcome
from kmq_spark.core.policy import DecisionAction
from kmq_spark.core.state import Status
from kmq_spark.kafka.payloads import PayloadSlice
from kmq_spark.tracker.sender.due_decisions import DueDecisions, DueRun, in_chunks, size_of
from kmq_spark.tracker.sender.limits import SenderLimits
from tests.builders import decisions_of

Run = tuple[Decision, int]
"""The decision on the first message of a run, and the number of its messages."""

Facts = tuple[int | str | bool, ...]

runs = st.builds(
    lambda partition, offset, count, reason, deadline, silent, length: (
        Decision(
            partition, offset, count, DecisionAction.DEAD_LETTER if reason else DecisionAction.REDELIVER,
            deadline, 9, deadline + 7, 3, reason, silent,
        ),
        length,
    ),
    st.integers(0, 3), st.integers(0, 12), st.integers(1, 3), st.sampled_from(["", "", "limit"]),
    st.integers(-1, 5_000), st.booleans(), st.integers(1, 6),
)  # fmt: skip


def outcome(marker_partition: int, rows: list[Run]) -> PartitionOutcome:
    """Return the outcome of one markers partition."""
    decided = decisions_of([each for each, _ in rows], [count for _, count in rows])
    return PartitionOutcome(marker_partition, Status(10, 2_000, 0, 4, None, {}), decided)


def expected_of(outcomes: list[PartitionOutcome]) -> list[Facts]:
    """Return what is decided about each message, in the order of the decisions."""
    return [
        (
            each.marker_partition, row.queue_partition, row.message_offset, row.delivery_count,
            Outcome.DEAD_LETTERED if row.reason else Outcome.REDELIVERED, row.reason, row.deadline_at_ms,
            row.tick_at_ms, row.is_silent,
        )
        for each in outcomes for row in each.decisions.messages()
    ]  # fmt: skip


def facts_of(run: DueRun) -> list[Facts]:
    """Return what a run says of each message; the payload says which message it is."""
    assert [None if each is None else each.offset() for each in run.messages] == [
        run.message_offset + place for place in range(len(run.messages))
    ]
    return [run.part(place, place + 1)[:-1] for place in range(len(run.messages))]


def message(offset: int, size: int = 1) -> Message:
    """Return a message as the client gives it."""
    return Message(topic="orders", partition=0, offset=offset, value=bytes(size))


def read(decided: DueDecisions, sizes: list[int]) -> list[DueRun]:
    """Return the runs with their payloads, which come in slices of these sizes."""
    found: list[DueRun] = []
    for partition, offsets in decided.message_offsets().items():
        assert offsets == sorted(set(offsets))
        first, turn = 0, 0
        while first < len(offsets):
            part = offsets[first : first + sizes[turn % len(sizes)]]
            found += decided.with_payloads(PayloadSlice(partition, first, [message(offset) for offset in part]))
            first, turn = first + len(part), turn + 1
    return found


@given(st.lists(st.lists(runs, max_size=25), max_size=4), st.lists(st.integers(1, 9), min_size=1))
def test_each_decision_is_carried_out_once_with_the_payload_of_its_message(
    batch: list[list[Run]], sizes: list[int]
) -> None:
    """In whatever slices the payloads come; and decisions on one message keep their order, however runs overlap."""
    outcomes = [outcome(partition, rows) for partition, rows in enumerate(batch)]
    decided, expected = DueDecisions(outcomes), expected_of(outcomes)
    found = [facts for run in read(decided, sizes) for facts in facts_of(run)]
    assert len(decided) == len(expected)
    assert Counter(found) == Counter(expected)
    for place in {facts[1:3] for facts in expected}:
        assert [facts for facts in found if facts[1:3] == place] == [facts for facts in expected if facts[1:3] == place]


def test_run_past_the_end_of_the_topic_gets_nothing_but_its_end() -> None:
    decided = DueDecisions([outcome(0, [(Decision(0, 5, 1, DecisionAction.DEAD_LETTER, -1, 9, 200, 3, "bad"), 2)])])
    (run,) = decided.with_payloads(PayloadSlice(0, 0, [None, None], is_past_end=True))
    assert (run.outcome, run.messages) == (Outcome.EXPIRED, [None, None])


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), max_size=12), st.integers(1, 10), st.integers(1, 30)
)
def test_runs_are_cut_where_a_transaction_is_full(payloads: list[list[int]], messages: int, size: int) -> None:
    """Each chunk is as long as it may be, none is longer, and together they hold all messages in order."""
    first = Decision(0, 0, 1, DecisionAction.REDELIVER, 100, 9, 200, 3, "")
    due: list[DueRun] = []
    for begin, sizes in zip(accumulate(map(len, payloads), initial=0), payloads, strict=False):
        (run,) = DueDecisions([outcome(0, [(first._replace(message_offset=begin), len(sizes))])]).with_payloads(
            PayloadSlice(0, 0, [message(begin + place, each) for place, each in enumerate(sizes)])
        )
        due.append(run)
    limits = SenderLimits(max_transaction_messages=messages, max_transaction_bytes=size)
    chunks = [[int(facts[2]) for run in chunk for facts in facts_of(run)] for chunk in in_chunks(due, limits)]
    all_sizes = [each for sizes in payloads for each in sizes]
    assert [offset for chunk in chunks for offset in chunk] == list(range(len(all_sizes)))
    for number, chunk in enumerate(chunks):
        assert len(chunk) <= messages
        assert sum(all_sizes[offset] for offset in chunk[:-1]) < size  # the last message may go beyond
        is_full = len(chunk) == messages or sum(all_sizes[offset] for offset in chunk) >= size
        assert is_full or number == len(chunks) - 1


def test_size_counts_key_value_and_headers() -> None:
    headers: list[tuple[str, str | bytes | None]] = [("ab", b"1"), ("c", None)]
    full = Message(topic="orders", partition=0, offset=1, key=b"123", value=b"12345", headers=headers)
    assert size_of(full) == 5 + 3 + 3 + 1
    assert size_of(Message(topic="orders", partition=0, offset=1)) == 0
    assert size_of(None) == 0
