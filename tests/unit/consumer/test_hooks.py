"""Hooks around handlers."""

from __future__ import annotations

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


def test_exception_of_a_hook_is_a_failure_of_its_message() -> None:
    queue = InMemoryQueue(rules={"max_deliveries": 1})
    queue.producer().send("a")

    def refuse(_given: Message | Batch) -> contextlib.AbstractContextManager[None]:
        raise PermissionError("not now")

    assert queue.work(around(fail_once, refuse)).failed == 1
    queue.advance(3_600)
    (letter,) = queue.dead_letters()
    assert letter.reason.endswith("PermissionError: not now")
