"""The consumer's half of delivery control: limits, delays, time to live, leases of one message, releases."""

from __future__ import annotations

import time

import pytest

from kmq_spark.consumer import pipeline
from kmq_spark.core.markers import MarkerType, Release
from kmq_spark.errors import ConfigError, LeaseLostError, UsageError
from kmq_spark.kafka.settings import producer_config
from tests.kafka.conftest import Queue, consumer_of, covered, read_all, receive_all, wait_until
from tests.limits import COMES_S

pytestmark = pytest.mark.kafka


def write(queue: Queue, /, *values: str | bytes, partition: int = 0, **headers: object) -> None:
    """Write messages with headers of ours, as producers and trackers do; a tracker names the first copy."""
    from confluent_kafka import Producer  # noqa: PLC0415  # QueueProducer refuses our own headers

    producer = Producer(producer_config(queue.bootstrap_servers))
    # Connected first: an idempotent producer that is not asks for its id again half a second later.
    producer.list_topics(queue.name, timeout=10)
    ours: list[tuple[str, str | bytes | None]] = [
        ("kmq-" + name.replace("_", "-"), str(value).encode()) for name, value in headers.items()
    ]
    if "silent_count" in headers and "origin" not in headers:
        ours.append(("kmq-origin", b"0:0"))
    for value in values:
        producer.produce(queue.name, value, partition=partition, headers=ours or None)
    producer.flush(10)


def deferrals(queue: Queue) -> list[tuple[list[int], int, int]]:
    """Return offsets, due instant and delay of each deferral."""
    starts = [each.marker for each in queue.markers(MarkerType.START)]
    return [(covered(each), each.due_at_ms, each.redeliver_after_ms) for each in starts if each.never_handed_out]


def handed(queue: Queue) -> list[int]:
    """Return the offsets that were started to be handed out."""
    starts = [each.marker for each in queue.markers(MarkerType.START)]
    return [offset for each in starts if not each.never_handed_out for offset in covered(each)]


def test_consumer_never_holds_more_bytes_than_its_limit(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    write(queue, *[b"x" * 400] * 5)
    monkeypatch.setattr(pipeline, "MAX_IN_FLIGHT_BYTES", 1_000)
    with consumer_of(queue) as consumer:
        messages = receive_all(consumer, 2)
        assert consumer.receive(10, timeout=0.3) == []
        assert handed(queue) == [0, 1]
        messages[0].ack()
        messages += receive_all(consumer, 1)
        assert consumer.receive(10, timeout=0.3) == []
        for message in messages[1:]:
            message.ack()
        assert [each.id.message_offset for each in receive_all(consumer, 2)] == [3, 4]
    assert handed(queue) == [0, 1, 2, 3, 4]


def test_thousand_delayed_messages_are_deferred_in_few_markers_and_none_is_handed_out(queue: Queue) -> None:
    write(queue, *map(str, range(1_000)), delay_ms=60_000)
    write(queue, "now")
    with consumer_of(queue) as consumer:
        (message,) = receive_all(consumer, 1)
        assert (message.value, message.delivery_count, consumer.in_flight_count) == (b"now", 1, 1)
        assert wait_until(lambda: queue.committed() == {0: 1_001})
        message.ack()
    records = read_all(queue.bootstrap_servers, queue.name)[:1_000]
    due_of = {offset: due for offsets, due, after in deferrals(queue) for offset in offsets if after == 0}
    assert sorted(due_of) == list(range(1_000))
    # 100 ms for the rounding
    assert all(0 <= due_of[each.offset()] - (each.timestamp()[1] + 60_000) < 100 for each in records)
    assert len(deferrals(queue)) <= 30


def test_lease_of_one_receive_is_in_its_start_and_in_its_renewals(queue: Queue) -> None:
    queue.send(*"ab")
    with consumer_of(queue, lease=60) as consumer:
        consumer.receive(1, timeout=COMES_S, lease=1.5)
        receive_all(consumer, 1)
        assert wait_until(lambda: bool(queue.markers(MarkerType.KEEPALIVE)))
        (first, *_) = queue.markers(MarkerType.KEEPALIVE)
        assert (covered(first.marker), first.marker.redeliver_after_ms) == ([0], 1_500)
        assert first.marker.release is Release.RENEWED
    assert [each.marker.redeliver_after_ms for each in queue.markers(MarkerType.START)] == [1_500, 60_000]


def test_extended_message_is_held_past_its_lease_and_the_others_are_not(queue: Queue) -> None:
    queue.send(*"ab")
    with consumer_of(queue, lease=1, max_lease=1) as consumer:
        long, short = receive_all(consumer, 2)
        long.extend(60)
        assert consumer.in_flight_count == 2
        assert wait_until(lambda: consumer.in_flight_count == 1)
        time.sleep(0.3)
        with pytest.raises(LeaseLostError):
            short.ack()
        long.ack()
        assert consumer.in_flight_count == 0
        consumer.flush()
        with pytest.raises(UsageError, match="got extend after ack"):
            long.extend(5)
    (extension,) = queue.markers(MarkerType.KEEPALIVE)
    assert (covered(extension.marker), extension.marker.redeliver_after_ms) == ([0], 60_000)


def test_lease_out_of_bounds_is_refused_and_nothing_changes(queue: Queue) -> None:
    queue.send("a")
    durations = (0.5, 12 * 3_600 + 1)
    with consumer_of(queue) as consumer:
        for duration in durations:
            with pytest.raises(ConfigError, match="lease is out of bounds"):
                consumer.receive(1, lease=duration)
        (message,) = receive_all(consumer, 1)
        for duration in durations:
            with pytest.raises(ConfigError, match=r"duration is out of bounds: got .*, 1 to 43200 seconds"):
                message.extend(duration)
        assert message.is_held


def test_failed_message_keeps_what_went_wrong(queue: Queue) -> None:
    """Unlike `release`, it adds the queue's backoff, as for a handler that raises."""
    queue.send("a")
    with consumer_of(queue) as consumer:
        (message,) = receive_all(consumer, 1)
        message.fail(KeyError("order"), delay=2)
        assert message.settled_by == "release"
    (written,) = queue.markers(MarkerType.KEEPALIVE)
    marker = written.marker
    assert (marker.release, marker.redeliver_after_ms, marker.reason) == (Release.FAILED, 2_000, "KeyError: 'order'")


def test_flooded_logical_queue_does_not_hold_up_another_ones_message(queue: Queue) -> None:
    write(queue, *["flood"] * 3_000, logical_queue="reports")
    write(queue, "mail", logical_queue="emails")
    write(queue, "plain")
    with consumer_of(queue, logical_queue="emails") as emails, consumer_of(queue) as plain:
        (mail,) = receive_all(emails, 1, max_messages=1)
        (other,) = receive_all(plain, 1, max_messages=1)
        assert (mail.value, other.value) == (b"mail", b"plain")
        # not a marker for the 3,000 that are not theirs
        assert [covered(each.marker) for each in queue.markers(MarkerType.START)] == [[3_000], [3_001]]
        mail.ack()
        other.ack()
        assert wait_until(lambda: queue.committed(f"kmq.{queue.name}.queue-emails") == {0: 3_002})
    with consumer_of(queue, logical_queue="reports") as reports:
        assert {each.value for each in receive_all(reports, 500)} == {b"flood"}


def test_position_moves_on_behind_messages_of_others_alone(queue: Queue) -> None:
    write(queue, *"abc", logical_queue="reports")
    with consumer_of(queue) as consumer:
        assert wait_until(lambda: consumer.receive(1, 0.2) == [] and queue.committed() == {0: 3})
    assert queue.markers(MarkerType.START) == []


def test_missing_topics_of_a_group_are_reported_with_the_command(queue: Queue) -> None:
    with pytest.raises(Exception, match=f"run `kmq queue create {queue.name}@billing`"):
        consumer_of(queue, subscription="billing")
