"""
Where kmq-spark keeps what it can make again: jars, archives of classes.

Rule 1: what is in the cache is complete: it is written under another name first, and renamed while the lock is held.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def cache_folder() -> Path:
    """
    Return `kmq-spark` in the user's cache directory (`XDG_CACHE_HOME`, by default `~/.cache`); it may not exist.

    Raises:
        RuntimeError: The user has no home directory.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches, "kmq-spark").absolute()


@contextmanager
def exclusive(lock: Path) -> Iterator[None]:
    """Hold an exclusive file lock. Other processes wait; the kernel releases the lock when the holder ends."""
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
