"""Handlers whose call returns before the work is done: coroutines are awaited, generators are refused."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest

from kmq_spark.consumer.worker import check_handler, is_coroutine_function
from kmq_spark.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from kmq_spark.consumer.message import Message


def work(_message: Message) -> None:
    """Handle a message."""


async def handle(_message: Message, _others: int = 0) -> None:
    """Handle a message on an event loop."""


def generate(_message: Message) -> Iterator[int]:
    """Do nothing until it is iterated."""
    yield 1


class Handler:
    """An object whose call is asynchronous."""

    async def __call__(self, message: Message) -> None:
        """Handle a message on an event loop."""
        await handle(message)


async def generate_in_a_loop(_message: Message) -> AsyncIterator[int]:
    """Do nothing until it is iterated."""
    yield 1


@pytest.mark.parametrize("handler", [handle, functools.partial(handle, _others=1), Handler()])
def test_coroutine_function_is_found_whatever_it_hides_in(handler: Any) -> None:  # noqa: ANN401  # of any type
    check_handler(handler)
    assert is_coroutine_function(handler)
    assert not is_coroutine_function(work)


@pytest.mark.parametrize("handler", [generate, functools.partial(generate), generate_in_a_loop, "handle"])
def test_handler_whose_call_only_begins_work_is_refused(handler: Any) -> None:  # noqa: ANN401  # of a wrong type
    with pytest.raises(ConfigError, match=r"handler is an? (asynchronous )?generator function|handler is not callable"):
        check_handler(handler)
