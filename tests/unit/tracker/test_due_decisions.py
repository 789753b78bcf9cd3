"""The decisions of a batch in the order of their payloads: each of them once, whatever was decided twice."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kmq_spark.core.decisions import Decision
from kmq_spark.core.markers import Outcome
from kmq_spark.core.outcome import PartitionOutcome
from kmq_spark.core.policy import DecisionAction
from kmq_spark.core.state import Status
from kmq_spark.testing.builders import decisions_of
from kmq_spark.tracker.sender.due_decisions import DueDecision, DueDecisions

decisions = st.builds(
    lambda partition, offset, count, reason, deadline, silent: Decision(
        partition, offset, count, DecisionAction.DEAD_LETTER if reason else DecisionAction.REDELIVER,
        deadline, 9, deadline + 7, 3, reason, silent,
    ),
    st.integers(0, 3), st.integers(0, 12), st.integers(1, 3), st.sampled_from(["", "", "limit"]),
    st.integers(-1, 5_000), st.booleans(),
)  # fmt: skip


def outcome(marker_partition: int, rows: list[Decision]) -> PartitionOutcome:
    """Return the outcome of one markers partition."""
    return PartitionOutcome(marker_partition, Status(10, 2_000, 0, 4, None, {}), decisions_of(rows))


def due(marker_partition: int, row: Decision) -> DueDecision:
    """Return what a decision says, ready to be carried out."""
    to_be = Outcome.DEAD_LETTERED if row.reason else Outcome.REDELIVERED
    return DueDecision(
        marker_partition, row.queue_partition, row.message_offset, row.delivery_count, to_be, row.reason,
        row.deadline_at_ms, row.tick_at_ms, row.is_silent,
    )  # fmt: skip


@given(st.lists(st.lists(decisions, max_size=25), max_size=4), st.lists(st.integers(1, 5), min_size=1))
def test_each_decision_is_carried_out_once_with_the_payload_of_its_message(
    batch: list[list[Decision]], sizes: list[int]
) -> None:
    """In whatever stretches the payloads come."""
    decided = DueDecisions([outcome(partition, rows) for partition, rows in enumerate(batch)])
    found: list[DueDecision] = []
    for partition, offsets in decided.message_offsets().items():
        assert offsets == sorted(set(offsets))
        first, turn = 0, 0
        while first < len(offsets):
            count = min(sizes[turn % len(sizes)], len(offsets) - first)
            for which, each in decided.on_messages(partition, first, count):
                assert (each.queue_partition, each.message_offset) == (partition, offsets[first + which])
                found.append(each)
            first, turn = first + count, turn + 1
    assert Counter(found) == Counter(due(partition, row) for partition, rows in enumerate(batch) for row in rows)


def test_decisions_on_one_message_keep_their_order() -> None:
    """An outage may bring both in one batch; the delivery counts show which came first."""
    rows = [Decision(0, 7, count, DecisionAction.REDELIVER, 100, 9, 200, 3, "") for count in (1, 2)]
    decided = DueDecisions([outcome(0, rows)])
    assert decided.message_offsets() == {0: [7]}
    assert [(which, each.delivery_count) for which, each in decided.on_messages(0, 0, 1)] == [(0, 1), (0, 2)]


def test_batch_without_decisions_wants_nothing() -> None:
    assert DueDecisions([]).message_offsets() == DueDecisions([outcome(0, [])]).message_offsets() == {}
