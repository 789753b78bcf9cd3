"""What the doctor says of producers with an id."""

from __future__ import annotations

import pytest

from kmq_spark.inspection.facts import ProducersFacts, TopicFacts
from kmq_spark.inspection.producers import producers_problems, producers_summary

GOOD = TopicFacts("orders.producers", 1, {"cleanup.policy": "compact"}, 1)


def test_queue_without_producers_with_an_id_is_well() -> None:
    facts = ProducersFacts(TopicFacts("orders.producers"))
    assert list(producers_problems(facts, "orders")) == []


def test_producers_are_counted() -> None:
    assert producers_summary(ProducersFacts(GOOD, 2)) == "2 producer ids, positions in a compacted topic"


def test_settings_that_we_may_not_read_are_no_problem() -> None:
    assert list(producers_problems(ProducersFacts(TopicFacts("orders.producers", 1)), "orders")) == []


@pytest.mark.parametrize(
    ("facts", "what", "is_bad", "repair"),
    [
        (
            ProducersFacts(TopicFacts("orders.producers", 1, {"cleanup.policy": "compact,delete"}, 1)),
            "has cleanup.policy=compact,delete, must be compact", True, "cleanup.policy=compact",
        ),
        (
            ProducersFacts(TopicFacts("orders.producers", 1, {"min.insync.replicas": "1"}, 3)),
            "has min.insync.replicas=1 with 3 replicas", True, "min.insync.replicas=2",
        ),
        (ProducersFacts(GOOD, 4, ("a", "b", "c", "d")), "of a, b, c and 1 more cannot", True, "forget orders a"),
        (ProducersFacts(GOOD, 1, (), 2_000), "has been open in orders.producers for at least 2.0 s", False, ""),
    ],
)  # fmt: skip
def test_problem_is_named_with_its_repair(facts: ProducersFacts, what: str, is_bad: bool, repair: str) -> None:  # noqa: FBT001  # a table
    (problem,) = producers_problems(facts, "orders")
    assert what in problem.what
    assert (problem.is_bad, repair in problem.repair) == (is_bad, True)


@pytest.mark.parametrize(("longest_ms", "count"), [(0, 0), (60_000, 0), (59_999, 1)])
def test_brokers_that_refuse_the_time_out_of_a_sink_are_named(longest_ms: int, count: int) -> None:
    """Also before there is a producer with an id: a sink that cannot start leaves none."""
    problems = list(producers_problems(ProducersFacts(TopicFacts("orders.producers")), "orders", longest_ms))
    assert len(problems) == count
    for problem in problems:
        assert "transaction.max.timeout.ms=59999" in problem.what
        assert "transaction.max.timeout.ms=60000" in problem.repair
