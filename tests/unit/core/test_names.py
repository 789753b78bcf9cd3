"""What a queue, a group and a producer may be called, and what the error says."""

from __future__ import annotations

import pytest

from kmq_spark.core.names import LONGEST_QUEUE, LONGEST_SUBSCRIPTION, is_name, name_error


@pytest.mark.parametrize("name", ["a", "orders.eu_1-x", "Z9", "x" * LONGEST_QUEUE])
def test_characters_of_topic_names_are_allowed(name: str) -> None:
    assert is_name(name)


@pytest.mark.parametrize("name", ["", "x" * (LONGEST_QUEUE + 1), "a b", "a/b", "ä", "a\n", b"a", 7, None])
def test_anything_else_is_no_name(name: object) -> None:
    assert not is_name(name)


def test_group_has_a_limit_of_its_own() -> None:
    assert is_name("x" * LONGEST_SUBSCRIPTION, LONGEST_SUBSCRIPTION)
    assert not is_name("x" * (LONGEST_SUBSCRIPTION + 1), LONGEST_SUBSCRIPTION)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a b", "'a b'"),
        (7, "7"),
        # 58 characters and two quotes: the longest one that is shown as a whole.
        ("/" * 58, "'" + "/" * 58 + "'"),
        ("/" * 59, "'" + "/" * 59 + "… (59 characters)"),
        (b"/" * 58, "b'" + "/" * 58 + "… (61 characters)"),
    ],
)
def test_error_shows_the_name_within_a_bound_and_says_what_is_allowed(name: object, shown: str) -> None:
    assert str(name_error("logical queue", name, 100)) == (
        f"logical queue name is not allowed: got {shown}, 1 to 100 of A-Z a-z 0-9 . _ -; choose another name"
    )
    assert "1 to 200 of" in str(name_error("queue", name))
