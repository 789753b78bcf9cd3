"""What is logged of commits that fail; all else is tried on a broker, in tests/kafka."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError

from kmq_spark.consumer import offsets
from kmq_spark.consumer.offsets import OffsetCommits
from kmq_spark.pauses import RateLimit

if TYPE_CHECKING:
    import pytest


def test_commits_that_fail_one_after_the_other_cost_a_line_now_and_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rebalance refuses the commit of every batch: a thousand of them in a few seconds."""
    commits = OffsetCommits("orders")
    refused = KafkaError(KafkaError.ILLEGAL_GENERATION)
    with caplog.at_level(logging.WARNING):
        for _ in range(1_000):
            commits.on_commit(refused, [])
        monkeypatch.setattr(commits, "_warning_limit", RateLimit(0))  # the interval is over
        commits.on_commit(refused, [])
    lines = [record.getMessage() for record in caplog.records if record.name == offsets.__name__]
    assert [line.partition("; ")[2].partition(" commits")[0] for line in lines] == ["1", "1000"]
    assert lines[0].startswith("cannot commit offsets of orders: ")
