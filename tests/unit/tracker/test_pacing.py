"""How long a tracker pauses between two batches: the setting, or twice the batch, with a limit."""

from __future__ import annotations

import pytest

from kmq_spark.tracker.pacing import pause_s


@pytest.mark.parametrize(
    ("worked_s", "rest_ms", "expected_s"),
    [
        (0.05, 250, 0.25),  # the setting
        (0.2, 250, 0.4),  # twice the batch
        (2.9, 250, 1.0),  # a second at most
        (2.9, 4_000, 4.0),  # unless the setting is longer
        (3.1, 4_000, 0.0),  # behind
        (0.2, 0, 0.0),  # switched off
    ],
)
def test_pause_is_the_setting_or_twice_the_batch_up_to_a_second(
    worked_s: float, rest_ms: int, expected_s: float
) -> None:
    """Nothing else has a say but what is due: see `Ticker.pause`."""
    assert pause_s(worked_s, rest_ms) == pytest.approx(expected_s)
