"""
Pack integer columns into few bytes.

Each value is stored as its difference from the smallest value, in the narrowest width that holds the largest
difference. A long column is stored as runs of equal values, or as the differences between neighbouring values (steps),
if that is shorter.

Rule 1: a column of equal values takes only a head, which contains the value.
Rule 2: the reader checks each length before it uses it.

Why: every batch copies the state of a partition between the Python worker, Spark and its state store, so bytes cost
more than the milliseconds of packing. Messages that were started together share a deadline (runs), and their offsets
are close to each other (steps). Where no two offsets are adjacent, a message takes about one byte.
Source: frame-of-reference, run-length and delta coding, as in Parquet and Lucene.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from kmq_spark.errors import StateError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HEAD = struct.Struct("<qqq")  # length, width in bytes or coding, base or first value
_WIDTHS: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<i8")}

_RUNS, _STEPS = -1, -2
"""Codings in the width field: `_RUNS`: columns of values and of lengths follow; `_STEPS`: a column of steps follows."""

WORTH_LOOKING = 1_000
"""Number of values from which on runs and steps are tried. For fewer values the attempt costs more than it saves."""

_RUN_BYTES = 12
"""Largest size of a run, except with absurd lengths: a value of 8 bytes and a length of 4."""

_MOST_NESTED = 8
"""Largest nesting depth of columns, for writing and for reading."""


def pack_column(column: NDArray[np.int64], *, nested: int = 0) -> list[bytes | memoryview]:
    """Pack a column."""
    if not len(column):
        return [_HEAD.pack(0, 0, 0)]
    base, top = int(column.min()), int(column.max())
    if base == top:
        return [_HEAD.pack(len(column), 0, base)]
    width = next(width for width in _WIDTHS if top - base < 1 << 8 * width)
    packed = (column - base).astype(_WIDTHS[width])
    is_worth_it = len(column) >= WORTH_LOOKING and nested < _MOST_NESTED
    shorter = _shorter(column, packed, nested + 1) if is_worth_it else []
    return shorter or [_HEAD.pack(len(column), width, base), packed.data.cast("B")]


def unpack_column(blob: memoryview, at: int, *, nested: int = 0) -> tuple[NDArray[np.int64], int]:
    """Unpack a column."""
    if len(blob) - at < _HEAD.size:
        raise StateError(f"column cut short: got {len(blob) - at} bytes, at least {_HEAD.size} needed")
    length, width, base = _HEAD.unpack_from(blob, at)
    at += _HEAD.size
    if width == 0:
        # The broadcast array keeps a single number in memory, whatever its length.
        return np.broadcast_to(np.int64(base), (length,)), at
    if width in {_RUNS, _STEPS}:
        if nested >= _MOST_NESTED:
            raise StateError(f"column nested too deep: got more than {_MOST_NESTED} columns in one another")
        if width == _RUNS:
            return _unpack_runs(blob, at, length, nested + 1)
        return _unpack_steps(blob, at, length, base, nested + 1)
    if width not in _WIDTHS or not 0 <= length <= (len(blob) - at) // width:
        raise StateError(f"column cut short: got {len(blob) - at} bytes for {length!r} values of {width!r} bytes")
    values = np.frombuffer(blob, dtype=_WIDTHS[width], count=length, offset=at).astype(np.int64)
    values += base
    return values, at + length * width


def _shorter(column: NDArray[np.int64], packed: NDArray[Any], nested: int) -> list[bytes | memoryview]:
    """Return the column as runs or steps; an empty list if neither is shorter."""
    is_first = np.ones(len(packed), dtype=np.bool_)
    np.not_equal(packed[1:], packed[:-1], out=is_first[1:])
    if int(np.count_nonzero(is_first)) * _RUN_BYTES < packed.nbytes:
        first = np.flatnonzero(is_first)
        lengths = np.diff(first, append=len(column))
        values_and_lengths = (*pack_column(column[first], nested=nested), *pack_column(lengths, nested=nested))
        return [_HEAD.pack(len(column), _RUNS, 0), *values_and_lengths]
    if packed.itemsize == 1:
        return []
    steps = np.diff(column)
    if int(steps.max()) - int(steps.min()) >= 1 << 4 * packed.itemsize:  # wider than half
        return []
    return [_HEAD.pack(len(column), _STEPS, int(column[0])), *pack_column(steps, nested=nested)]


def _unpack_runs(blob: memoryview, at: int, length: int, nested: int) -> tuple[NDArray[np.int64], int]:
    values, at = unpack_column(blob, at, nested=nested)
    lengths, at = unpack_column(blob, at, nested=nested)
    if len(values) != len(lengths) or int(lengths.min(initial=1)) < 1 or int(lengths.sum()) != length:
        raise StateError(f"runs contradict each other: got {len(values)} and {len(lengths)} for {length!r} values")
    return np.repeat(values, lengths), at


def _unpack_steps(blob: memoryview, at: int, length: int, first: int, nested: int) -> tuple[NDArray[np.int64], int]:
    steps, at = unpack_column(blob, at, nested=nested)
    if len(steps) != length - 1:
        raise StateError(f"steps contradict their column: got {len(steps)} for {length!r} values")
    values = np.empty(length, dtype=np.int64)
    values[0] = first
    np.cumsum(steps, out=values[1:])
    values[1:] += first
    return values, at
