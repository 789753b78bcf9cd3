"""
Signals that stop a run, and the children that its handlers fork: in them they do what they did before the run.

Rule 1: Python forgets a signal that comes while it makes a child, so signals wait until the child has its handlers.
Rule 2: a child tells no event loop of its signals: it would be that of its parent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_before: dict[int, Any] = {}
"""Handlers of before the run, by signal; only one run at a time handles a signal."""

_forking = threading.local()


@contextlib.contextmanager
def handled(numbers: Sequence[int]) -> Iterator[dict[int, Any]]:
    """Note that a run handles signals, in the main thread, while a block runs; give the handlers of before."""
    # None: the previous handler was not set from Python and cannot be restored.
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in numbers}
    _before.update(before)
    try:
        yield before
    finally:
        for number in numbers:
            _before.pop(number, None)


def _restore_in_child() -> None:
    if _before:
        signal.set_wakeup_fd(-1)
    for number, handler in _before.items():
        signal.signal(number, handler)


def _block() -> None:
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _before)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


# In a child they are called in this order.
os.register_at_fork(after_in_child=_restore_in_child)
os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_unblock)
