"""How often something is done: a limit, and the pause between two attempts."""

from __future__ import annotations

from kmq_spark.pauses import RateLimit, retry_pause_s


def test_first_time_is_allowed_and_none_within_the_interval() -> None:
    limit = RateLimit(3_600)
    assert [limit.allows() for _ in range(3)] == [True, False, False]


def test_pause_doubles_up_to_a_limit() -> None:
    assert [retry_pause_s(failures, 1.0, 30.0) for failures in (1, 2, 3, 4, 5, 6, 7)] == [1, 2, 4, 8, 16, 30, 30]
    assert retry_pause_s(5_000, 0.1, 5.0) == 5.0
