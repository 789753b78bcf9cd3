"""The offline checker of the fault campaign finds each violation that is seeded into a right story."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.faults import seeds

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.faults.story import Story


@pytest.mark.parametrize("seed", seeds.seeds(), ids=lambda seed: seed.__name__)
def test_seeded_violation_is_found(seed: Callable[[Story], None]) -> None:
    """The invariant that the seed's docstring names, among what is found."""
    assert seeds.expected(seed) in seeds.found_by(seed)


def test_every_invariant_has_a_seed() -> None:
    """All but what scenarios judge by themselves (I14, I15), for which there is no topic to seed it into."""
    found = {seeds.expected(seed) for seed in seeds.seeds()}
    assert found == {f"I{number}" for number in (*range(1, 14), 16, 17)} | {"harness"}
