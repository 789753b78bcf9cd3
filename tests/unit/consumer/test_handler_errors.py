"""The text of a handler's exception."""

from __future__ import annotations

import pytest

from kmq_spark.consumer.handler_errors import error_text


class UnreadableError(Exception):
    """Raises when it is asked for its message."""

    def __str__(self) -> str:
        """Fail."""
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no such order"), "ValueError: no such order"),
        (TimeoutError(), "TimeoutError"),
        (ValueError("a\n\x1b[31mb\u202e"), "ValueError: a  [31mb "),
        (ValueError("x" * 10_000), "ValueError: " + "x" * 288),
        (UnreadableError(), "UnreadableError: (its message cannot be read)"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_text_is_one_printable_line_within_its_bound(error: BaseException, text: str) -> None:
    """Whatever a handler raises."""
    assert error_text(error) == text
