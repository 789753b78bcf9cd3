"""
Keep exceptions of callbacks out of librdkafka.

Rule 1: no callback raises inside a call of librdkafka. If a callback raises inside `consume`, librdkafka drops a record
that it has just taken from its internal queue, and leaving the group never completes after that. Ctrl+C can raise
KeyboardInterrupt in any callback.
Rule 2: the thread that served a callback raises its exception after the client's call has returned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Callbacks:
    """Wrapper for the callbacks of one client; keeps the last exception that one of them raised."""

    def __init__(self) -> None:
        """Start with no exception kept."""
        self._raised: BaseException | None = None
        self._is_ended = False

    def wrap(self, callback: Callable[..., None]) -> Callable[..., None]:
        """Return a callback that never raises; `raise_caught` raises its exception later."""

        def call(*arguments: object) -> None:
            if self._is_ended:
                return
            try:
                callback(*arguments)
            except BaseException as error:  # noqa: BLE001  # raised again by `raise_caught`
                self._raised = error

        return call

    def end(self) -> None:
        """Ignore all further calls: another client has taken the place of this one."""
        self._is_ended = True

    def raise_caught(self) -> None:
        """Raise the exception that a callback has raised since the last call, if any."""
        error, self._raised = self._raised, None
        if error is not None:
            raise error
