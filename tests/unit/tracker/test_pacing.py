"""How long a tracker pauses between two batches, with and without a view of the markers that arrive meanwhile."""

from __future__ import annotations

import pytest

from kmq_spark.tracker import pacing
from kmq_spark.tracker.marker_watch import Unread
from kmq_spark.tracker.pacing import MOST_UNREAD_BYTES, is_batch_wanted, pause_s


@pytest.mark.parametrize(
    ("worked_s", "rest_s", "expected_s"),
    [
        (0.05, 0.25, 0.25),  # the shortest
        (0.2, 0.25, 0.4),  # twice the batch
        (2.9, 0.25, 1.0),  # a second at most
        (3.1, 0.25, 0.0),  # behind
        (0.2, 0.0, 0.0),  # switched off
    ],
)
def test_pause_without_a_watch_is_twice_the_batch_up_to_a_second(
    monkeypatch: pytest.MonkeyPatch, worked_s: float, rest_s: float, expected_s: float
) -> None:
    """Nothing else has a say but what is due: see `Ticker.pause`."""
    monkeypatch.setattr(pacing, "REST_S", rest_s)
    assert pause_s(worked_s) == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("unread", "passed_s", "quiet_s", "due_in_s", "expected"),
    [
        (Unread(is_blind=False), 9.9, 0.9, 30.0, False),  # markers arrive, nothing is due
        (Unread(is_blind=False), 10.0, 0.0, 30.0, True),  # gauges are ten seconds old at most
        (Unread(is_blind=False), 1.0, 1.0, 30.0, True),  # no more markers: the last batch for now
        (Unread(is_blind=False, bytes=MOST_UNREAD_BYTES), 0.3, 0.0, 30.0, True),
        (Unread(is_blind=False, bytes=MOST_UNREAD_BYTES), 0.2, 0.0, 30.0, False),  # not before `REST_S`
        (Unread(is_blind=False, bytes=MOST_UNREAD_BYTES // 5), 0.3, 0.0, 1.0, True),  # a deadline is near
        (Unread(is_blind=False, bytes=MOST_UNREAD_BYTES // 5), 0.3, 0.0, 3.0, False),
        (Unread(is_blind=False), 0.3, 0.0, 1.0, False),  # little to fold: its TICK ends the pause
        (Unread(is_blind=True), 0.4, 0.0, 30.0, True),  # as long as a pause without a watch
        (Unread(is_blind=True), 0.3, 0.0, 30.0, False),
    ],
)
def test_pause_with_a_watch_ends_when_a_batch_is_worth_its_cost(
    unread: Unread,
    passed_s: float,
    quiet_s: float,
    due_in_s: float,
    expected: bool,  # noqa: FBT001  # a parameter of the test
) -> None:
    is_wanted = is_batch_wanted(unread, passed_s=passed_s, quiet_s=quiet_s, due_in_s=due_in_s, unwatched_s=0.4)
    assert is_wanted is expected
