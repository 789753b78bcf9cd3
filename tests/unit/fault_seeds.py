"""
Violations, each seeded into a right story; `python -m tests.unit.fault_seeds` prints which invariant finds each.

The seeds are in `fault_seeds_1_to_6.py` and `fault_seeds_7_to_12.py`, by the invariant that must find them, and in
`fault_seeds_of_features.py`.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from tests.unit import fault_seeds_1_to_6, fault_seeds_7_to_12, fault_seeds_of_features
from tests.unit.fault_story import Story

if TYPE_CHECKING:
    from collections.abc import Callable

_NAMED = re.compile(r"(I\d+|harness): ")


def seeds() -> list[Callable[[Story], None]]:
    """Return all seeds in the order of their files."""
    return [
        value
        for module in (fault_seeds_1_to_6, fault_seeds_7_to_12, fault_seeds_of_features)
        for value in vars(module).values()
        if _NAMED.match(value.__doc__ or "") and value.__module__ == module.__name__
    ]


def expected(seed: Callable[[Story], None]) -> str:
    """Return the invariant that must find a seed."""
    return (seed.__doc__ or "").partition(":")[0]


def found_by(seed: Callable[[Story], None]) -> list[str]:
    """Return the invariants that find a seed."""
    story = Story()
    seed(story)
    return sorted({violation.invariant for violation in story.verdict().violations})


def main() -> int:
    """Print the table; return the exit code."""
    missed = 0
    sys.stdout.write("| seed | must be found by | found by |\n|---|---|---|\n")
    for seed in seeds():
        found = found_by(seed)
        is_found = expected(seed) in found
        missed += not is_found
        sys.stdout.write(f"| {seed.__name__} | {expected(seed)} | {', '.join(found) or 'nothing'} |\n")
    clean = Story().verdict().violations
    sys.stdout.write(f"\n{len(seeds())} seeds, {missed} missed; the right story has {len(clean)} violations\n")
    return 1 if missed or clean else 0


if __name__ == "__main__":
    sys.exit(main())
