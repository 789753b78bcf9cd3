"""A limit on how often something is done."""

from __future__ import annotations

from kmq_spark.rate_limit import RateLimit


def test_first_time_is_allowed_and_none_within_the_interval() -> None:
    limit = RateLimit(3_600)
    assert [limit.allows() for _ in range(3)] == [True, False, False]


def test_interval_of_nothing_allows_every_time() -> None:
    limit = RateLimit(0)
    assert [limit.allows() for _ in range(3)] == [True, True, True]
