"""
How slow the machine is, so that a bound in seconds asks the same of every machine.

The same campaign on machines that differed by a factor of 1.7 missed a bound of 8 s by 0.1 s on the slower ones, each
time another. So a campaign times a fixed piece of work before every row, and its patience is what comes of it.

Rule 1: the work has nothing of the product in it: a slower product finds the same bounds.
Rule 2: it runs once for each of two cores at the same time, as a row keeps two cores busy.
Rule 3: the median counts: one slow turn is noise.
Rule 4: bounds are never shorter than written, and at most `MOST` times as long.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
import zlib

AT_ONCE = 2
TURNS = 7
MOST = 3.0
"""A machine that is slower than this has not enough left for the product: its bounds say what is wrong."""

REFERENCE_S = 0.15
"""What a turn takes on the machine on which the bounds were set: two cores on which `make unit` takes 80 s."""

_TURN_TIMEOUT_S = 60.0


def slowness() -> float:
    """
    Time the work, for about two seconds.

    Returns:
        How many times slower than that of `REFERENCE_S` this machine is now; 1 where it is quicker.

    Raises:
        subprocess.SubprocessError: The work did not end, or failed.
    """
    return judged([_turn_s() for _ in range(TURNS)])


def judged(turns_s: list[float]) -> float:
    """Return what some turns, seconds each, say about the machine: rules 3 and 4."""
    return min(max(round(statistics.median(turns_s) / REFERENCE_S, 2), 1.0), MOST)


def _turn_s() -> float:
    """Return the seconds of the slowest of the processes of one turn; their starts do not count."""
    command = [sys.executable, "-I", __file__]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(AT_ONCE)]
    try:
        return max(float(child.communicate(timeout=_TURN_TIMEOUT_S)[0]) for child in children)
    finally:
        for child in children:
            child.kill()


def _work() -> None:
    """Do what clients and trackers do with a processor: small objects, text and bytes."""
    for number in range(200):
        markers = [{"partition": number, "offset": offset, "type": "START"} for offset in range(300)]
        text = json.dumps(markers)
        by_offset = {marker["offset"]: marker for marker in json.loads(zlib.decompress(zlib.compress(text.encode())))}
        sum(offset * offset for offset in sorted(by_offset, reverse=True))


if __name__ == "__main__":
    began_s = time.perf_counter()
    _work()
    sys.stdout.write(f"{time.perf_counter() - began_s}")
