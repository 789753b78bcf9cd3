"""
Settings of the Python interpreter that a run changes, and restores at its end.

Rule 1: they affect the whole process during the run.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SWITCH_INTERVAL_S = 0.0005
"""
Python's switch interval during a run: how long a handler thread keeps the interpreter lock while another thread waits
for it. Python's default is 5 ms. The receiving thread needs the lock after each of its broker calls, and with the
default it would wait most of the time.
"""

COLLECT_AFTER = 50_000
"""Threshold of the garbage collector's first generation during a run: the messages of many batches. Default: 700."""


@contextlib.contextmanager
def short_switch_interval() -> Iterator[None]:
    """Shorten the switch interval of threads; restore it at the end."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_INTERVAL_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextlib.contextmanager
def tuned_gc() -> Iterator[None]:
    """
    Run the garbage collector less often, and exclude the objects that exist now; restore both at the end.

    A message is not part of a reference cycle, but every collection that runs during its lifetime scans it. By default
    there is a collection every 700 new objects, and sometimes one of all objects, including all imported modules. With
    a fast handler that took a third of the time.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(max(before[0], COLLECT_AFTER) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
