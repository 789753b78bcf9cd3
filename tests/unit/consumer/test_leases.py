"""Leases, messages and renewals by themselves: no broker, a clock of numbers where one is asked for."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from confluent_kafka import Message as KafkaMessage
from hypothesis import example, given
from hypothesis import strategies as st

from kmq_spark.consumer.leases import ENDED, Lease, LeaseTable, Outbox
from kmq_spark.consumer.marker_writer import Renewal, renewals
from kmq_spark.consumer.message import Message, text_of_failure
from kmq_spark.core.markers import MAX_MESSAGES_PER_MARKER, MessageId, OffsetRange
from kmq_spark.core.ranges import MAX_RANGES_PER_MARKER, cut_ranges, join_ranges
from kmq_spark.errors import ConfigError, LeaseLostError, UsageError
from kmq_spark.kafka.clock import now_s

HOUR_S = 3_600.0


def lease_of(*offsets: int, started_at: float = 0.0, lease_s: float = 30.0, limit_s: float = 300.0) -> Lease:
    """Return a lease on offsets of queue partition 3."""
    return Lease(
        outbox=Outbox(3),
        delivery_count=1,
        held=set(offsets),
        renewed_at=started_at,
        ends_at=started_at + lease_s,
        limit_at=started_at + limit_s,
    )


def message_of(lease: Lease, headers: list[tuple[str, bytes | None]] | None = None) -> Message:
    """Return a message under a lease."""
    record = KafkaMessage("orders", 3, 7, b"key", b"value", headers, None, (2, 1_000))  # type: ignore[arg-type]
    return Message(record, 7, lease)


def held_message(headers: list[tuple[str, bytes | None]] | None = None) -> tuple[Message, Lease]:
    """Return a message whose lease has an hour left."""
    lease = lease_of(7, started_at=now_s(), lease_s=HOUR_S)
    return message_of(lease, headers=headers), lease


def test_release_after_ack_is_an_error_that_names_both() -> None:
    message, lease = held_message()
    message.ack()
    with pytest.raises(UsageError, match="3:7 is already settled: got release after ack"):
        message.release()
    assert lease.outbox.others == []


def test_late_ack_raises_and_is_written_all_the_same() -> None:
    """An END before the tracker's decision wins, so it is worth writing."""
    lease = lease_of(7, started_at=now_s() - 31.0)
    with pytest.raises(LeaseLostError, match="lease of message 3:7 is lost"):
        message_of(lease).ack()
    assert Outbox.take(lease.outbox.acked) == [7]


def test_settling_a_message_that_the_consumer_gave_back_raises() -> None:
    message, lease = held_message()
    lease.end("the consumer was closed")
    assert lease.take_held() == [7]
    with pytest.raises(LeaseLostError, match="the consumer was closed"):
        message.ack()
    assert lease.outbox.acked == []


@pytest.mark.parametrize("delay", [-1, 12 * 3_600 + 1, float("nan")])
def test_release_refuses_a_delay_out_of_bounds_and_the_message_stays_held(delay: float) -> None:
    message, _ = held_message()
    with pytest.raises(ConfigError, match="delay is out of bounds"):
        message.release(delay)
    assert not message.is_settled


def test_long_reason_of_a_rejection_is_cut() -> None:
    message, lease = held_message()
    message.reject("x" * 5_000)
    assert len(Outbox.take(lease.outbox.others)[0].reason) == 1_000


def test_own_headers_are_hidden_and_read() -> None:
    headers: list[tuple[str, bytes | None]] = [
        ("traceparent", b"00-1"),
        ("kmq-origin", b"1:5"),
        ("kmq-first-sent-ms", b"900"),
        ("traceparent", None),
    ]
    message, _ = held_message(headers)
    assert message.headers == [("traceparent", b"00-1"), ("traceparent", None)]
    assert message.origin == MessageId(1, 5)
    assert message.first_sent_at_ms == 900
    assert message.appended_at_ms == 1_000


@pytest.mark.parametrize("value", [b"", b"1", b"1:-2", None])
def test_unreadable_origin_counts_as_absent(value: bytes | None) -> None:
    message, _ = held_message([("kmq-origin", value), ("kmq-first-sent-ms", value if value != b"1" else b"?")])
    assert message.origin == message.id == MessageId(3, 7)
    assert message.first_sent_at_ms == 1_000


class UnreadableError(Exception):
    """Raises when it is asked for its message."""

    def __str__(self) -> str:
        """Fail."""
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no such order"), "ValueError: no such order"),
        (ValueError("a\n\x1b[31mb\u202e"), "ValueError: a  [31mb "),
        (ValueError("x" * 10_000), "ValueError: " + "x" * 288),
        (UnreadableError(), "UnreadableError: (its message cannot be read)"),
    ],
)
def test_text_is_one_printable_line_within_its_bound(error: BaseException, text: str) -> None:
    """Whatever a handler raises."""
    assert text_of_failure(error) == text


def test_held_count_and_expiry_of_the_table() -> None:
    table = LeaseTable()
    early, late = lease_of(1, 2, lease_s=10.0), lease_of(3, lease_s=20.0)
    table.open([early, late])
    assert table.held_count(10.0) == 3
    assert table.held_count(15.0) == 1, "a lease that has ended holds nothing, whenever the sweep comes by"
    assert table.held_bytes(15.0) == table.held_bytes_bound(15.0) == late.byte_count
    assert table.remove_ended(15.0) == [early]
    assert table.held_count(15.0) == 1


def test_messages_that_a_handler_holds_beyond_the_limit_count_until_they_are_settled() -> None:
    table = LeaseTable()
    hung, slow = lease_of(1, 2, lease_s=10.0, limit_s=10.0), lease_of(3, lease_s=10.0, limit_s=60.0)
    table.open([hung, slow])
    assert table.hung_count(20.0) == 0
    table.remove_ended(20.0)
    assert table.hung_count(20.0) == 2
    hung.take([1])
    assert table.hung_count(20.0) == 1
    del hung
    assert table.hung_count(20.0) == 0


def test_all_held_messages_of_a_partition_are_renewed_together_after_a_third() -> None:
    old, young = lease_of(1, started_at=0.0), lease_of(2, started_at=9.0)
    assert list(renewals([old, young], 9.9)) == []
    (renewal,) = renewals([old, young], 10.0)
    assert sorted(renewal.offsets()) == [1, 2]
    assert list(renewals([old, young], 11.0)) == []
    renewal.durable(10.5, [10_300])
    assert (old.ends_at, young.ends_at) == (40.0, 40.0)


def test_lease_is_not_renewed_beyond_its_limit() -> None:
    lease = lease_of(1, limit_s=45.0)
    assert len(list(renewals([lease], 15.0))) == 1
    # 16 + 30 = 46 > 45
    assert list(renewals([lease], 26.0)) == []


def test_renewal_does_not_revive_a_lease_that_was_ended() -> None:
    lease = lease_of(1)
    (renewal,) = renewals([lease], 10.0)
    lease.end("the consumer was closed")
    renewal.durable(10.5, [10_300])
    assert lease.ends_at == ENDED


def test_renewal_that_was_durable_after_the_end_does_not_count() -> None:
    """The message may have been decided before the KEEPALIVE was written: a transaction must not rely on it."""
    lease = lease_of(1, started_at=0.0)
    (renewal,) = renewals([lease], 29.0)
    # 0 + 30 = 30 < 30.5
    renewal.durable(30.5, [30_300])
    assert lease.ends_at == 30.0


def test_renewal_appended_after_the_end_does_not_count_although_the_clock_of_the_host_stood_still() -> None:
    lease = lease_of(1)
    lease.ends_at_ms = 30_000
    for at_ms, ends_at_ms in ([10_000, 10_200], 40_000), ([39_000, 39_999], 69_000), ([68_000, 69_000], 69_000):
        Renewal(0, (lease,), 10.0, 30.0).durable(10.5, at_ms)
        assert lease.ends_at_ms == ends_at_ms


@given(st.lists(st.integers(0, 60) | st.integers(0, 2**48 - 1), max_size=200))
def test_ranges_cover_every_offset_once(offsets: list[int]) -> None:
    """Ascending, and as few as possible."""
    ranges = [each for part in cut_ranges(offsets) for each in part]
    assert [first + step for first, count in ranges for step in range(count)] == sorted(set(offsets))
    assert all(later.first > first + count for (first, count), later in pairwise(ranges))


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 20)), max_size=20))
@example([(0, 150_000), (100_000, 120_000)])
def test_joined_ranges_are_those_of_their_offsets(pairs: list[tuple[int, int]]) -> None:
    ranges = [OffsetRange(*pair) for pair in pairs]
    offsets = np.concatenate([np.arange(0), *(np.arange(first, first + count) for first, count in ranges)])
    joined = list(join_ranges(ranges))
    assert np.array_equal(
        np.concatenate([np.arange(0), *(np.arange(first, first + count) for part in joined for first, count in part)]),
        np.unique(offsets),
    )
    assert all(sum(each.count for each in part) <= MAX_MESSAGES_PER_MARKER for part in joined)
    assert len(joined) == len(list(cut_ranges(offsets.tolist())))


def test_scattered_ranges_are_cut_into_markers_of_bounded_size() -> None:
    parts = list(join_ranges([OffsetRange(2 * number, 1) for number in range(MAX_RANGES_PER_MARKER + 1)]))
    assert [len(ranges) for ranges in parts] == [MAX_RANGES_PER_MARKER, 1]


def test_many_offsets_are_cut_into_markers_that_readers_accept() -> None:
    parts = list(cut_ranges(range(MAX_MESSAGES_PER_MARKER + 5)))
    assert parts == [(OffsetRange(0, MAX_MESSAGES_PER_MARKER),), (OffsetRange(MAX_MESSAGES_PER_MARKER, 5),)]
