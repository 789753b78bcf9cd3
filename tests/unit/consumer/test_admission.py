"""Which records a consumer hands out, defers or passes over: headers alone decide."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import Message
from hypothesis import given
from hypothesis import strategies as st

from kmq_spark.consumer.admission import (
    DEFER_S,
    DRAIN_S,
    Admission,
    AdmissionPolicy,
    BatchPlan,
    Room,
    SuspectSchedule,
    Turn,
    Verdict,
    count_that_fits,
    plan_batch,
)
from kmq_spark.wire.headers import expires_at_ms_of

OUT, ALONE, DEFER, PASS = Verdict.DELIVER, Verdict.ISOLATE, Verdict.DEFER, Verdict.SKIP


STAMP = Message(topic="orders", partition=0, offset=0, timestamp=(2, 1_000))
"""A record appended at 1,000 ms."""


def admit(policy: AdmissionPolicy, **headers: bytes | None) -> Admission:
    """Return the verdict on a record with some of our headers."""
    return policy.admit([("kmq-" + name.replace("_", "-"), value) for name, value in headers.items()], STAMP)


def room(max_messages: int = 100, max_bytes: int = 1_000, *, is_empty: bool = True) -> Room:
    """Return how much may be handed out."""
    return Room(max_messages, max_bytes, is_empty)


def plan(*verdicts: Verdict, of: Room | None = None, turn: Turn = Turn.ALONE) -> BatchPlan:
    """Return the plan for records with values of 10 bytes."""
    return plan_batch([Admission(each) for each in verdicts], [10] * len(verdicts), of or room(), turn)


@pytest.mark.parametrize(
    "headers", [None, [], [("traceparent", b"00-1")], [("kmq-logical-queue", b"")], [("kmq-subscription", None)]]
)
def test_record_without_headers_of_ours_is_handed_out(headers: list[tuple[str, bytes | None]] | None) -> None:
    assert AdmissionPolicy().admit(headers, STAMP) == Admission(OUT)


def test_logical_queues_see_their_own_messages_alone() -> None:
    emails, default = AdmissionPolicy(logical_queue="emails"), AdmissionPolicy()
    assert admit(emails, logical_queue=b"emails").verdict is OUT
    assert admit(emails, logical_queue=b"invoices").verdict is PASS
    assert admit(default, logical_queue=b"emails").verdict is PASS
    assert emails.admit(None, STAMP).verdict is PASS
    assert (emails.accepts_plain_records, default.accepts_plain_records) == (False, True)


def test_delayed_message_is_deferred_to_the_next_tenth_of_a_second_and_never_early() -> None:
    # 1_000 + 250 = 1_250
    assert admit(AdmissionPolicy(), delay_ms=b"250") == Admission(DEFER, 1, 1_300)
    assert admit(AdmissionPolicy(), delay_ms=b"300") == Admission(DEFER, 1, 1_300)
    assert admit(AdmissionPolicy(), not_before_ms=b"5001") == Admission(DEFER, 1, 5_100)
    assert admit(AdmissionPolicy(), not_before_ms=b"0") == Admission(DEFER, 1, 0)


@pytest.mark.parametrize("value", [None, b"", b"-5", b"1.5", b"\xff", b"9" * 20])
def test_unreadable_header_counts_as_absent(value: bytes | None) -> None:
    policy = AdmissionPolicy(isolate_after=1)
    got = admit(policy, delay_ms=value, ttl_ms=value, silent_count=value, delivery_count=value)
    assert got == Admission(OUT)


def test_time_to_live_counts_from_the_first_copy() -> None:
    # 1_000 + 500, 700 + 500
    assert admit(AdmissionPolicy(), ttl_ms=b"500").expires_at_ms == 1_500
    assert admit(AdmissionPolicy(), ttl_ms=b"500", first_sent_ms=b"700").expires_at_ms == 1_200
    assert admit(AdmissionPolicy(), ttl_ms=b"500", expires_at_ms=b"1400").expires_at_ms == 1_400
    assert expires_at_ms_of([("kmq-expires-at-ms", b"1400")], 1_000) == 1_400
    assert expires_at_ms_of(None, 1_000) is None


def test_message_that_ended_without_a_word_too_often_is_a_suspect() -> None:
    copy = {"origin": b"0:7", "delivery_count": b"4"}
    assert admit(AdmissionPolicy(isolate_after=2), silent_count=b"1", **copy) == Admission(OUT, 5)
    assert admit(AdmissionPolicy(isolate_after=2), silent_count=b"2", **copy) == Admission(ALONE, 5)
    assert admit(AdmissionPolicy(isolate_after=0), silent_count=b"9", **copy).verdict is OUT


def test_plan_ends_before_the_message_that_is_one_too_many() -> None:
    """What is behind the last one handed out, and not for us, is done with, too."""
    got = plan(OUT, PASS, OUT, DEFER, OUT, of=room(max_messages=2))
    assert (got.to_deliver, got.deferred, got.prefix_length) == ([0, 2], [3], 4)


def test_plan_ends_before_the_byte_that_is_one_too_many() -> None:
    assert plan(OUT, OUT, OUT, of=room(max_bytes=20)).to_deliver == [0, 1]
    assert plan(OUT, OUT, of=room(max_bytes=9)).to_deliver == [0]
    assert plan(OUT, OUT, of=room(max_bytes=9, is_empty=False)).prefix_length == 0


def test_suspect_ends_the_plan_before_it_and_then_goes_alone() -> None:
    first = plan(OUT, OUT, ALONE, OUT)
    assert (first.to_deliver, first.prefix_length, first.is_suspect, first.is_waiting) == ([0, 1], 2, False, False)
    then = plan(ALONE, PASS, DEFER, ALONE, OUT)
    assert (then.to_deliver, then.prefix_length, then.is_suspect) == ([0], 3, True)


def test_suspect_waits_or_is_deferred_where_others_are_held() -> None:
    waiting = plan(PASS, ALONE, OUT, turn=Turn.WAIT)
    assert (waiting.to_deliver, waiting.prefix_length, waiting.is_waiting) == ([], 1, True)
    deferred = plan(ALONE, OUT, ALONE, OUT, turn=Turn.DEFER)
    assert (deferred.to_deliver, deferred.postponed, deferred.prefix_length) == ([1, 3], [0, 2], 4)


@given(
    sizes=st.lists(st.integers(0, 50), max_size=30),
    max_messages=st.integers(1, 30),
    max_bytes=st.integers(0, 300),
    is_empty=st.booleans(),
)
def test_plain_records_fit_as_sorted_ones_do(
    sizes: list[int], max_messages: int, max_bytes: int, *, is_empty: bool
) -> None:
    """The short way for records without headers gives what the long way gives."""
    limits = Room(max_messages, max_bytes, is_empty)
    slow = plan_batch([Admission(OUT)] * len(sizes), sizes, limits, Turn.ALONE)
    assert count_that_fits(sizes, limits) == slow.prefix_length


@given(
    verdicts=st.lists(st.sampled_from(Verdict), max_size=20),
    turn=st.sampled_from(Turn),
    max_messages=st.integers(1, 5),
    is_empty=st.booleans(),
)
def test_every_record_of_a_plan_has_one_fate_and_a_suspect_goes_alone(
    verdicts: list[Verdict], turn: Turn, max_messages: int, *, is_empty: bool
) -> None:
    got = plan(*verdicts, of=Room(max_messages, 35, is_empty), turn=turn)
    passed = [index for index in range(got.prefix_length) if verdicts[index] is PASS]
    assert sorted([*got.to_deliver, *got.deferred, *got.postponed, *passed]) == list(range(got.prefix_length))
    assert len(got.to_deliver) <= min(max_messages, 3)
    assert got.is_suspect == any(verdicts[index] is ALONE for index in got.to_deliver)
    assert not got.is_suspect or len(got.to_deliver) == 1


@pytest.mark.parametrize(
    ("headers", "takers"),
    [
        ([], {"", "billing", "audit"}),
        ([("kmq-subscription", b"billing"), ("kmq-origin", b"0:1")], {"billing"}),
        # A copy that the queue's own tracker made, and a dead letter that was redriven from its own topic.
        ([("kmq-origin", b"0:1"), ("kmq-delivery-count", b"1")], {""}),
    ],
)
def test_first_copy_is_for_every_group_and_a_later_one_for_its_own(
    headers: list[tuple[str, bytes | None]], takers: set[str]
) -> None:
    found = {
        group
        for group in ("", "billing", "audit")
        if AdmissionPolicy(subscription=group).admit(headers, STAMP).verdict is not Verdict.SKIP
    }
    assert found == takers


class Suspect:
    """A message that is held until its test says otherwise."""

    is_held = True


def test_suspect_is_delivered_where_nothing_is_held_and_counts_until_it_is_settled() -> None:
    schedule, suspect = SuspectSchedule(), Suspect()
    taken: Any = suspect
    assert schedule.turn(0.0, is_empty=True) is Turn.ALONE
    schedule.took(taken)
    assert schedule.is_held
    suspect.is_held = False
    assert not schedule.is_held


def test_consumer_drains_for_a_suspect_for_a_bounded_time_and_then_defers_suspects_while_others_are_held() -> None:
    schedule = SuspectSchedule()
    assert schedule.turn(0.0, is_empty=False) is Turn.WAIT
    schedule.drain(0.0)
    schedule.drain(5.0)
    assert schedule.is_draining(DRAIN_S - 0.1)
    assert schedule.turn(DRAIN_S - 0.1, is_empty=False) is Turn.WAIT
    assert not schedule.is_draining(DRAIN_S)
    assert schedule.turn(DRAIN_S, is_empty=False) is Turn.DEFER
    assert schedule.turn(DRAIN_S + DEFER_S - 1, is_empty=False) is Turn.DEFER
    assert schedule.turn(DRAIN_S + DEFER_S - 1, is_empty=True) is Turn.ALONE
    assert schedule.turn(DRAIN_S + DEFER_S, is_empty=False) is Turn.WAIT


def test_drain_ends_with_the_batch_that_is_taken() -> None:
    schedule = SuspectSchedule()
    schedule.drain(0.0)
    schedule.took(None)
    assert not schedule.is_draining(0.0)
