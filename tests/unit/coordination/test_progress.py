"""The position of a partition under acknowledgements in any order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kmq_spark.coordination.consumption import Progress


@given(st.lists(st.integers(1, 4), max_size=20), st.data())
def test_position_is_the_first_message_that_is_not_acknowledged(gaps: list[int], data: st.DataObject) -> None:
    """Offsets may have gaps; messages may be acknowledged twice, and in batches."""
    offsets, offset = [], 0
    for gap in gaps:
        offset += gap
        offsets.append(offset)
    progress, open_offsets, end = Progress(), [], 0
    while offsets:
        count = data.draw(st.integers(1, len(offsets)))
        handed_out, offsets = offsets[:count], offsets[count:]
        progress.hand_out(handed_out)
        open_offsets += handed_out
        end = handed_out[-1] + 1
        acked = data.draw(st.lists(st.sampled_from(open_offsets), max_size=5)) if open_offsets else []
        open_offsets = [one for one in open_offsets if one not in acked]
        assert progress.ack(acked) == min(open_offsets, default=end)
    assert progress.ack(open_offsets) == end
    assert progress.ack([0, 1]) == end
    assert not progress._acked
