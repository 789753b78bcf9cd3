"""The bytes of a partition's state."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmq_spark.core import packing
from kmq_spark.core.backoff import Backoff, BackoffKind
from kmq_spark.core.fold import PartitionState, Status, fold
from kmq_spark.core.in_flight import Columns, InFlight, with_texts
from kmq_spark.core.marks import Marks
from kmq_spark.core.packing import pack_column, unpack_column
from kmq_spark.core.policy import QueueRules
from kmq_spark.core.state import STATE_VERSION, Counters
from kmq_spark.errors import StateError
from tests.builders import log, start

HEAD = struct.Struct("<4sHHI")


def state_of(*rows: tuple[int, int, int, int], reasons: dict[int, str] | None = None) -> PartitionState:
    """Return a state of these rows: key, deadline, delivery count, START."""
    columns = np.array(sorted(rows), dtype=np.int64).reshape(-1, 4).T
    key, given_back = columns[0], columns[2] % 2 == 1
    texts, number = with_texts(("",), [(reasons or {}).get(each, "") for each in key.tolist()])
    jitter_ms = (columns[2] % 3 / 4).astype(np.float64)
    table = Columns(key, np.ones_like(key), columns[1], columns[2], columns[3], given_back, number, jitter_ms)
    return PartitionState(
        InFlight(table, texts),
        5_000,
        42,
        Counters(started=3, unreadable=1),
    )


def rows_of(state: PartitionState) -> list[list[int]]:
    """Return the rows of a state."""
    return [
        column.tolist() for column in state.in_flight.columns.arrays() if column is not state.in_flight.columns.text
    ]


def one(value: int) -> bytes:
    """Return a packed column of one value."""
    return struct.pack("<qqq", 1, 0, value)


COLUMN_OF_ONE = one(0)


READS = f"this build reads version {STATE_VERSION} with up to {len(fields(Counters))}"


def sealed(counter_count: int, rest: bytes, version: int = STATE_VERSION) -> bytes:
    """Return a blob with a right checksum."""
    return HEAD.pack(b"KMQS", version, counter_count, zlib.crc32(rest)) + rest


@given(
    st.lists(
        st.tuples(st.integers(0, 2**63 - 1), st.integers(-1, 2**48), st.integers(0, 2**31 - 1), st.integers(0, 2**62)),
        unique_by=lambda row: row[0],
    ),
    st.lists(st.text(max_size=20), max_size=5),
)
def test_state_survives_its_bytes(rows: list[tuple[int, int, int, int]], texts: list[str]) -> None:
    """Whatever is in flight, wherever it lies."""
    reasons = {row[0]: text for row, text in zip(rows, texts, strict=False) if text}
    state = state_of(*rows, reasons=reasons)
    keys = np.array([row[0] for row in rows[::2]], dtype=np.int64)
    state.marks, state.term, state.term_by = Marks().with_runs(keys, keys * 0 + 1), 41, "tracker ☃"
    again = PartitionState.from_bytes(state.to_bytes())
    assert rows_of(state) == rows_of(again)
    assert reasons == again.in_flight.reasons()
    assert (again.marks.first.tolist(), again.marks.end.tolist()) == (
        state.marks.first.tolist(), state.marks.end.tolist(),
    )  # fmt: skip
    assert (again.term, again.term_by) == (41, "tracker ☃")
    assert state.status() == again.status()


OWN_RULES = QueueRules(3, 7, Backoff(BackoffKind.EXPONENTIAL, 200, 9_000, 0.25), dead_letters_expired=True)


@pytest.mark.parametrize("own", [None, OWN_RULES])
def test_status_survives_json(own: QueueRules | None) -> None:
    """It travels as a text column."""
    status = fold(PartitionState.empty(own), log(start())).status
    assert status.rules == own
    assert status == Status.from_dict(json.loads(json.dumps(status.to_dict())))


@pytest.mark.parametrize(
    ("blob", "finding"),
    [
        (b"", "got b'', b'KMQS' expected"),
        (b"PAR1" + bytes(40), "got b'PAR1', b'KMQS' expected"),
        (sealed(12, bytes(400), version=3), f"version 3 with 12 counters, {READS}"),
        (sealed(99, bytes(400)), f"version {STATE_VERSION} with 99 counters, {READS}"),
        (sealed(12, bytes(8)), "unpack_from requires"),
        (sealed(0, bytes(32)), "column cut short: got 0 bytes, at least 24 needed"),
        (sealed(0, bytes(32) + struct.pack("<qqq", 2, 3, 0)), "column cut short: got 0 bytes for 2 values of 3 bytes"),
        (sealed(0, bytes(32) + struct.pack("<qqq", 2, 1, 0)), "column cut short: got 0 bytes for 2 values of 1 bytes"),
        (sealed(0, bytes(32) + struct.pack("<qqq", -2, 0, 0)), "non-negative"),
        (sealed(0, bytes(32) + struct.pack("<qqq", 1, 0, 0) + bytes(8 * 24)), "columns of unequal length"),
        (sealed(0, bytes(32 + 13 * 24 + 8) + b"x"), "length differs: got 353 bytes, 352 expected"),
        (sealed(0, bytes(32) + COLUMN_OF_ONE * 9), "run without messages: got count 0, minimum 1"),
        # One run, whose text is the third of the empty one and another.
        (
            sealed(0, bytes(32) + COLUMN_OF_ONE + one(1) + COLUMN_OF_ONE * 4 + one(2) + COLUMN_OF_ONE + one(1) + b"x"),
            "texts contradict their rows: got number 2 of 2 texts",
        ),
        (
            sealed(0, bytes(32) + COLUMN_OF_ONE + one(1) + COLUMN_OF_ONE * 5 + one(-1) + bytes(24)),
            "jitter out of bounds: got nan ms, allowed 0 to 43200000",
        ),
    ],
)
def test_foreign_state_is_refused_and_the_error_says_what_to_do(blob: bytes, finding: str) -> None:
    """Nothing is guessed."""
    with pytest.raises(StateError) as caught:
        PartitionState.from_bytes(blob)
    assert finding in str(caught.value)
    assert str(caught.value).startswith("cannot read tracker state: ")
    assert str(caught.value).endswith(
        "; start the tracker with a new checkpoint: its state is rebuilt from the markers topic"
    )


def test_flipped_bit_is_noticed() -> None:
    """Wherever it lies."""
    blob = state_of((7, 6_000, 1, 0)).to_bytes()
    for at in range(len(blob)):
        damaged = bytearray(blob)
        damaged[at] ^= 1
        finding = "wrong checksum" if at >= HEAD.size - 4 else "cannot read tracker state"
        with pytest.raises(StateError, match=finding):
            PartitionState.from_bytes(damaged)


def test_state_with_fewer_counters_reads_the_new_ones_as_zero() -> None:
    """Counters are added at the end."""
    # clock, append time of the last record, next marker offset, last TICK that decided, started, renewed
    numbers = struct.pack("<qqqqqq", 5_000, 4_000, 42, -1, 3, 1)
    state = PartitionState.from_bytes(sealed(2, numbers + bytes(13 * 24 + 8)))
    assert (state.clock_ms, state.appended_at_ms, state.next_marker_offset) == (5_000, 4_000, 42)
    assert Counters(started=3, renewed=1) == state.counters


@pytest.mark.parametrize(("span", "width"), [(0, 0), (255, 1), (256, 2), (65_535, 2), (65_536, 4), (2**32, 8)])
def test_column_takes_the_narrowest_width(span: int, width: int) -> None:
    """A head of 24 bytes, then two values."""
    assert 24 + 2 * width == len(b"".join(pack_column(np.array([1_000, 1_000 + span], dtype=np.int64))))


def long_column(pieces: list[tuple[int, int, int]]) -> list[int]:
    """Return values in pieces (first, step, count): runs where the step is 0."""
    return [first + step * number for first, step, count in pieces for number in range(count)]


def bytes_in_narrowest_width(values: list[int]) -> int:
    """Return what the values take without runs and steps."""
    span = max(values) - min(values)
    return len(values) * next((width for width in (1, 2, 4) if span < 1 << 8 * width), 8)


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 300), st.integers(1, 700)), min_size=1, max_size=6))
def test_long_column_survives_packing_and_gets_no_longer(pieces: list[tuple[int, int, int]]) -> None:
    """Runs, steps, steps of steps: whatever coding is chosen."""
    values = long_column(pieces)
    blob = b"".join(pack_column(np.array(values, dtype=np.int64)))
    again, at = unpack_column(memoryview(blob), 0)
    assert values == again.tolist()
    assert len(blob) == at
    assert len(blob) <= bytes_in_narrowest_width(values) + 8 * 24


@pytest.mark.parametrize("most", range(5))
def test_writer_nests_no_deeper_than_a_reader_accepts(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """A column of steps of steps of runs, which would be nested four times."""
    monkeypatch.setattr(packing, "_MOST_NESTED", most)
    column = np.cumsum(np.cumsum(np.repeat(np.arange(3_000) % 250, 40)))
    blob = b"".join(pack_column(column))
    again, at = unpack_column(memoryview(blob), 0)
    assert (again == column).all()
    assert len(blob) == at
    assert (len(blob) < 8 * len(column)) == (most > 0)


@pytest.mark.parametrize(
    ("values", "most_bytes"),
    [
        (np.cumsum(np.arange(100_000) % 7 + 2), 100_000 + 100),  # offsets of which no two are neighbours: steps
        (np.repeat(np.arange(200) ** 3, 500), 200 * 4 + 200),  # deadlines of what was started together: runs
        (np.arange(100_000) * 3, 100),  # steps that are all the same
        (np.arange(100_000) % 200, 100_000 + 24),  # neither is shorter
    ],
)
def test_long_column_takes_the_coding_that_suits_it(values: np.ndarray, most_bytes: int) -> None:
    """Neighbours that say the same are said once."""
    blob = b"".join(pack_column(values))
    again, _ = unpack_column(memoryview(blob), 0)
    assert (again == values).all()
    assert len(blob) <= most_bytes


HEAD_OF_COLUMN = struct.Struct("<qqq")


@pytest.mark.parametrize(
    ("parts", "finding"),
    [
        ([(5, -1, 0), (2, 0, 7), (1, 0, 5)], "runs contradict each other: got 2 and 1 for 5 values"),
        ([(5, -1, 0), (2, 0, 7), (2, 0, 2)], "runs contradict each other: got 2 and 2 for 5 values"),
        ([(0, -1, 0), (2, 0, 7), (2, 0, 0)], "runs contradict each other: got 2 and 2 for 0 values"),
        ([(5, -2, 1), (5, 0, 1)], "steps contradict their column: got 5 for 5 values"),
        ([(0, -2, 1), (0, 0, 1)], "steps contradict their column: got 0 for 0 values"),
        ([(5, -2, 1)] * 12, "nested too deep: got more than 8"),
        ([(5, -1, 0)] * 12, "nested too deep: got more than 8"),
        ([part for _ in range(12) for part in ((5, -1, 0), (1, 0, 7))], "nested too deep: got more than 8"),
        ([(5, -3, 1)], "got 0 bytes for 5 values of -3 bytes"),
        ([(5, -1, 1)], "column cut short: got 0 bytes, at least 24 needed"),
    ],
)
def test_column_that_contradicts_itself_is_refused(parts: list[tuple[int, int, int]], finding: str) -> None:
    """Nothing is guessed."""
    blob = b"".join(HEAD_OF_COLUMN.pack(*part) for part in parts)
    with pytest.raises(StateError, match=finding):
        unpack_column(memoryview(blob), 0)
