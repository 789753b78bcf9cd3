"""The clock of leases and holds."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

now_s: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)
"""Return seconds of a monotonic clock that also runs while the host sleeps, if the system has one."""
