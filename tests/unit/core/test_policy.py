"""The bounds of a queue's rules, and what the reason of a dead letter says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kmq_spark.core.backoff import Backoff, BackoffKind
from kmq_spark.core.policy import (
    MAX_BACKOFF_MS,
    MAX_MAX_DELIVERIES,
    MAX_RULES_VERSION,
    QueueRules,
    exhausted_reason,
    with_last_error,
)

OWN = QueueRules(3, 7, Backoff(BackoffKind.LINEAR, 200, 9_000, 0.25), dead_letters_expired=True)
AS_DICT = {
    "version": 3,
    "max_deliveries": 7,
    "backoff": "linear",
    "backoff_initial_ms": 200,
    "backoff_max_ms": 9_000,
    "backoff_jitter": 0.25,
    "expired": "dead-letter",
}
BOUNDS: list[tuple[str, float, float]] = [
    ("version", 1, MAX_RULES_VERSION),
    ("max_deliveries", 0, MAX_MAX_DELIVERIES),
    ("backoff_initial_ms", 0, MAX_BACKOFF_MS),
    ("backoff_max_ms", 0, MAX_BACKOFF_MS),
    ("backoff_jitter", 0.0, 1.0),
]


def rules_with(name: str, value: Any) -> QueueRules:  # noqa: ANN401  # a number of either kind
    """Return rules with one other value, by its name in the settings file."""
    if name.startswith("backoff_"):
        return replace(OWN, backoff=replace(OWN.backoff, **{name.removeprefix("backoff_"): value}))
    return replace(OWN, **{name: value})


def test_rules_have_the_names_of_the_settings_file() -> None:
    assert OWN.to_dict() == AS_DICT
    assert QueueRules.from_dict({**AS_DICT, "colour": "red"}) == OWN
    dropped = replace(OWN, dead_letters_expired=False)
    assert dropped.to_dict()["expired"] == "drop"
    assert QueueRules.from_dict(dropped.to_dict()) == dropped


@pytest.mark.parametrize(("name", "smallest", "largest"), BOUNDS)
def test_value_at_a_bound_is_allowed_and_one_past_it_is_named(name: str, smallest: float, largest: float) -> None:
    assert rules_with(name, smallest).fault() == rules_with(name, largest).fault() == ""
    for wrong in (smallest - 1, largest + 1):
        # A number that JSON holds as it is; 2**53 + 1 as well.
        fault = rules_with(name, wrong).fault()
        assert fault == f"{name} out of bounds: got {wrong!r}, allowed {_plain(smallest)} to {_plain(largest)}"
        with pytest.raises(ValueError, match="cannot read the rules of a queue: ") as caught:
            QueueRules.from_dict({**AS_DICT, name: wrong})
        assert str(caught.value) == f"cannot read the rules of a queue: {fault}"


def _plain(bound: float) -> int:
    return int(bound)


@pytest.mark.parametrize("name", AS_DICT)
def test_rules_without_one_of_their_values_are_refused(name: str) -> None:
    wanting = {key: value for key, value in AS_DICT.items() if key != name}
    with pytest.raises(ValueError, match=r"cannot read the rules of a queue: got \{") as caught:
        QueueRules.from_dict(wanting)
    assert repr(wanting) in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_deliveries": "many"},
        {"backoff": "quadratic"},
        {"backoff_jitter": float("nan")},
        {"expired": "keep"},
        {"expired": []},
    ],
)
def test_rules_with_a_value_of_another_kind_are_refused(wrong: dict[str, object]) -> None:
    """They come from a topic."""
    with pytest.raises(ValueError, match="cannot read the rules of a queue"):
        QueueRules.from_dict({**AS_DICT, **wrong})


def test_reason_at_the_limit_has_the_last_error_once() -> None:
    limited = QueueRules(1, max_deliveries=3)
    assert exhausted_reason(4, limited) == "delivery limit reached: 4 of 3"
    reason = exhausted_reason(3, limited, "OSError: disk")
    assert reason == "delivery limit reached: 3 of 3; last error: OSError: disk"
    assert with_last_error(reason, "KeyError: 1") == reason
    assert with_last_error("rejected", "") == "rejected"
