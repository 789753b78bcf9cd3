"""The backoff of failed queries."""

from __future__ import annotations

from kmq_spark.spark.restarts import restart_backoff_s


def test_backoff_doubles_up_to_a_limit() -> None:
    assert [restart_backoff_s(failures) for failures in (1, 2, 3, 4, 5, 6, 7)] == [1, 2, 4, 8, 16, 30, 30]
    assert restart_backoff_s(5_000) == 30
