"""
Keep a forked child away from the Kafka clients of its parent.

Rule 1: a client's threads live in the parent alone, so the child must neither use nor destroy it: destroying waits for
these threads, or ends the child by an assertion of librdkafka.

Source: librdkafka INTRODUCTION.md, "Threads and callbacks"; confluent-kafka destroys a client with its last reference.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable


class ClientOwner(Protocol):
    """Something that owns Kafka clients."""

    def after_fork(self) -> Iterable[object]:
        """Give up in a child process whatever the parent does, and return the clients."""


_owners: weakref.WeakSet[ClientOwner] = weakref.WeakSet()


def watch(owner: ClientOwner) -> None:
    """Have the clients of *owner* left alone in every process forked from now on."""
    _owners.add(owner)


def _leave_to_the_parent() -> None:
    for owner in list(_owners):
        for client in owner.after_fork():
            # One reference that is never given back: not even the end of the interpreter destroys the client then.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


os.register_at_fork(after_in_child=_leave_to_the_parent)
