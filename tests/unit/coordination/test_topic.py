"""Groups lie where Kafka's own clients would put records with their names as keys."""

from __future__ import annotations

import pytest

from kmq_spark.coordination.topic import murmur2, partition_of


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_hash_is_that_of_kafkas_java_client(data: bytes, expected: int) -> None:
    """Values of Kafka's own test, `UtilsTest.testMurmur2`."""
    assert murmur2(data) == expected % 2**32


def test_partition_is_within_bounds() -> None:
    """One partition takes all groups."""
    assert {partition_of(f"group-{number}", 8) for number in range(200)} == set(range(8))
    assert partition_of("fleet", 1) == 0
