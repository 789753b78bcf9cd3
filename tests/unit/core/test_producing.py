"""The lives of a producer that resumes, and its position records."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmq_spark.core.producing import ProducerState, check_producer_id, next_life
from kmq_spark.errors import ConfigError, MalformedRecordError, UnsupportedVersionError
from kmq_spark.wire.position import MAX_RECORD_BYTES, decode_state, encode_state

BEFORE = ProducerState(3, 100, "a", 1_000, "p-1")

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=50),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def test_first_life_has_generation_1_and_no_message() -> None:
    assert next_life(None, at_ms=5, by="p-1") == ProducerState(1, 0, None, 5, "p-1")


def test_next_life_keeps_sequence_and_position() -> None:
    assert next_life(BEFORE, at_ms=5, by="p-2") == ProducerState(4, 100, "a", 5, "p-2")


@pytest.mark.parametrize("producer_id", ["", "x" * 101, "a b", "a/b", "ä", "a\n", 7, None, b"a"])
def test_producer_id_that_is_no_name_is_refused(producer_id: object) -> None:
    with pytest.raises(ConfigError, match=r"producer name is not allowed: got .*, 1 to 100 of A-Z a-z 0-9") as caught:
        check_producer_id(producer_id)
    assert f"got {producer_id!r}"[:60] in str(caught.value)


GOLDEN = {
    "first life": (
        b'{"version":1,"generation":1,"sequence":0,"position":null,"at":1000,"by":"kmq-producer-h-1"}',
        ProducerState(1, 0, None, 1_000, "kmq-producer-h-1"),
    ),
    "json": (
        '{"version":1,"generation":3,"sequence":100000,"position":{"file":"ä.csv","line":[7,1.5]},"at":2000,"by":"p"}'.encode(),
        ProducerState(3, 100_000, {"file": "ä.csv", "line": [7, 1.5]}, 2_000, "p"),
    ),
    "bytes": (
        b'{"version":1,"generation":3,"sequence":1,"position_base64":"AP8=","at":0,"by":""}',
        ProducerState(3, 1, b"\x00\xff", 0, ""),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("golden", "state"), GOLDEN.values(), ids=GOLDEN)
def test_position_record_has_its_golden_bytes(golden: bytes, state: ProducerState) -> None:
    """What this build writes is what every earlier one wrote, and it is read as it was meant."""
    assert (encode_state(state), decode_state(golden)) == (golden, state)


def test_unknown_field_is_skipped() -> None:
    """A later build may add fields."""
    value = b'{"version":1,"generation":1,"sequence":2,"position":5,"at":0,"by":"","colour":"red"}'
    assert decode_state(value) == ProducerState(1, 2, 5, 0, "")


def of(position: Any) -> ProducerState:  # noqa: ANN401  # any JSON, and what is none
    """Return a state with a position."""
    return ProducerState(1, 1, position, 0, "")


@given(JSON_VALUES | st.binary(max_size=4_096))
def test_position_comes_back_as_it_was_given(position: Any) -> None:  # noqa: ANN401  # any JSON
    assert decode_state(encode_state(of(position))).position == position


@pytest.mark.parametrize("position", [b"x" * 4_096, "x" * 4_094, 10**4_000])
def test_largest_position_is_taken(position: Any) -> None:  # noqa: ANN401  # any JSON
    assert decode_state(encode_state(of(position))).position == position


@pytest.mark.parametrize("position", [b"x" * 4_097, "x" * 4_095, ["x" * 5_000], "ä" * 2_048])
def test_position_that_is_too_large_is_refused_with_its_size(position: Any) -> None:  # noqa: ANN401  # any JSON
    with pytest.raises(ConfigError, match=r"position is too large: got \d+ bytes, at most 4096; store a reference"):
        encode_state(of(position))


def _nested() -> list[Any]:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    return nested


@pytest.mark.parametrize(
    "position",
    [
        (1, 2), [(1, 2)], {1: "a"}, {"a": {None: 1}}, math.nan, math.inf, [math.nan], bytearray(b"x"), object(), {1, 2},
        "\ud800", 10**5_000, _nested(),
    ],
    ids=lambda position: type(position).__name__,
)  # fmt: skip
def test_position_that_is_neither_bytes_nor_json_is_refused(position: Any) -> None:  # noqa: ANN401  # wrong on purpose
    with pytest.raises(ConfigError, match=r"position is neither bytes nor JSON: got .*; use text, numbers, lists"):
        encode_state(of(position))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[" * 100_000, "is too large"),
        (b"[" * 10_000, "is not JSON"),
        (b" " * (MAX_RECORD_BYTES + 1), "is too large: got 16385 bytes, at most 16384"),
        (b"[]", "has no version"),
        (b'{"version":true}', "has no version"),
        (b'{"version":1,"generation":0,"sequence":0,"at":0}', "has no valid generation: got 0"),
        (b'{"version":1,"generation":1,"sequence":-1,"at":0}', "has no valid sequence: got -1"),
        (b'{"version":1,"generation":1,"sequence":9223372036854775808,"at":0}', "has no valid sequence"),
        (b'{"version":1,"generation":1,"sequence":1.0,"at":0}', "has no valid sequence: got 1.0"),
        (b'{"version":1,"generation":1,"sequence":1}', "has no valid at: got None"),
        (b'{"version":1,"generation":1,"sequence":1,"at":0,"by":7}', "has no valid by"),
        (b'{"version":1,"generation":1,"sequence":1,"at":0,"position_base64":"*"}', "is not Base64"),
        (b'{"version":1,"generation":1,"sequence":1,"at":0,"position_base64":7}', "is not Base64"),
    ],
)
def test_value_that_is_no_position_record_is_refused_with_its_place(value: bytes, message: str) -> None:
    with pytest.raises(MalformedRecordError, match=message) as raised:
        decode_state(value, topic="orders.producers", partition=0, offset=7)
    assert "orders.producers[0]@7" in str(raised.value)
    assert (raised.value.topic, raised.value.partition, raised.value.offset) == ("orders.producers", 0, 7)


def test_position_record_of_a_later_version_is_refused_with_what_to_do() -> None:
    with pytest.raises(UnsupportedVersionError, match="version 2, this build reads up to 1; upgrade this program"):
        decode_state(b'{"version":2}')
