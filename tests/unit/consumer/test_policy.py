"""What becomes of a message whose handler raised."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from kmq_spark import ConfigError, Message, Reject, Retry
from kmq_spark.consumer.leases import Settled, Verb
from kmq_spark.consumer.policy import FailurePolicy
from kmq_spark.testing import InMemoryQueue


def failed(reason: str, delay_ms: int = 0) -> Settled:
    return Settled(Verb.RELEASE, -1, delay_ms, reason, has_failed=True)


def rejected(reason: str) -> Settled:
    return Settled(Verb.REJECT, -1, reason=reason)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "settled", "is_expected"),
    [
        (KeyError("b"), failed("KeyError: 'b'"), False),
        ("no stock", failed("no stock"), True),
        (Retry("no stock", delay=5), failed("no stock", 5_000), True),
        (Retry(), failed("Retry"), True),
        (caused(Retry(delay=timedelta(minutes=1)), KeyError("b")), failed("KeyError: 'b'", 60_000), True),
        (Reject("no such order"), rejected("no such order"), True),
        (Reject(), rejected("Reject"), True),
        (caused(Reject(), KeyError("b")), rejected("KeyError: 'b'"), True),
        (ConnectionError("away"), failed("ConnectionError: away", 7_000), True),
        (ConnectionResetError("reset"), failed("ConnectionResetError: reset", 1_000), True),
        (UnicodeError("x"), rejected("UnicodeError: x"), True),
    ],
)
def test_error_itself_decides_then_the_nearest_class(
    error: Exception | str, settled: Settled, *, is_expected: bool
) -> None:
    policy = FailurePolicy({ConnectionError: 7, ConnectionResetError: 1, ValueError: Reject})
    assert (policy.settled(error), policy.is_expected(error)) == (settled, is_expected)


@pytest.mark.parametrize(
    ("retry", "said"),
    [
        (
            {"TimeoutError": 5},
            "retry names what no handler raises: got 'TimeoutError'; expected a class",
        ),
        ({KeyboardInterrupt: 5}, "got <class 'KeyboardInterrupt'>"),
        ({TimeoutError: "5s"}, "retry of TimeoutError is out of bounds: got '5s', 0 to 43200 seconds"),
        ({TimeoutError: 50_000}, "got 50000"),
        ({TimeoutError: Retry}, "retry of TimeoutError is out of bounds"),
        ([TimeoutError], "retry is not a mapping"),
    ],
)
def test_policy_that_cannot_be_meant_is_refused(retry: dict[Any, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        FailurePolicy(retry)


@pytest.mark.parametrize("delay", [-1, 43_201, float("nan"), float("inf"), "5s", None])
def test_retry_beyond_the_bounds_is_an_error_where_it_is_raised(delay: Any) -> None:  # noqa: ANN401  # wrong on purpose
    """Its message fails with that error, as with any other."""
    queue = InMemoryQueue(rules={"max_deliveries": 1})
    queue.producer().send("a")

    def handle(_message: Message) -> None:
        raise Retry("busy", delay=delay)

    assert queue.work(handle).failed == 1
    queue.advance(3_600)
    (letter,) = queue.dead_letters()
    assert f"ConfigError: delay of Retry is out of bounds: got {delay!r}, 0 to 43200 seconds" in letter.reason
