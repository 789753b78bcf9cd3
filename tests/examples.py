"""How many examples a property test runs, as a share of those of the profile in force (`tests/conftest.py`)."""

from __future__ import annotations

from hypothesis import settings


def examples(share: float) -> int:
    """Return this share of the profile's number of examples, 100 where nothing else is said, at least 1."""
    return max(1, round(settings().max_examples * share))
