"""
How slow the machine is, so that a bound in seconds asks the same of every machine.

The same campaign on machines that differed by a factor of 1.7 missed a bound of 8 s by 0.1 s on the slower ones, each
time another. So a campaign times a fixed piece of work before every row, and its patience is what comes of it.

Rule 1: the work has nothing of the product in it: a slower product finds the same bounds.
Rule 2: it runs once for each of two cores at the same time, as a row keeps two cores busy.
Rule 3: the median counts: one slow turn is noise.
Rule 4: bounds are never shorter than written, and at most `MOST` times as long.
Rule 5: the speed of a shared machine changes within a minute. Where a bound is about some seconds of a row, a
`SpeedWatch` measures beside the row. It takes processor time, not wall-clock time: the load of the row makes the work
wait, but it takes the same processor time (measured by hand: 1.3 to 1.9 times the reference, without load and with four
busy processes).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
import zlib
from threading import Lock, Thread

AT_ONCE = 2
TURNS = 7
MOST = 3.0
"""A machine that is slower than this has not enough left for the product: its bounds say what is wrong."""

REFERENCE_S = 0.15
"""What a turn takes on the machine on which the bounds were set: two cores on which `make unit` takes 80 s."""

_TURN_TIMEOUT_S = 60.0

_ROUNDS = 200
"""Of the work in a turn."""

_WATCH_ROUNDS = 20
_WATCH_EVERY_S = 0.5


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
    return _factor(statistics.median(turns_s))


def _factor(turn_s: float) -> float:
    return min(max(round(turn_s / REFERENCE_S, 2), 1.0), MOST)


class SpeedWatch:
    """A process that times a little of the work twice a second, until it is closed; see rule 5."""

    def __init__(self) -> None:
        """Start the process; it ends with this one."""
        self._samples: list[tuple[int, float]] = []
        self._lock = Lock()
        command = [sys.executable, "-I", __file__, "watch"]
        self._child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._reader = Thread(target=self._read, name="speed-watch", daemon=True)
        self._reader.start()

    def close(self) -> None:
        """End the process, and read the last of what it has measured."""
        self._child.kill()
        self._child.wait()
        self._reader.join()
        assert self._child.stdout is not None
        self._child.stdout.close()

    def note(self, at_ms: int, turn_s: float) -> None:
        """Add a measurement: when, epoch milliseconds, and what a whole turn would take, seconds."""
        with self._lock:
            self._samples.append((at_ms, turn_s))

    def turns_s(self, from_ms: int, to_ms: int) -> list[float]:
        """Return what was measured from one time to another."""
        with self._lock:
            return [turn_s for at_ms, turn_s in self._samples if from_ms <= at_ms <= to_ms]

    def slowness(self, from_ms: int, to_ms: int) -> float:
        """Return how many times slower than the reference the machine was on average; 1 where nothing was measured."""
        turns_s = self.turns_s(from_ms, to_ms)
        return _factor(statistics.fmean(turns_s)) if turns_s else 1.0

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            at_ms, turn_s = line.split()
            self.note(int(at_ms), float(turn_s))


def _turn_s() -> float:
    """Return the seconds of the slowest of the processes of one turn; their starts do not count."""
    command = [sys.executable, "-I", __file__]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(AT_ONCE)]
    try:
        return max(float(child.communicate(timeout=_TURN_TIMEOUT_S)[0]) for child in children)
    finally:
        for child in children:
            child.kill()


def _work(rounds: int = _ROUNDS) -> None:
    """Do what clients and trackers do with a processor: small objects, text and bytes."""
    for number in range(rounds):
        markers = [{"partition": number, "offset": offset, "type": "START"} for offset in range(300)]
        text = json.dumps(markers)
        by_offset = {marker["offset"]: marker for marker in json.loads(zlib.decompress(zlib.compress(text.encode())))}
        sum(offset * offset for offset in sorted(by_offset, reverse=True))


def _watch() -> None:
    """Write a line for each measurement, until the reader is gone."""
    while True:
        began_s = time.process_time()
        _work(_WATCH_ROUNDS)
        turn_s = (time.process_time() - began_s) * _ROUNDS / _WATCH_ROUNDS
        sys.stdout.write(f"{time.time_ns() // 1_000_000} {turn_s}\n")
        sys.stdout.flush()
        time.sleep(_WATCH_EVERY_S)


if __name__ == "__main__":
    if sys.argv[1:] == ["watch"]:
        _watch()
    began_s = time.perf_counter()
    _work()
    sys.stdout.write(f"{time.perf_counter() - began_s}")
