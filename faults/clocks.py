"""
Processes whose wall clock is wrong: ahead, behind, drifting, stepping; built from `clock/false_clock.c` at first use.

Rule 1: what is false is the reading of the wall clock alone; waits take as long as they say.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parent / "clock" / "false_clock.c"


class FalseClock(NamedTuple):
    """
    A wrong wall clock.

    Attributes:
        offset_ms: Ahead by so much.
        rate_ppm: Too fast by so many millionths.
        step_after_ms: After so long from the start of the process it jumps,
        step_ms: by so much.
    """

    offset_ms: int = 0
    rate_ppm: int = 0
    step_after_ms: int = 0
    step_ms: int = 0

    def environment(self) -> dict[str, str]:
        """Return the variables under which a process has this clock."""
        numbers = (self.offset_ms, self.rate_ppm, self.step_after_ms, self.step_ms)
        return {"LD_PRELOAD": str(_library()), "KMQ_FALSE_CLOCK": " ".join(map(str, numbers))}


def is_available() -> bool:
    """Return whether a C compiler is here, and the machine a Linux."""
    return shutil.which("cc") is not None and os.uname().sysname == "Linux"


@cache
def _library() -> Path:
    target = Path(tempfile.mkdtemp(prefix="kmq-false-clock-")) / "false_clock.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(target), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return target
