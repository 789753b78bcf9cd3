"""Markers of other versions are markers, for the checker and for the product."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from faults import protocol
from faults.older import newer_marker, older_marker
from kmq_spark.core.markers import MarkerType, OffsetRange
from kmq_spark.wire.codec import decode_marker

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("form", [older_marker, newer_marker])
@pytest.mark.parametrize(("partition", "offset", "lease_ms"), [(0, 0, 3_000), (3, 70_000, 400), (130, 2**40, 0)])
def test_marker_of_another_version_says_what_ours_says(
    form: Callable[[MarkerType, int, int, int], bytes], partition: int, offset: int, lease_ms: int
) -> None:
    """What it lacks is its default, what it has besides is skipped."""
    for kind in (MarkerType.START, MarkerType.END):
        value = form(kind, partition, offset, lease_ms)
        ours, theirs = decode_marker(value), protocol.decode(value)
        assert theirs is not None
        assert (ours.type, ours.queue_partition, ours.ranges) == (kind, partition, (OffsetRange(offset, 1),))
        assert (theirs.type.value, list(theirs.covered())) == (kind.value, [(partition, offset)])
        if kind is MarkerType.START:
            assert (ours.redeliver_after_ms, ours.delivery_count) == (lease_ms, 1)
            assert (theirs.redeliver_after_ms, theirs.delivery_count) == (lease_ms, 1)
