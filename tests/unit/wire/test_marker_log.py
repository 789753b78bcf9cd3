"""What the tracker believes of its markers topic: signatures of what only a tracker writes."""

from __future__ import annotations

import pytest

from kmq_spark.core.fold import LoggedMarker, PartitionState, Rules, fold
from kmq_spark.core.markers import Outcome
from kmq_spark.core.policy import QueueRules
from kmq_spark.testing import ModelTracker, end, keep_alive, rules, start, tick
from kmq_spark.wire.codec import decode_marker, encode_marker
from kmq_spark.wire.marker_log import MarkerLog, Signing
from kmq_spark.wire.signature import KEY_BYTES, needs_signature, new_key, signed

KEY, OTHER_KEY = b"k" * KEY_BYTES, b"o" * KEY_BYTES
BY_TRACKER = {
    "tick": tick(9_000),
    "rules": rules(QueueRules(1, max_deliveries=1)),
    "redelivered": end(outcome=Outcome.REDELIVERED),
    "dead-lettered": end(outcome=Outcome.DEAD_LETTERED),
}
BY_ANYBODY = {
    "start": start(),
    "keep-alive": keep_alive(),
    "acked": end(),
    "rejected": end(outcome=Outcome.REJECTED),
    "expired": end(outcome=Outcome.EXPIRED),
}


def value_of(logged: LoggedMarker) -> bytes:
    """Return the bytes of a marker without signature."""
    assert logged.marker is not None
    return encode_marker(logged.marker)


def read(value: bytes, signing: Signing, marker_offset: int = 20, marker_partition: int = 3) -> bool:
    """Return whether a tracker believes a record."""
    reader = MarkerLog("orders.markers", marker_partition, signing)
    reader.read(marker_offset, 1_000, value)
    assert not reader.unreadable
    marker = reader.markers[0].marker
    assert marker is not None
    return marker.is_trusted


@pytest.mark.parametrize("logged", BY_TRACKER.values(), ids=BY_TRACKER)
def test_what_only_a_tracker_writes_counts_with_its_signature_alone(logged: LoggedMarker) -> None:
    """The right key, for this partition, of these very bytes."""
    value, signing = value_of(logged), Signing(KEY, 10)
    good = signed(value, 3, KEY)
    assert read(good, signing)
    assert not read(value, signing)
    assert not read(signed(value, 3, OTHER_KEY), signing)
    assert not read(signed(value, 4, KEY), signing)
    # A consumer id ("x" in field 11, tag 5a) put before the signature, which was right for the bytes without it.
    assert not read(value + b"\x5a\x01x" + good[len(value) :], signing)
    # Fields behind the signature: whatever they say, they are not signed.
    assert not read(good + b"\x5a\x01x", signing)


@pytest.mark.parametrize("logged", BY_ANYBODY.values(), ids=BY_ANYBODY)
def test_what_consumers_write_needs_no_signature(logged: LoggedMarker) -> None:
    assert logged.marker is not None
    assert not needs_signature(logged.marker)
    assert read(value_of(logged), Signing(KEY))


def test_markers_of_trackers_that_did_not_sign_count_below_the_first_that_does() -> None:
    """An upgrade, or a group whose offsets were deleted."""
    value = value_of(tick())
    assert [read(value, Signing(KEY, 20), offset) for offset in (19, 20)] == [True, False]
    assert read(value, Signing())


def test_signed_record_is_the_same_marker_to_every_reader() -> None:
    """One that knows no signatures skips the field."""
    for logged in BY_TRACKER.values():
        assert decode_marker(signed(value_of(logged), 0, new_key())) == logged.marker


def test_forged_markers_are_counted_and_change_nothing() -> None:
    """No decision at a forged TICK, no forged limit of deliveries, no message taken away by a forged END."""
    reader = MarkerLog("orders.markers", 0, Signing(KEY))
    forged = [value_of(logged) for logged in BY_TRACKER.values()]
    values = [value_of(start(lease_ms=5_000)), *forged, signed(value_of(tick()), 0, KEY)]
    for marker_offset, value in enumerate(values):
        reader.read(marker_offset, 1_000 if marker_offset < len(forged) + 1 else 9_000, value)
    result = fold(PartitionState.empty(), reader.markers, Rules())
    assert [(row.message_offset, row.tick_marker_offset) for row in result.decisions.messages()] == [(7, 5)]
    assert (result.status.counters["untrusted"], result.status.rules) == (4, None)
    assert ModelTracker().fold(reader.markers) == (result.decisions.messages(), result.status)


def test_key_of_a_queue_is_random_and_never_shown() -> None:
    assert new_key() != new_key()
    assert KEY.decode() not in repr(Signing(KEY))


def test_record_that_is_no_marker_is_reported_with_its_place_and_takes_its_offset() -> None:
    """Its append time still moves the partition's clock, so the record stays in the log without a marker."""
    reader = MarkerLog("orders.markers", 3)
    reader.read(20, 1_000, b"\xff\xfe")
    ((marker_offset, text),) = reader.unreadable
    assert (marker_offset, "orders.markers[3]@20" in text) == (20, True)
    assert reader.markers == [LoggedMarker(20, 1_000, None)]
