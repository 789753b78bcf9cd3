"""
Keep a forked child process from using the Kafka clients of its parent.

Rule 1: The threads of a client exist only in the parent. The child must neither use nor destroy the client: destroying
it waits for these threads, or ends the child with an assertion of librdkafka.

Source: librdkafka INTRODUCTION.md, "Threads and callbacks". confluent-kafka destroys a client with its last reference.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable


class ClientOwner(Protocol):
    """An object that owns Kafka clients."""

    def after_fork(self) -> Iterable[object]:
        """Stop, in a child process, the work that the parent does. Return the clients."""


_owners: weakref.WeakSet[ClientOwner] = weakref.WeakSet()


def watch(owner: ClientOwner) -> None:
    """Protect the clients of *owner* in every process that is forked from now on."""
    _owners.add(owner)


def _leave_to_the_parent() -> None:
    for owner in list(_owners):
        for client in owner.after_fork():
            # Add a reference that is never released, so that even the end of the interpreter does not destroy the
            # client.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


os.register_at_fork(after_in_child=_leave_to_the_parent)
