"""
The key `q`, which ends a live view as in `top` and `less`.

Rule 1: the terminal settings are restored when the view ends. Ctrl+C still sends a signal.
Rule 2: nothing is read if standard input is not a terminal of this process (a pipe, a background job, no POSIX).
"""

from __future__ import annotations

import os
import select
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def quit_key() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits for the given seconds and returns whether `q` was typed."""
    try:
        import termios
        import tty
    except ImportError:
        yield _wait_only
        return
    if not _is_ours():
        yield _wait_only
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        # Keys arrive at once and without echo; Ctrl+C still sends a signal.
        tty.setcbreak(descriptor)
        yield _typed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _is_ours() -> bool:
    """Return whether this process may read standard input as a terminal; a background job would be stopped."""
    try:
        return sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


def _wait_only(wait_s: float) -> bool:
    time.sleep(wait_s)
    return False


def _typed(wait_s: float) -> bool:
    until = time.monotonic() + wait_s
    while (left_s := until - time.monotonic()) > 0:
        readable, _, _ = select.select([sys.stdin.fileno()], [], [], left_s)
        if readable and (not (keys := os.read(sys.stdin.fileno(), 64)) or b"q" in keys.lower()):
            return True
    return False
