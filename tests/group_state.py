"""A group state of Spark, for tests of state functions."""

from __future__ import annotations

from typing import Any


class FakeGroupState:
    """
    What Spark's `GroupState` does, as far as the state functions use it.

    `tests/spark/tracker/test_query.py` and `tests/spark/ledger` run the functions with Spark's own.
    """

    def __init__(self) -> None:
        self.values: tuple[Any, ...] | None = None

    @property
    def exists(self) -> bool:
        """Whether there is state."""
        return self.values is not None

    @property
    def get(self) -> tuple[Any, ...]:
        """The state."""
        assert self.values is not None
        return self.values

    def update(self, newValue: tuple[Any, ...]) -> None:  # noqa: N803  # Spark's name
        """Replace the state."""
        self.values = newValue
