"""What the tracker writes: decisions and payloads in, records of one transaction out, and what the broker refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmq_spark.core.markers import MarkerType, Outcome
from kmq_spark.core.policy import QueueRules
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.records import OutgoingRecord, RejectedRecords
from kmq_spark.tracker.sender.due_decisions import DueRun
from kmq_spark.tracker.sender.records import (
    Ends,
    final_decision,
    outgoing_record,
)
from kmq_spark.wire.codec import decode_marker
from kmq_spark.wire.headers import (
    DELAY_MS,
    DELIVERY_COUNT,
    DLQ_GROUP,
    DLQ_MESSAGE,
    DLQ_OFFSET,
    DLQ_TOPIC,
    EXPIRES_AT_MS,
    FIRST_SENT_MS,
    LAST_ERROR,
    LOGICAL_QUEUE,
    MAX_DELIVERIES,
    NOT_BEFORE_MS,
    ORIGIN,
    PREVIOUS,
    SILENT_COUNT,
    SUBSCRIPTION,
    TTL_MS,
)
from tests.unit.tracker.due import due, message

TOPICS = QueueTopics("orders")
RULES = QueueRules(1, max_deliveries=5)
DEAD = Outcome.DEAD_LETTERED


def ends_of(runs: Iterable[DueRun]) -> list[OutgoingRecord]:
    """Return the ENDs of final decisions."""
    ends = Ends()
    for run in runs:
        ends.add(run)
    return list(ends.records(TOPICS, "tracker-1", 7))


def headers_of(headers: Iterable[tuple[str, bytes | None]]) -> dict[str, bytes | None]:
    """Return headers by name."""
    return dict(headers)


def test_copy_keeps_the_last_exception_until_a_newer_one_replaces_it() -> None:
    first = outgoing_record(due([message()], reason="TimeoutError: no answer"), TOPICS, 4)
    silent = outgoing_record(due([message(first.headers)], is_silent=True), TOPICS, 4)
    newer = outgoing_record(due([message(silent.headers)], reason="KeyError: 'id'"), TOPICS, 4)
    found = [headers_of(each.headers).get(LAST_ERROR) for each in (first, silent, newer)]
    assert found == [b"TimeoutError: no answer", b"TimeoutError: no answer", b"KeyError: 'id'"]


@pytest.mark.parametrize(
    ("reason", "deadline_at_ms", "expected"),
    [
        ("delivery limit reached: 3 of 3", 5_000, "delivery limit reached: 3 of 3; last error: OSError: disk"),
        ("delivery limit reached: 3 of 3; last error: KeyError: 1", 5_000, None),
        ("rejected by hand", -1, None),
    ],
)
def test_dead_letter_whose_last_delivery_had_no_text_names_the_exception_before(
    reason: str, deadline_at_ms: int, expected: str | None
) -> None:
    letter = due([message([(LAST_ERROR, b"OSError: disk")])], outcome=DEAD, reason=reason)
    settled = final_decision(letter._replace(deadline_at_ms=deadline_at_ms), 0, TOPICS, QueueRules(1, max_deliveries=3))
    assert settled.reason == (expected or reason)


def test_redelivered_message_keeps_its_bytes_and_its_partition() -> None:
    foreign = [("a", b"1"), ("a", None), ("b", b"\xff")]
    record = outgoing_record(due([message(foreign, value=b"\x00v", key=b"\xffk")]), TOPICS, 4)
    assert (record.topic, record.partition, record.key, record.value) == ("orders", 3, b"\xffk", b"\x00v")
    assert record.headers[:3] == foreign
    assert headers_of(record.headers)[DELIVERY_COUNT] == b"2"
    assert headers_of(record.headers)[ORIGIN] == headers_of(record.headers)[PREVIOUS] == b"3:7"


def test_message_without_key_value_and_headers_stays_without() -> None:
    record = outgoing_record(due([message(value=None, key=None)]), TOPICS, 4)
    assert (record.key, record.value) == (None, None)


def test_dead_letter_goes_where_there_is_a_partition_for_it() -> None:
    """The dead-letter topic may have fewer partitions than the queue."""
    record = outgoing_record(due([message()], outcome=DEAD, reason="no account"), TOPICS, 2)
    assert (record.topic, record.partition, record.value) == ("orders.dlq", 1, b"v")
    found = headers_of(record.headers)
    assert (found[DLQ_TOPIC], found[DLQ_OFFSET], found[DLQ_GROUP]) == (b"orders", b"7", b"kmq.orders")
    assert found[DLQ_MESSAGE] == b"no account"


def test_payload_that_is_gone_becomes_dead_letter_with_that_reason() -> None:
    settled = final_decision(due(reason="rejected: bad"), 0, TOPICS, RULES)
    assert (settled.is_dead_letter, settled.messages[0]) == (True, None)
    assert settled.reason.startswith("rejected: bad; payload gone: orders[3]@7 is not in the topic")
    record = outgoing_record(settled, TOPICS, 4)
    assert (record.topic, record.key, record.value) == ("orders.dlq", None, None)


def test_refused_item_becomes_dead_letter_and_refused_again_one_without_payload() -> None:
    item = due([message(value=b"large")])
    once, twice = final_decision(item, 1, TOPICS, RULES), final_decision(item, 2, TOPICS, RULES)
    assert (once.is_dead_letter, once.messages[0]) == (True, item.messages[0])
    assert (twice.is_dead_letter, twice.messages[0]) == (True, None)
    assert twice.reason.endswith("so the payload stays at orders[3]@7")
    assert twice.reason.startswith(once.reason)


def copy_of(
    due_: DueRun, headers: list[Any], topics: QueueTopics = TOPICS, max_deliveries: int = 0
) -> dict[str, bytes | None]:
    """Return the headers of the copy that follows a decision."""
    return headers_of(outgoing_record(due_._replace(messages=[message(headers)]), topics, 4, max_deliveries).headers)


def test_copy_has_no_delay_any_more_and_keeps_its_queue_and_its_end() -> None:
    """Its time has come; when its time is over stays as it was."""
    kept = [(LOGICAL_QUEUE, b"emails"), (TTL_MS, b"60000"), (EXPIRES_AT_MS, b"99000")]
    found = copy_of(due(), [(DELAY_MS, b"5000"), (NOT_BEFORE_MS, b"4000"), *kept])
    assert not {DELAY_MS, NOT_BEFORE_MS} & found.keys()
    assert {name: found[name] for name, _ in kept} == dict(kept)


def test_copy_keeps_an_instant_that_the_brokers_clock_has_not_reached() -> None:
    """The clock was set back while the message waited: its consumer puts it off again, by this header."""
    found = copy_of(due(tick_at_ms=3_999), [(DELAY_MS, b"5000"), (NOT_BEFORE_MS, b"4000")])
    assert (found.get(NOT_BEFORE_MS), DELAY_MS in found) == (b"4000", False)
    assert NOT_BEFORE_MS not in copy_of(due(tick_at_ms=4_000), [(NOT_BEFORE_MS, b"4000")])
    assert NOT_BEFORE_MS not in copy_of(due(tick_at_ms=3_999), [(NOT_BEFORE_MS, b"soon")])


def test_silent_count_grows_only_where_no_consumer_wrote_a_word() -> None:
    assert copy_of(due(is_silent=True), [])[SILENT_COUNT] == b"1"
    assert copy_of(due(is_silent=True), [(SILENT_COUNT, b"3")])[SILENT_COUNT] == b"4"
    assert copy_of(due(), [(SILENT_COUNT, b"3")])[SILENT_COUNT] == b"3"
    assert SILENT_COUNT not in copy_of(due(), [])


def test_present_limit_of_deliveries_is_written_beside_a_silent_count() -> None:
    assert copy_of(due(is_silent=True), [], max_deliveries=5)[MAX_DELIVERIES] == b"5"
    old = [(SILENT_COUNT, b"3"), (MAX_DELIVERIES, b"9")]
    assert copy_of(due(), old, max_deliveries=5)[MAX_DELIVERIES] == b"5"
    assert MAX_DELIVERIES not in copy_of(due(), old)
    assert MAX_DELIVERIES not in copy_of(due(), [], max_deliveries=5)


def test_copy_of_a_groups_tracker_is_meant_for_that_group() -> None:
    assert copy_of(due(), [], QueueTopics("orders", "billing"))[SUBSCRIPTION] == b"billing"
    assert SUBSCRIPTION not in copy_of(due(), [])


@pytest.mark.parametrize(
    ("headers", "expires_at_ms"),
    [
        ([(TTL_MS, b"4000")], 5_000),  # appended at 1_000
        ([(TTL_MS, b"4000"), (FIRST_SENT_MS, b"300")], 4_300),
        ([(EXPIRES_AT_MS, b"6000")], 6_000),
        ([(EXPIRES_AT_MS, b"6000"), (TTL_MS, b"4000")], 5_000),
    ],
)
def test_message_whose_time_is_over_at_the_tick_is_dropped_or_dead_lettered(
    headers: list[Any], expires_at_ms: int
) -> None:
    """Not a millisecond early; and it is the queue that says what becomes of it."""
    dropping, keeping = RULES, replace(RULES, dead_letters_expired=True)

    def settled(at_ms: int, rules: QueueRules, refused: int = 0) -> DueRun:
        return final_decision(due([message(headers)], tick_at_ms=at_ms), refused, TOPICS, rules)

    assert settled(expires_at_ms - 1, dropping).outcome is Outcome.REDELIVERED
    assert settled(expires_at_ms, dropping).outcome is Outcome.EXPIRED
    assert settled(expires_at_ms, dropping, refused=2).outcome is Outcome.EXPIRED
    letter = settled(expires_at_ms, keeping)
    first_sent_ms = int(dict(headers).get(FIRST_SENT_MS, b"1000"))
    assert (letter.outcome, letter.reason) == (
        Outcome.DEAD_LETTERED,
        f"expired: ttl of {expires_at_ms - first_sent_ms} ms was over",
    )


def test_rejected_message_is_a_dead_letter_though_its_time_is_over() -> None:
    item = due([message([(TTL_MS, b"1")])], outcome=DEAD, reason="bad")
    assert final_decision(item, 0, TOPICS, RULES) == item


def test_time_to_live_that_cannot_be_read_is_none() -> None:
    for value in (b"", b"-1", b"soon", None, b"9" * 30):
        item = due([message([(TTL_MS, value)])], tick_at_ms=10**15)
        assert final_decision(item, 0, TOPICS, RULES) == item


def test_start_without_a_count_is_counted_by_the_messages_header() -> None:
    """kafka-mq-go's: else a Go worker's poison would be delivered without end."""

    def settled(header: bytes, *, is_silent: bool = True) -> DueRun:
        run = due([message([(DELIVERY_COUNT, header)])], delivery_count=1, is_silent=is_silent)
        return final_decision(run, 0, TOPICS, RULES)

    assert (settled(b"3").outcome, settled(b"3").delivery_count) == (Outcome.REDELIVERED, 4)
    assert (settled(b"4").outcome, settled(b"4").reason) == (Outcome.DEAD_LETTERED, "delivery limit reached: 5 of 5")
    # A delivery that did not count: the fold has taken it away.
    assert (settled(b"4", is_silent=False).outcome, settled(b"4", is_silent=False).delivery_count) == (
        Outcome.REDELIVERED,
        1,
    )


def test_ends_are_as_few_as_their_ranges_allow() -> None:
    """One for each markers partition, outcome and reason."""
    dues = [due(first=offset) for offset in (9, 7, 8, 20)]
    dues += [due(first=1, outcome=DEAD, reason="a"), due(first=2, outcome=DEAD, reason="b")]
    dues += [due(first=30, marker_partition=1)]
    records = ends_of(dues)
    ends = [(record.partition, decode_marker(record.value)) for record in records]
    assert {record.topic for record in records} == {"orders.markers"}
    assert [(partition, end.outcome, end.reason, end.ranges) for partition, end in ends] == [
        (0, Outcome.REDELIVERED, "", ((7, 3), (20, 1))),
        (0, Outcome.DEAD_LETTERED, "a", ((1, 1),)),
        (0, Outcome.DEAD_LETTERED, "b", ((2, 1),)),
        (1, Outcome.REDELIVERED, "", ((30, 1),)),
    ]
    assert {end.type for _, end in ends} == {MarkerType.END}
    assert {end.queue_partition for _, end in ends} == {3}


def test_refusal_holds_for_the_item_and_for_larger_ones() -> None:
    rejected_records = RejectedRecords()
    assert [rejected_records.rejection_count(index, 100) for index in (0, 1)] == [0, 0]
    rejected_records.note(0, 100, 0)
    assert [
        rejected_records.rejection_count(0, 100),
        rejected_records.rejection_count(1, 99),
        rejected_records.rejection_count(2, 100),
        rejected_records.rejection_count(3, 5_000),
    ] == [1, 0, 1, 1]
    assert rejected_records.total_count == 1


def test_item_refused_by_both_topics_is_refused_twice_and_never_more() -> None:
    rejected_records = RejectedRecords()
    rejected_records.note(0, 100, 0)
    rejected_records.note(0, 100, 1)
    assert [
        rejected_records.rejection_count(0, 100),
        rejected_records.rejection_count(1, 100),
        rejected_records.rejection_count(2, 99),
    ] == [2, 2, 0]
    rejected_records.note(1, 50, 0)
    assert [rejected_records.rejection_count(2, 60), rejected_records.rejection_count(3, 200)] == [1, 2]


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=60), st.integers(5, 30))
def test_attempts_end_whatever_is_refused(items: list[tuple[int, bool]], limit: int) -> None:
    """One refusal an attempt at worst, and none of an item that can go nowhere else."""
    rejected_records = RejectedRecords()
    for _ in range(2 * len(items) + 1):
        tried = [(index, size, rejected_records.rejection_count(index, size)) for index, (size, _) in enumerate(items)]
        assert all(refused <= 2 for _, _, refused in tried)
        refusing = [each for each in tried if each[2] < 2 and each[1] > limit + 5 * each[2]]
        if not refusing:
            return
        rejected_records.note(*refusing[-1])
    raise AssertionError(items)
