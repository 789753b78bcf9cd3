"""
The bytes of markers, written out: what was written once must stay readable; those of kafka-mq-go: `test_go_wire.py`.

Protobuf: each field is a tag (`number << 3 | kind`), then a varint (kind 0) or a length and bytes (kind 2).
`08` = field 1 varint, `10` = 2 varint, `1a` = 3 bytes, `20` = 4 varint, `2a` = 5 bytes, `32` = 6 bytes, `3a` = 7 bytes,
`40` = 8 varint, `48` = 9 varint, `52` = 10 bytes, `5a` = 11 bytes, `60` = 12 varint. Values of 0 are left out.
Varints: 300 = `ac 02`, 500 = `f4 03`, 1,000 = `e8 07`, 30,000 = `b0 ea 01`, -1 = nine `ff` and `01`.
"""

from __future__ import annotations

import pytest

from kmq_spark.core.backoff import Backoff, BackoffKind
from kmq_spark.core.markers import Marker, MarkerType, OffsetRange, Outcome
from kmq_spark.core.policy import QueueRules
from kmq_spark.wire.codec import decode_marker, encode_marker

# message_id: 5 bytes, partition 2, offset 300
MESSAGE_2_300 = "1a05 0802 10ac02"
ONE = (OffsetRange(300, 1),)

GOLDEN = {
    # no type: START is 0; redeliver_after_ms; no ranges: message_id alone; no delivery_count: the first
    "start of one message": (
        f"{MESSAGE_2_300} 20b0ea01",
        Marker(MarkerType.START, 2, ONE, 30_000),
    ),
    # ranges: 6 bytes, first 300, count 500; 5 bytes, first 1,000, count 1; delivery_count 3; consumer_id "w"
    "start of two ranges": (
        f"{MESSAGE_2_300} 20b0ea01 3a06 08ac02 10f403 3a05 08e807 1001 4003 5a01 77",
        Marker(
            MarkerType.START,
            2,
            (OffsetRange(300, 500), OffsetRange(1_000, 1)),
            30_000,
            delivery_count=3,
            consumer_id="w",
        ),
    ),
    # type 1; no outcome: ACKED is 0
    "end": (f"1001 {MESSAGE_2_300}", Marker(MarkerType.END, 2, ONE)),
    # type 1; outcome 1; reason, 3 bytes "bad"
    "rejection": (
        f"1001 {MESSAGE_2_300} 4801 5203 626164",
        Marker(MarkerType.END, 2, ONE, outcome=Outcome.REJECTED, reason="bad"),
    ),
    # type 2; redeliver_after_ms
    "keepalive": (f"1002 {MESSAGE_2_300} 20b0ea01", Marker(MarkerType.KEEPALIVE, 2, ONE, 30_000)),
    # type 2; no redeliver_after_ms: due at the next TICK; never_handed_out 1
    "release unseen": (
        f"1002 {MESSAGE_2_300} 6001",
        Marker(MarkerType.KEEPALIVE, 2, ONE, never_handed_out=True),
    ),
    # type 3; message_id: 22 bytes, partition -1, offset -1
    "tick": (f"1003 1a16 08{'ff' * 9}01 10{'ff' * 9}01", Marker(MarkerType.TICK)),
    # type 4; message_id as of a tick; rules (field 15, tag 7a), 24 bytes: version 2, max_deliveries 3, backoff 3,
    # backoff_initial_ms 300, backoff_max_ms 30,000, backoff_jitter 0.5 (kind 1, 8 bytes), dead_letters_expired 1
    "rules": (
        f"1004 1a16 08{'ff' * 9}01 10{'ff' * 9}01 7a18 0802 1003 1803 20ac02 28b0ea01 31000000000000e03f 3801",
        Marker(
            MarkerType.RULES,
            rules=QueueRules(2, 3, Backoff(BackoffKind.EXPONENTIAL, 300, 30_000, 0.5), dead_letters_expired=True),
        ),
    ),
}


@pytest.mark.parametrize(("golden", "marker"), GOLDEN.values(), ids=GOLDEN)
def test_marker_has_its_golden_bytes(golden: str, marker: Marker) -> None:
    """What this build writes is what every earlier one wrote, and it is read as it was meant."""
    assert (bytes.fromhex(golden), marker) == (encode_marker(marker), decode_marker(bytes.fromhex(golden)))


def test_unknown_fields_are_skipped() -> None:
    """A later build may add fields: number 99 here (tag `98 06`), value 1."""
    assert Marker(MarkerType.END, 2, ONE) == decode_marker(bytes.fromhex(f"1001 {MESSAGE_2_300} 980601"))
