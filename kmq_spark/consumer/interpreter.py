"""
Settings of the Python interpreter that a run changes, and sets back at its end.

Rule 1: they hold for the whole process while a run lasts.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SWITCH_INTERVAL_S = 0.0005
"""How long a handler thread keeps the interpreter while another wants it, during a run. By default 5 ms: the receiving
thread needs it back after each of its calls to the broker, and would stand still for most of the time."""

COLLECT_AFTER = 50_000
"""New objects after which cycles are looked for, during a run: the messages of many batches. By default 700."""


@contextlib.contextmanager
def short_switches() -> Iterator[None]:
    """Let threads change places more often, and as before afterwards."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_INTERVAL_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextlib.contextmanager
def spared_collector() -> Iterator[None]:
    """
    Let the collector of cycles come seldom, and spare it what lives as long as the process; as before afterwards.

    A message is no part of a cycle, but it is looked at by every collection that comes while it lives: by default one
    each 700 new objects, and now and then one of all that was ever imported. That was a third of a fast handler's time.
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
