"""
Allow one writing process at a time for a ledger on a local disk.

Rule 1: Only local folders are locked. On object stores and on Databricks, concurrent Delta commits are safe, because a
commit whose file name exists fails there. On a local disk, the rename of a commit replaces the existing file.
"""

from __future__ import annotations

import fcntl
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kmq_spark.errors import LedgerError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kmq_spark.ledger.schema import Location


@contextmanager
def exclusive(location: Location) -> Iterator[None]:
    """
    Lock a ledger for writing, for the duration of a `with` block. The kernel releases the lock if the process dies.

    Raises:
        LedgerError: Another process writes or maintains the ledger, or its folder cannot be created.
    """
    folder = location.local_folder
    if folder is None:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / "_lock").open("w")
    except OSError as error:
        raise LedgerError(
            f"cannot write the ledger at {location}: got {error.strerror}; correct --ledger-dir or its access rights"
        ) from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LedgerError(
                f"the ledger at {location} is in use: another process writes or maintains it; stop that process first"
            ) from error
        yield
