"""
The bytes that kafka-mq-go's Go program wrote, beside those of the worker that stands for it in the tests.

Recorded from its own producer and consumer, built from its sources, the code unchanged, with `protoc-gen-gogofaster`
1.3.2 and confluent-kafka-go 1.9.2, on an embedded broker of Kafka 4 with a lease of 1,000 ms; see docs/go_workers.md.
"""

from __future__ import annotations

import pytest

from kmq_spark.core.markers import Marker, MarkerType, OffsetRange
from kmq_spark.wire import marker_pb2
from kmq_spark.wire.codec import decode_marker, encode_marker
from tests.kafka.go_worker import end_marker, keep_alive_marker, start_marker

LEASE_MS = 1_000
SIXTY_FIVE_BYTES = (
    "befc91741a16ad49c55ff7ad325d20181814a7d2e48a4f2b5c56f532e3041a10"
    "8f85a22a2e4c331fbb1411f71c00b5e0d47b4d103f8795627606e33c1508f98d02"
)

RECORDED = {
    "start": (
        "1a02080320e8072a06656d61696c7332026869",
        start_marker(3, 0, LEASE_MS, b"emails", b"hi"),
        Marker(MarkerType.START, 3, (OffsetRange(0, 1),), LEASE_MS),
    ),
    "start of an empty payload": (
        "1a040803100120e8072a06656d61696c73",
        start_marker(3, 1, LEASE_MS, b"emails", b""),
        Marker(MarkerType.START, 3, (OffsetRange(1, 1),), LEASE_MS),
    ),
    "start of a payload of one zero byte": (
        "1a02080220e8072a03736d73320100",
        start_marker(2, 0, LEASE_MS, b"sms", b"\x00"),
        Marker(MarkerType.START, 2, (OffsetRange(0, 1),), LEASE_MS),
    ),
    "start of the very first message": (
        f"1a0020e8072a0669646c652d303241{SIXTY_FIVE_BYTES}",
        start_marker(0, 0, LEASE_MS, b"idle-0", bytes.fromhex(SIXTY_FIVE_BYTES)),
        Marker(MarkerType.START, 0, (OffsetRange(0, 1),), LEASE_MS),
    ),
    "keep-alive": (
        "10021a040801101020e807",
        keep_alive_marker(1, 16, LEASE_MS),
        Marker(MarkerType.KEEPALIVE, 1, (OffsetRange(16, 1),), LEASE_MS),
    ),
    "end": (
        "10011a0408011011",
        end_marker(1, 17),
        Marker(MarkerType.END, 1, (OffsetRange(17, 1),)),
    ),
    "end in the first partition": (
        "10011a021001",
        end_marker(0, 1),
        Marker(MarkerType.END, 0, (OffsetRange(1, 1),)),
    ),
    "end of a first message": (
        "10011a020803",
        end_marker(3, 0),
        Marker(MarkerType.END, 3, (OffsetRange(0, 1),)),
    ),
}


@pytest.mark.parametrize(("recorded", "written", "marker"), RECORDED.values(), ids=RECORDED)
def test_worker_of_the_tests_writes_what_the_go_program_wrote(recorded: str, written: bytes, marker: Marker) -> None:
    """Byte for byte; and the tracker reads it as it was meant."""
    assert bytes.fromhex(recorded) == written
    assert marker == decode_marker(bytes.fromhex(recorded))


def test_long_numbers_take_several_bytes() -> None:
    """Partition 200 = `c8 01`, offset 300,000 = `e0 a7 12`."""
    assert bytes.fromhex("1001 1a07 08c801 10e0a712") == end_marker(200, 300_000)


def test_tracker_of_kafka_mq_go_sees_the_first_message_of_our_end_alone() -> None:
    """It knows fields 1 to 6: hence docs/go_workers.md, "The way back", drains the queue first."""
    ours = encode_marker(Marker(MarkerType.END, 3, (OffsetRange(17, 500),)))
    known_to_go = marker_pb2.Marker.FromString(ours)
    known_to_go.ClearField("ranges")
    assert decode_marker(known_to_go.SerializeToString()) == decode_marker(end_marker(3, 17))
