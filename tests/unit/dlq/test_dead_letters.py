"""Dead letters as values: which are open, which are meant, what a terminal gets of them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmq_spark.cli.dlq import as_json
from kmq_spark.cli.shared.output import shown
from kmq_spark.core.closed import ClosedRanges
from kmq_spark.core.markers import MessageId, OffsetRange
from kmq_spark.dlq.filter import DeadLetterFilter, parse_id
from kmq_spark.dlq.redrive import BY_KEY, redriven_record
from kmq_spark.errors import ConfigError
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.wire.dead_letter import DeadLetter, dead_letter_of
from kmq_spark.wire.headers import (
    DLQ_PARTITION,
    NOT_BEFORE_MS,
    ORIGIN,
    SUBSCRIPTION,
    Headers,
    dead_letter_headers,
    redrive_headers,
)


def buried(headers: Headers | None = None, *, source_topic: str = "orders", sent_at_ms: int = 1_000) -> Headers:
    """Return the headers of a dead letter of orders[1]@7."""
    return dead_letter_headers(
        headers, source_topic=source_topic, group="kmq.orders", delivery_count=5, queue_partition=1, message_offset=7,
        sent_at_ms=sent_at_ms, reason="timeout after 5 s",
    )  # fmt: skip


def letter(
    headers: Headers | None = None, *, key: bytes | None = b"k", value: bytes | None = b"v", dead_at_ms: int = 5_000
) -> DeadLetter:
    """Return dead letter 0:3."""
    headers = buried() if headers is None else headers
    return dead_letter_of(0, 3, dead_at_ms=dead_at_ms, key=key, value=value, headers=headers, queue_topic="orders")


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 30), st.integers(1, 5))), st.integers(0, 40))
def test_closed_ranges_are_those_that_were_added(added: list[tuple[int, int, int]], offset: int) -> None:
    """In any order, overlapping or not, looked at in between or not."""
    closed = ClosedRanges()
    for number, (partition, first, count) in enumerate(added):
        closed.add(partition, [OffsetRange(first, count)])
        if number % 2:
            closed.is_closed(partition, 0)
    for partition in (0, 1):
        expected = {first + step for place, first, count in added if place == partition for step in range(count)}
        assert closed.is_closed(partition, offset) == (offset in expected)
        assert closed.end(partition) == max(expected, default=-1) + 1


def test_dead_letter_has_its_history() -> None:
    found = letter()
    assert (found.id, found.origin, found.reason, found.delivery_count) == ("0:3", (1, 7), "timeout after 5 s", 5)
    assert (found.first_sent_ms, found.attempts_ms, found.dead_at_ms, found.problem) == (1_000, (1_000,), 5_000, "")
    assert found.size > len("timeout after 5 s")


@pytest.mark.parametrize(
    ("headers", "value", "message"),
    [
        ([], b"v", "no dead letter of ours"),
        (buried(source_topic="orders.markers"), b"v", "it was set aside from orders.markers"),
        (buried(sent_at_ms=-1), None, "it has no payload"),
    ],
)
def test_what_cannot_be_redriven_says_why(headers: Headers, value: bytes | None, message: str) -> None:
    assert message in letter(headers, key=None, value=value).problem


@given(st.lists(st.tuples(st.sampled_from([ORIGIN, DLQ_PARTITION, "__dlq.errors.topic", "a"]), st.binary())))
def test_hostile_headers_become_a_value(headers: Headers) -> None:
    assert letter(headers).id == "0:3"


@pytest.mark.parametrize(
    ("where", "is_meant"),
    [
        ({"reason": "after 5"}, True),
        ({"reason": "time*s"}, True),
        ({"reason": "timeout after ? s"}, True),
        ({"key": "k"}, True),
        ({"key": "K"}, False),
        ({"origin": "1:7"}, True),
        ({"dead_before": datetime(1970, 1, 1, 0, 0, 6, tzinfo=UTC)}, True),
        ({"dead_before": datetime(1970, 1, 1, 0, 0, 5, tzinfo=UTC)}, False),
        ({"dead_after": datetime(1970, 1, 1, 0, 0, 5, tzinfo=UTC)}, True),
        ({"dead_after": datetime(1970, 1, 1, 0, 0, 6, tzinfo=UTC)}, False),
        ({"reason": "time", "key": "other"}, False),
    ],
)
def test_filter_means_those_for_which_every_part_holds(where: dict[str, Any], is_meant: bool) -> None:  # noqa: FBT001  # a table
    assert DeadLetterFilter(**where).matches(letter()) is is_meant


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"reason": ""}, "filter reason is not allowed: got ''"),
        ({"origin": "7"}, "id of a dead letter is not allowed: got '7'"),
        ({"dead_after": datetime(2026, 1, 1)}, "expected an aware datetime; give it a tzinfo"),  # noqa: DTZ001  # wrong
        (dict.fromkeys(("dead_after", "dead_before"), datetime(2026, 1, 1, tzinfo=UTC)), "filter can match nothing"),
        ({}, "the filter is empty"),
    ],
)
def test_filter_that_is_a_mistake_is_reported(where: Any, message: str) -> None:  # noqa: ANN401  # mistakes of every type
    with pytest.raises(ConfigError) as raised:
        DeadLetterFilter(**where)
    assert message in str(raised.value)


@pytest.mark.parametrize("text", [":1", "0:-1", "99999:0", "a:b", 7])
def test_id_that_is_none_is_refused(text: Any) -> None:  # noqa: ANN401  # mistakes of every type
    with pytest.raises(ConfigError, match="id of a dead letter is not allowed"):
        parse_id(text)


def test_redriven_headers_keep_the_message_and_name_the_subscription() -> None:
    headers = buried([("a", b"1"), (SUBSCRIPTION, b"old"), (NOT_BEFORE_MS, b"5"), ("a", None)])
    kept = [("a", b"1"), ("a", None), (ORIGIN, b"1:7"), ("kmq-first-sent-ms", b"1000")]
    assert redrive_headers(headers) == kept
    assert redrive_headers(headers, subscription="billing") == [*kept, (SUBSCRIPTION, b"billing")]


def test_redriven_message_goes_to_its_partition_where_there_is_one() -> None:
    orders = QueueTopics("orders")
    assert letter().origin == MessageId(1, 7)
    assert redriven_record(letter(), orders, orders, 2).partition == 1
    assert redriven_record(letter(), orders, orders, 1).partition == BY_KEY
    other = redriven_record(letter(), orders, QueueTopics("other"), 4)
    assert (other.topic, other.partition, other.headers) == ("other", BY_KEY, [])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "-"),
        (b"", ""),
        (b"plain \xc3\xa4", "plain ä"),
        (b"\x1b[31mred\x07\n", "\\x1b[31mred\\x07\\n"),
        ("\u202eevil", "\\u202eevil"),
        (b"\xff\x00", "0xff00"),
        (b"abcdef", "abcd…"),
        ("abcä".encode(), "abc…"),
    ],
)
def test_nothing_of_a_message_reaches_the_terminal_unescaped(value: bytes | str | None, expected: str) -> None:
    assert (
        shown(value, max_bytes=4 if value not in {b"plain \xc3\xa4", b"\x1b[31mred\x07\n", "\u202eevil"} else 0)
        == expected
    )


def test_json_distinguishes_text_and_bytes() -> None:
    found = as_json(letter(key=b"\xff", value=b"0xff"), max_bytes=3)
    assert (found["key_hex"], found["value"], found["value_is_cut"], found["value_bytes"]) == ("ff", "0xf", True, 4)
    assert "key" not in found


def test_what_is_done_with_is_counted_from_an_offset_on() -> None:
    closed = ClosedRanges()
    closed.add(0, [OffsetRange(0, 5), OffsetRange(10, 2)])
    closed.add(0, [OffsetRange(3, 4)])
    assert [closed.count(0, first) for first in (0, 4, 8, 11, 50)] == [9, 5, 2, 1, 0]  # 0 to 6, and 10 and 11
    assert closed.count(1, 0) == 0
