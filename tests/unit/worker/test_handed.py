"""What goes over the pipe of a handler process comes out on the other side as it was."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Message as KafkaMessage

from kmq_spark import BatchFailed, Message, MessageId, Reject, Retry
from kmq_spark.consumer.batch import Batch, Part
from kmq_spark.consumer.leases import Lease, Outbox
from kmq_spark.consumer.policy import FailurePolicy
from kmq_spark.errors import UsageError
from kmq_spark.worker.child import outcome_of
from kmq_spark.worker.handed import Handed, Outcome

HEADERS: list[tuple[str, str | bytes | None]] = [("app", b"x"), ("app", None), ("kmq-origin", b"0:3")]


def batch_of(*leases: tuple[int, int, list[int]]) -> Batch:
    """Return a batch as a consumer makes it, of leases: partition, delivery count, offsets."""
    records: list[KafkaMessage] = []
    found: list[int] = []
    parts: list[Part] = []
    for partition, delivery_count, offsets in leases:
        lease = Lease(
            Outbox(partition), delivery_count, set(), 0.0, float("inf"), float("inf"), offsets=offsets, is_whole=True,
            sizes=[1] * len(offsets), started_at_ms=2_000,
        )  # fmt: skip
        parts.append(Part(lease, len(found), len(found) + len(offsets)))
        found += offsets
        records += [
            KafkaMessage(
                topic="q",
                partition=partition,
                offset=offset,
                key=None,
                value=b"v%d" % offset,
                headers=HEADERS,
                timestamp=(1, 1_000 + offset),
            )
            for offset in offsets
        ]
    return Batch(records, found, parts)


def through(batch: Batch, handler: Callable[[Any], object], *, is_batch: bool = False) -> Outcome:
    """Hand a batch over, and return the outcome that comes back."""
    handed = pickle.loads(pickle.dumps(Handed.of(batch)))  # noqa: S301  # as the pipe does
    back: Outcome = pickle.loads(pickle.dumps(outcome_of(handler, handed, is_batch=is_batch)))  # noqa: S301  # as above
    return back


def test_handler_sees_the_message_that_the_consumer_received() -> None:
    original = batch_of((4, 3, [7]))[0]
    seen: list[object] = []

    def look(message: Message) -> None:
        names = ("value", "key", "headers", "id", "origin", "delivery_count", "appended_at_ms", "first_sent_at_ms")
        seen.extend(getattr(message, name) == getattr(original, name) for name in names)
        seen.append((message.id, message.origin, message.is_held, message.expires_at_ms))

    assert through(batch_of((4, 3, [7])), look) == Outcome({})
    assert seen == [*[True] * 8, (MessageId(4, 7), MessageId(0, 3), True, None)]


def verbs_of(batch: Batch) -> list[str]:
    """Return by which verb each message is settled."""
    return [message.settled_by for message in batch]


def test_what_a_handler_settles_is_settled_at_the_consumer() -> None:
    """Two leases of one partition, and offsets that occur in both partitions."""
    batch = batch_of((0, 1, [5, 6, 9]), (1, 1, [5]), (0, 2, [7, 8]))

    def handle(given: Batch) -> None:
        given[0].ack()
        given[1].reject("no")
        given.release([3], delay=2)
        given.fail({4: ValueError("bad")})

    outcome = through(batch, handle, is_batch=True)
    outcome.settle(batch)
    assert verbs_of(batch) == ["ack", "reject", "", "release", "release", ""]
    first, second, third = (part.lease.outbox for part in batch._parts)
    assert (first.acked, [(each.message_offset, each.reason) for each in first.others]) == ([5], [(6, "no")])
    assert [(each.message_offset, each.delay_ms, each.has_failed) for each in second.others] == [(5, 2_000, False)]
    assert [(each.message_offset, each.reason, each.has_failed) for each in third.others] == [
        (7, "ValueError: bad", True)
    ]


def test_batch_that_is_acknowledged_as_a_whole_is_so_at_the_consumer() -> None:
    batch = batch_of((0, 1, [5, 6, 9]), (1, 1, [5]))
    through(batch, lambda given: given.ack(), is_batch=True).settle(batch)
    assert verbs_of(batch) == ["ack"] * 4


class Unpicklable(Exception):  # noqa: N818  # of a handler
    """An exception that refuses to be pickled, and whose arguments are not those of its class."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")
        self.callback = lambda: None


def caused() -> Reject:
    """Return an exception with a cause."""
    error = Reject()
    error.__cause__ = KeyError("customer")
    return error


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no such order"),
        ValueError(),
        Unpicklable("database", "away"),
        Retry("busy", delay=5),
        Retry(),
        caused(),
    ],
    ids=repr,
)
def test_exception_of_a_handler_has_the_same_effect_as_in_a_thread(error: Exception) -> None:
    def fail(_message: object) -> None:
        raise error

    carried = through(batch_of((0, 1, [5])), fail).error
    assert carried is not None
    restored = carried.restored()
    assert FailurePolicy().settled(restored) == FailurePolicy().settled(error)
    assert type(restored).__name__ == type(error).__name__


def test_traceback_of_a_handler_is_carried() -> None:
    def fail(_message: object) -> None:
        raise Unpicklable("database", "away")

    carried = through(batch_of((0, 1, [5])), fail).error
    assert carried is not None
    error = carried.restored()
    assert isinstance(error, Exception)
    assert 'raise Unpicklable("database", "away")' in str(error.__cause__)


def test_failures_of_a_batch_are_carried_returned_or_raised() -> None:
    wanted: dict[int, str | Exception] = {0: "text", -1: Retry("busy", delay=3), 1: ValueError("bad")}

    def fail(_batch: object) -> None:
        raise BatchFailed(wanted)

    for handler in (fail, lambda _batch: wanted):
        found = through(batch_of((0, 1, [5, 6, 7])), handler, is_batch=True).failures
        assert found is not None
        policy = FailurePolicy()
        settled = {index: policy.settled(each.restored()) for index, each in found.items()}
        assert settled == {index % 3: policy.settled(each) for index, each in wanted.items()}


def test_what_nobody_can_use_is_refused() -> None:
    """Acknowledged without any work, otherwise."""
    refused = through(batch_of((0, 1, [5])), lambda message: (message for _ in "a")).refused
    assert "handler returned work that has not run: got generator" in refused
    assert "wrong type: got list" in through(batch_of((0, 1, [5])), lambda _batch: [1], is_batch=True).refused
    outside = through(batch_of((0, 1, [5])), lambda _batch: {1: "no"}, is_batch=True)
    assert outside.error is not None
    assert outside.error.text == "IndexError: range object index out of range"


def test_extension_of_a_lease_is_refused_and_the_message_can_be_settled_after_it() -> None:
    def handle(message: Message) -> None:
        with pytest.raises(UsageError, match="cannot extend a lease"):
            message.extend(60)
        message.reject("too long")

    batch = batch_of((0, 1, [5]))
    through(batch, handle).settle(batch)
    assert verbs_of(batch) == ["reject"]
