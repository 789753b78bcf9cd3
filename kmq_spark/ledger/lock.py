"""
One process at a time for a ledger on a local disk.

Rule 1: local folders only: on object stores and on Databricks Delta's commits are safe against others, since a name
that is taken is refused there; a rename on a local disk replaces it.
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
    Hold a ledger for writing; the kernel lets go when the process dies.

    Raises:
        LedgerError: Another process writes or maintains it, or its folder cannot be made.
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
            f"cannot write the ledger at {location}: got {error.strerror}; correct --ledger-dir or its rights"
        ) from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LedgerError(
                f"the ledger at {location} is in use: another process writes or maintains it; stop that one first"
            ) from error
        yield
