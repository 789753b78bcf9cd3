"""Hooks: what a program does before and after each call of a handler, and when it fails."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar, cast

from kmq_spark.consumer.batch import Batch
from kmq_spark.consumer.worker import is_coroutine_function

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from kmq_spark.consumer.message import Message

    Hook = Callable[[Message | Batch], AbstractContextManager[object]]

Handler = TypeVar("Handler", bound="Callable[[Any], Any]")


def topic_of(given: Message | Batch) -> str:
    """Return the queue topic of what a handler is given. For hooks of ours."""
    records = given._records if isinstance(given, Batch) else [given._record]  # noqa: SLF001  # private to the package
    return records[0].topic() or "" if records else ""


def around(handler: Handler, hook: Hook) -> Handler:
    """
    Return a handler for `run` that is called inside a context manager.

        @contextlib.contextmanager
        def logged(message):
            logger.info("%s begins", message.id)  # before
            try:
                yield
            except Exception as error:
                logger.info("%s failed: %r", message.id, error)
                raise  # without this line the message counts as handled
            logger.info("%s ends", message.id)  # after

        consumer.run(around(handle, logged))

    Args:
        handler: Function or coroutine function of a message, or of a batch.
        hook: Called with what the handler is given.
    """
    if is_coroutine_function(handler):

        @functools.wraps(handler)
        async def handle_in_a_loop(given: Any) -> Any:  # noqa: ANN401  # as the handler
            with hook(given):
                return await handler(given)

        return cast("Handler", handle_in_a_loop)

    @functools.wraps(handler)
    def handle(given: Any) -> Any:  # noqa: ANN401  # as the handler
        with hook(given):
            return handler(given)

    return cast("Handler", handle)
