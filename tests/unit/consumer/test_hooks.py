"""Hooks around handlers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import TYPE_CHECKING, Any

import pytest

from kmq_spark import Batch, Message, around
from kmq_spark.testing import InMemoryQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def noted(notes: list[Any], given: Message | Batch) -> Iterator[None]:
    notes.append(("before", type(given)))
    try:
        yield
    except Exception as error:
        notes.append(("failed", str(error)))
        raise
    notes.append("after")


def fail_once(message: Message) -> None:
    if message.delivery_count == 1:
        raise ValueError("no such order")


async def fail_once_in_a_loop(message: Message) -> None:
    fail_once(message)


@pytest.mark.parametrize("handler", [fail_once, fail_once_in_a_loop, functools.partial(fail_once_in_a_loop)])
def test_hook_is_called_before_and_after_a_handler_and_when_it_fails(handler: Callable[[Message], Any]) -> None:
    queue, notes = InMemoryQueue(rules={"backoff": "none"}), list[Any]()
    queue.producer().send("a")
    summary = queue.work(around(handler, lambda given: noted(notes, given)))
    assert (summary.acked, summary.failed) == (1, 1)
    assert notes == [("before", Message), ("failed", "no such order"), ("before", Message), "after"]


def test_hook_gets_the_batch_of_a_handler_of_batches() -> None:
    queue, notes = InMemoryQueue(), list[Any]()
    queue.producer().send("a")
    queue.producer().send("b")

    def store(batch: Batch) -> None:
        notes.append(len(batch))

    assert queue.work(around(store, lambda given: noted(notes, given)), batch=2).acked == 2
    assert notes == [("before", Batch), 2, "after"]


def refuse(_given: Message | Batch) -> contextlib.AbstractContextManager[None]:
    raise PermissionError("not now")


@contextlib.contextmanager
def break_afterwards(_given: Message | Batch) -> Iterator[None]:
    yield
    raise PermissionError("not now")


@pytest.mark.parametrize("hook", [refuse, break_afterwards])
@pytest.mark.parametrize("handler", [lambda _message: None, functools.partial(asyncio.sleep, 0)])
def test_exception_of_a_hook_is_a_failure_of_its_message(handler: Callable[[Any], Any], hook: Any) -> None:  # noqa: ANN401  # a hook
    """Also one that a hook raises when the handler has succeeded."""
    queue = InMemoryQueue(rules={"max_deliveries": 1})
    queue.producer().send("a")
    assert queue.work(around(handler, hook)).failed == 1
    queue.advance(3_600)
    (letter,) = queue.dead_letters()
    assert letter.reason.endswith("PermissionError: not now")
