"""
Keep exceptions of callbacks out of librdkafka.

Rule 1: a callback that raises inside `consume` makes librdkafka drop a record that it has just taken from its queue,
and leaving the group does not end then. Ctrl+C may come in any callback.
Rule 2: what a callback raises is raised by the thread that served it, once the client's call has returned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Callbacks:
    """The callbacks of one client, and the last exception that one of them has raised."""

    def __init__(self) -> None:
        """Start without an exception."""
        self._raised: BaseException | None = None

    def caught(self, callback: Callable[..., None]) -> Callable[..., None]:
        """Return a callback that raises nothing: `raise_caught` does."""

        def call(*arguments: object) -> None:
            try:
                callback(*arguments)
            except BaseException as error:  # noqa: BLE001  # raised again
                self._raised = error

        return call

    def raise_caught(self) -> None:
        """Raise what a callback has raised since the last call."""
        error, self._raised = self._raised, None
        if error is not None:
            raise error
