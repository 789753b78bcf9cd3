"""The offline checker of the fault campaign: quiet on a right story, and each violation seeded into it is found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit import fault_seeds
from tests.unit.fault_story import Story

if TYPE_CHECKING:
    from collections.abc import Callable

LEAST_SEEDS = 90


@pytest.mark.parametrize("seed", fault_seeds.seeds(), ids=lambda seed: seed.__name__)
def test_seeded_violation_is_found(seed: Callable[[Story], None]) -> None:
    """The invariant that the seed's docstring names, among what is found."""
    assert fault_seeds.expected(seed) in fault_seeds.found_by(seed)


def test_selftest_prints_each_seed_and_finds_it(capsys: pytest.CaptureFixture[str]) -> None:
    """`make checker-selftest`: a row for each seed, and none missed."""
    assert fault_seeds.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(fault_seeds.seeds()) >= LEAST_SEEDS
    assert lines[-1] == f"{len(fault_seeds.seeds())} seeds, 0 missed; the right story has 0 violations"


def test_every_invariant_has_a_seed() -> None:
    """All but what scenarios judge by themselves (I14, I15), for which there is no topic to seed it into."""
    found = {fault_seeds.expected(seed) for seed in fault_seeds.seeds()}
    assert found == {f"I{number}" for number in (*range(1, 14), 16, 17)} | {"harness"}


def test_selftest_says_what_is_missed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed that breaks nothing is not found, and the exit code is 1."""

    def break_nothing(_story: Story) -> None:
        """I1: nothing is broken here."""

    monkeypatch.setattr(fault_seeds, "seeds", lambda: [break_nothing])
    assert fault_seeds.main() == 1
    assert "| break_nothing | I1 | nothing |" in capsys.readouterr().out
