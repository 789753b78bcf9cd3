"""
What `make mutation` found: the score of each module, and each mutant that no test noticed.

Rule 1: a mutant counts as found if a test failed, or did not end in its time (the last column: a busy machine has more
of these, which say nothing). One that no test calls is not found.
Rule 2: `kmq_spark/core` decides what is redelivered: below 90 % of its mutants found the run fails.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

FOLDER = Path("mutants")
CORE = "kmq_spark/core/"
LEAST_CORE = 0.9
_STOPPED = {24, -24, 36, 152, 255}
"""Exit codes as mutmut keeps them: stopped by its limit of time."""
_FOUND = {1, 3, *_STOPPED}
"""Those, and those of a test that failed."""


def main() -> int:
    """Print the table and the mutants that were not found; return 1 if too many of the core's were not."""
    total: Counter[str] = Counter()
    found: Counter[str] = Counter()
    stopped: Counter[str] = Counter()
    left: list[str] = []
    for file in sorted(FOLDER.rglob("*.py.meta")):
        module = str(file.relative_to(FOLDER)).removesuffix(".meta")
        for mutant, exit_code in json.loads(file.read_text("utf-8"))["exit_code_by_key"].items():
            if exit_code is None:
                continue
            for name in (module, "all of core" if module.startswith(CORE) else "all of wire"):
                total[name] += 1
                found[name] += exit_code in _FOUND
                stopped[name] += exit_code in _STOPPED
            if exit_code not in _FOUND:
                left.append(mutant)
    print("\n".join(["not found (`.venv/bin/mutmut show NAME`):", *left, ""]))  # noqa: T201  # its only output
    for name in sorted(total):
        score = f"{found[name]:5} of {total[name]:5}  {found[name] / total[name]:6.1%}"
        print(f"{name:45} {score} {stopped[name]:5} by time")  # noqa: T201  # as above
    core = "all of core"
    return int(found[core] < LEAST_CORE * total[core])


if __name__ == "__main__":
    sys.exit(main())
