"""Headers of redelivered messages and of dead letters."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmq_spark.core.markers import MAX_DELIVERY_COUNT, MessageId
from kmq_spark.wire.headers import (
    ATTEMPTS_MS,
    DELIVERY_COUNT,
    FIRST_SENT_MS,
    MAX_ATTEMPTS_KEPT,
    ORIGIN,
    PREVIOUS,
    CommonHeaders,
    Headers,
    dead_letter_headers,
    delivery_count_of,
    redelivery_headers,
    redrive_headers,
)

SENT: Headers = [("kmq-producer", b"nightly"), ("kmq-generation", b"2"), ("kmq-sequence", b"7")]
FOREIGN: Headers = [("traceparent", b"00-ab"), ("a", b"1"), ("a", None), *SENT, ("b", b"\xff"), ("a", b"1")]


def redelivered(headers: Headers | None, delivery_count: int = 1, offset: int = 7, sent_at_ms: int = 1_000) -> Headers:
    """Return the headers of the next copy of message 3:*offset*."""
    return redelivery_headers(
        headers, delivery_count=delivery_count, queue_partition=3, message_offset=offset, sent_at_ms=sent_at_ms
    )


def dead(headers: Headers | None, sent_at_ms: int = 1_000) -> Headers:
    """Return the headers of the dead letter of message 3:7."""
    return dead_letter_headers(
        headers,
        source_topic="orders",
        group="kmq.orders",
        delivery_count=5,
        queue_partition=3,
        message_offset=7,
        sent_at_ms=sent_at_ms,
        reason="delivery limit reached: 5 of 5",
    )


def test_origin_and_first_sent_time_stay_those_of_the_first_copy() -> None:
    """Later copies lie elsewhere and were sent later."""
    second = redelivered([])
    third = redelivered(second, delivery_count=2, offset=90, sent_at_ms=6_000)
    expected = {
        DELIVERY_COUNT: b"2",
        ORIGIN: b"3:7",
        PREVIOUS: b"3:90",
        FIRST_SENT_MS: b"1000",
        ATTEMPTS_MS: b"1000,6000",
    }
    assert expected == dict(third)
    assert len(expected) == len(third)


@given(
    headers=st.lists(
        st.tuples(st.sampled_from(["a", "b", "kmq-logical-queue", "kmq-ttl-ms"]), st.none() | st.binary(max_size=3))
    ),
    is_silent=st.booleans(),
    max_deliveries=st.sampled_from([0, 5]),
    sent_at_ms=st.sampled_from([-1, 0, 1_795_262_543_410]),
)
def test_first_redelivery_is_the_same_where_a_count_cannot_be_read(
    headers: Headers, *, is_silent: bool, max_deliveries: int, sent_at_ms: int
) -> None:
    """What cannot be read counts as absent, and is replaced."""
    first, other = (
        redelivery_headers(
            given_headers, delivery_count=1, queue_partition=3, message_offset=7, sent_at_ms=sent_at_ms,
            is_silent=is_silent, max_deliveries=max_deliveries,
        )
        for given_headers in (headers, [*headers, (DELIVERY_COUNT, None)])
    )  # fmt: skip
    assert first == other


@given(
    headers=st.none()
    | st.lists(st.sampled_from([*FOREIGN, ("kmq-logical-queue", b"eu"), ("kmq-producer", b"p")]), max_size=4),
    given=st.fixed_dictionaries(
        {
            "is_silent": st.booleans(), "max_deliveries": st.sampled_from([0, 5]),
            "subscription": st.sampled_from(["", "billing"]), "last_error": st.sampled_from(["", "KeyError: 'id'"]),
        }
    ),
    sent=st.lists(st.tuples(st.integers(0, 2**40), st.sampled_from([-1, 0, 1_000, 1_001])), min_size=1, max_size=5),
)  # fmt: skip
def test_headers_that_a_run_has_in_common_are_those_of_each_message(
    headers: Headers | None, given: dict[str, Any], sent: list[tuple[int, int]]
) -> None:
    common = CommonHeaders(delivery_count=2, queue_partition=3, **given)
    for offset, sent_at_ms in sent:
        expected = redelivery_headers(
            headers, delivery_count=2, queue_partition=3, message_offset=offset, sent_at_ms=sent_at_ms, **given
        )
        assert common.of_copy(headers, offset, sent_at_ms) == expected


@pytest.mark.parametrize(
    "name",
    [
        *("kmq-delivery-count", "kmq-attempts-ms", "kmq-origin", "kmq-previous", "kmq-first-sent-ms"),
        *("kmq-not-before-ms", "kmq-ttl-ms", "kmq-expires-at-ms"),
    ],
)
def test_message_with_a_header_that_a_redelivery_reads_has_nothing_in_common(name: str) -> None:
    common = CommonHeaders(delivery_count=2, queue_partition=3)
    assert common.of_copy([("a", b"1"), (name, None)], 7, 1_000) is None


def test_foreign_headers_are_kept_with_order_repeats_and_nulls() -> None:
    """They are the application's; and so are those of a resuming producer."""
    assert redelivered(FOREIGN)[: len(FOREIGN)] == FOREIGN
    assert dead(FOREIGN)[: len(FOREIGN)] == FOREIGN


def test_time_of_each_attempt_is_kept_for_the_latest_ones() -> None:
    """The number of deliveries may be without bound, headers may not."""
    headers: Headers = []
    for attempt in range(MAX_ATTEMPTS_KEPT + 5):
        headers = redelivered(headers, sent_at_ms=attempt)
    kept = dict(headers)[ATTEMPTS_MS]
    assert kept is not None
    assert list(map(int, kept.split(b","))) == list(range(5, MAX_ATTEMPTS_KEPT + 5))


def test_unknown_append_time_is_left_out() -> None:
    """The payload may be gone."""
    expected = {DELIVERY_COUNT: b"1", ORIGIN: b"3:7", PREVIOUS: b"3:7"}
    assert expected == dict(redelivered(None, sent_at_ms=-1))


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (None, 0),
        ([(DELIVERY_COUNT, b"3")], 3),
        ([(DELIVERY_COUNT, b"3"), (DELIVERY_COUNT, b"4")], 4),
        ([(DELIVERY_COUNT, None)], 0),
        ([(DELIVERY_COUNT, "٣".encode())], 0),
        ([(DELIVERY_COUNT, b"9" * 5_000)], 0),
        ([(DELIVERY_COUNT, b"9999999999")], MAX_DELIVERY_COUNT - 1),
    ],
)
def test_delivery_count_is_read_or_zero(headers: Headers | None, expected: int) -> None:
    """A count that cannot be read never stops a consumer."""
    assert expected == delivery_count_of(headers)


def test_dead_letter_carries_the_headers_of_share_groups() -> None:
    """Tools written for Kafka's own dead letters read ours."""
    headers = dict(dead(FOREIGN))
    assert {name: value for name, value in headers.items() if name.startswith("__dlq")} == {
        "__dlq.errors.topic": b"orders",
        "__dlq.errors.partition": b"3",
        "__dlq.errors.offset": b"7",
        "__dlq.errors.group": b"kmq.orders",
        "__dlq.errors.delivery.count": b"5",
        "__dlq.errors.message": b"delivery limit reached: 5 of 5",
    }
    assert headers[ORIGIN] == b"3:7"


def test_message_that_is_dead_lettered_again_has_each_header_once() -> None:
    """The newest values, and both attempts."""
    twice = dead(dead([]), sent_at_ms=2_000)
    names = [name for name, _ in twice]
    assert len(names) == len(set(names))
    assert dict(twice)[ATTEMPTS_MS] == b"1000,2000"


def test_redriven_dead_letter_starts_its_count_again_and_keeps_its_origin() -> None:
    """An operator gives it another chance."""
    expected = [*FOREIGN, (ORIGIN, b"3:7"), (FIRST_SENT_MS, b"1000")]
    assert expected == redrive_headers(dead(FOREIGN))
    assert redrive_headers(None) == []


@given(st.lists(st.tuples(st.sampled_from([DELIVERY_COUNT, ORIGIN, FIRST_SENT_MS, ATTEMPTS_MS, "a"]), st.binary())))
def test_hostile_headers_raise_nothing(headers: Headers) -> None:
    """And what comes out is readable."""
    again = redelivered(headers, delivery_count=2)
    assert delivery_count_of(again) == 2
    assert MessageId.parse(dict(again)[ORIGIN]) is not None
    assert [pair for pair in headers if pair[0] == "a"] == [pair for pair in again if pair[0] == "a"]
