"""An attempt at a transaction: a run of decisions is carried out exactly as its messages one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, Message
from hypothesis import given
from hypothesis import strategies as st

from kmq_spark.core.markers import Outcome
from kmq_spark.core.policy import DEFAULT_RULES, QueueRules
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.records import RejectedRecords
from kmq_spark.tracker.sender.attempts import BLOCK, SMALL_BYTES, Attempt
from kmq_spark.wire.codec import decode_marker
from kmq_spark.wire.headers import (
    DELAY_MS,
    DELIVERY_COUNT,
    EXPIRES_AT_MS,
    LAST_ERROR,
    ORIGIN,
    PRODUCER,
    SILENT_COUNT,
    TTL_MS,
)
from tests.unit.tracker.due import due, message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kmq_spark.kafka.records import OutgoingRecord
    from kmq_spark.kafka.transaction import OnDelivery, Record
    from kmq_spark.tracker.sender.due_decisions import DueRun

TOPICS, BILLING = QueueTopics("orders"), QueueTopics("orders", "billing")

HEADERS = st.lists(
    st.sampled_from(
        [
            ("app", b"x"), ("app", None), (PRODUCER, b"p"), (DELIVERY_COUNT, b"2"), (DELIVERY_COUNT, None),
            (ORIGIN, b"3:1"), (SILENT_COUNT, b"1"), (TTL_MS, b"1"), (TTL_MS, b"soon"), (EXPIRES_AT_MS, b"9999999"),
            (LAST_ERROR, b"OSError: disk"), (DELAY_MS, b"5"),
        ]
    ),
    max_size=3,
)  # fmt: skip


TOO_LARGE = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)
MESSAGES = st.one_of(
    st.builds(message, st.none() | st.just([]), st.integers(999, 1_001)),
    st.builds(message, HEADERS, st.integers(999, 1_001)),
    st.none(),
)


def tried(
    runs: Sequence[DueRun], rules: QueueRules, topics: QueueTopics = TOPICS, rejected: RejectedRecords | None = None
) -> tuple[Attempt, list[tuple[Record, OnDelivery | None]]]:
    """Return an attempt and what it sends; a later one if the broker has rejected records."""
    rejected = rejected or RejectedRecords()
    attempt = Attempt(runs, rejected, topics, rules, 4, is_first=not rejected.total_count)
    return attempt, list(attempt.records())


def ends_of(attempt: Attempt) -> list[tuple[Outcome, str, tuple[tuple[int, int], ...]]]:
    """Return outcome, reason and ranges of each END."""
    records: list[OutgoingRecord] = list(attempt.ends.records(TOPICS, "tracker-1", 7))
    ends = [decode_marker(record.value) for record in records]
    return [(end.outcome, end.reason, tuple((each.first, each.count) for each in end.ranges)) for end in ends]


@given(
    st.builds(
        due,
        st.lists(MESSAGES, min_size=1, max_size=12),
        outcome=st.sampled_from([Outcome.REDELIVERED, Outcome.REDELIVERED, Outcome.DEAD_LETTERED, Outcome.EXPIRED]),
        delivery_count=st.integers(1, 4),
        reason=st.sampled_from(["", "KeyError: 'id'"]),
        is_silent=st.booleans(),
    ),
    st.sampled_from([DEFAULT_RULES, QueueRules(1, max_deliveries=3), QueueRules(1, dead_letters_expired=True)]),
    st.sampled_from([TOPICS, BILLING]),
)
def test_run_is_carried_out_as_its_messages_one_by_one(run: DueRun, rules: QueueRules, topics: QueueTopics) -> None:
    """Also where a payload is gone, where a time to live is over, and where headers change the decision."""
    whole, of_run = tried([run], rules, topics)
    # A rejection of an unknown message makes the next attempt look at each message.
    rejected = RejectedRecords()
    rejected.note_unknown()
    single, one_by_one = tried([run.part(at, at + 1) for at in range(len(run.messages))], rules, topics, rejected)
    assert [record for record, _ in of_run] == [record for record, _ in one_by_one]
    assert ends_of(whole) == ends_of(single)
    names = ("redelivered", "dead_lettered", "expired", "nonexistent")
    counts = [getattr(whole, name) for name in names]
    assert counts == [getattr(single, name) for name in names]
    assert sum(counts) == len(run.messages) == sum(count for *_, ranges in ends_of(whole) for _, count in ranges)


def test_run_is_interrupted_by_a_message_that_is_gone_and_by_one_whose_time_is_over() -> None:
    plain, late = message(None), message([(TTL_MS, b"1")])
    attempt, sent = tried([due([plain, None, plain, late, plain, plain])], DEFAULT_RULES)
    assert [record[0] for record, _ in sent] == ["orders", "orders.dlq", "orders", "orders", "orders"]
    (redelivered, dead, expired) = ends_of(attempt)
    assert (redelivered[0], redelivered[2]) == (Outcome.REDELIVERED, ((7, 1), (9, 1), (11, 2)))
    assert (dead[0], dead[2]) == (Outcome.DEAD_LETTERED, ((8, 1),))
    assert (expired[0], expired[2]) == (Outcome.EXPIRED, ((10, 1),))
    assert (attempt.redelivered, attempt.dead_lettered, attempt.expired, attempt.nonexistent) == (4, 1, 1, 0)


def test_two_decisions_on_one_message_are_two_copies_and_two_ends() -> None:
    """The copies come in the order of the decisions."""
    plain = message(None)
    attempt, sent = tried([due([plain, plain, plain], delivery_count=1), due([plain], 8)], DEFAULT_RULES)
    counts = [dict(record[4])[DELIVERY_COUNT] for record, _ in sent]
    assert counts == [b"1", b"1", b"1", b"2"]
    assert ends_of(attempt) == [(Outcome.REDELIVERED, "", ((7, 3),)), (Outcome.REDELIVERED, "", ((8, 1),))]


def test_block_of_small_messages_has_one_report_until_an_attempt_fails() -> None:
    """A report costs more than half as much as the message. The next attempt finds the one that was rejected."""
    rejected = RejectedRecords()
    run = due([message(None)] * (BLOCK + 1) + [message([("app", bytes(100))])])
    attempt, sent = tried([run], DEFAULT_RULES, rejected=rejected)
    reports = [on_delivery for _, on_delivery in sent]
    assert [place for place, report in enumerate(reports) if report is not None] == [BLOCK - 1, BLOCK + 1]
    report_of(sent, BLOCK - 1)(None, message(None, 6_000))
    assert attempt.lateness_ms == [1_000] * BLOCK
    report_of(sent, BLOCK + 1)(TOO_LARGE, message(None))
    assert (rejected.total_count, len(attempt.lateness_ms)) == (1, BLOCK)
    _, single = tried([run], DEFAULT_RULES, rejected=rejected)
    assert [record[0] for record, _ in single] == ["orders"] * (BLOCK + 2)
    report_of(single, BLOCK + 1)(TOO_LARGE, message(None))
    attempt, again = tried([run], DEFAULT_RULES, rejected=rejected)
    assert [record[0] for record, _ in again] == [*["orders"] * (BLOCK + 1), "orders.dlq"]
    assert (attempt.redelivered, attempt.dead_lettered) == (BLOCK + 1, 1)


def test_each_message_of_a_block_with_a_large_one_has_a_report() -> None:
    """The broker may reject the large one, and librdkafka holds back what follows until somebody aborts."""
    large = Message(topic="orders", partition=3, offset=1, value=bytes(SMALL_BYTES + 1), timestamp=(2, 1_000))
    attempt, sent = tried([due([message(None), large, message(None)])], DEFAULT_RULES)
    for place in range(3):
        report_of(sent, place)(None, message(None, 6_000 + place))
    assert attempt.lateness_ms == [1_000, 1_001, 1_002]


def test_lateness_is_that_of_each_copy_and_no_dead_letter_has_one() -> None:
    attempt, sent = tried([due([message(None), None, message(None)])], DEFAULT_RULES)
    for place in range(len(sent)):
        report_of(sent, place)(None, message(None, 6_000 + place))
    assert attempt.lateness_ms == [1_000, 1_002]


def report_of(sent: Sequence[tuple[Record, OnDelivery | None]], place: int) -> OnDelivery:
    """Return the callback of a record that has one."""
    on_delivery = sent[place][1]
    assert on_delivery is not None
    return on_delivery
