"""How long redelivery may be away in a fleet: each ending is judged by the speed of the machine at that time."""

from __future__ import annotations

import pytest

from faults.on_fleets import Away


@pytest.mark.parametrize(
    ("away_s", "patience", "is_longer"), [(3.0, 1.0, False), (3.1, 1.0, True), (4.4, 1.5, False), (4.6, 1.5, True)]
)
def test_bound_grows_with_the_slowness_of_that_time(away_s: float, patience: float, is_longer: bool) -> None:  # noqa: FBT001  # a table
    assert Away(away_s, patience).is_longer_than(3.0) is is_longer


def test_redelivery_that_did_not_come_back_is_longer_than_any_bound() -> None:
    assert Away(float("inf"), 10.0).is_longer_than(60.0)
