"""
A handler process: takes messages from its pipe, calls the handler, says what became of them.

Rule 1: it ends when its pipe or its parent ends, not by SIGTERM or Ctrl+C, which a terminal and a supervisor send to
the whole group: the parent drains, and decides.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from operator import index as to_index
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from kmq_spark.consumer.worker import is_coroutine_function, is_unstarted_work
from kmq_spark.errors import BatchFailed, ConfigError
from kmq_spark.worker.handed import Carried, Handed, Outcome
from kmq_spark.worker.handler import load_handler

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


class Start(NamedTuple):
    """What a handler process needs to know; its log is that of the parent."""

    handler: str
    is_batch: bool
    log_level: int
    log_formatter: logging.Formatter | None


def main(start: Start, connection: Connection) -> None:
    """Say that the handler is there, or why not, and handle messages until the pipe is closed."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # Not SIG_IGN, which programs that the handler starts would inherit.
        signal.signal(number, lambda _number, _frame: None)
    Thread(target=_end_with_parent, name="kmq-parent", daemon=True).start()
    log = logging.StreamHandler()
    log.setFormatter(start.log_formatter)
    logging.basicConfig(level=start.log_level, handlers=[log], force=True)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError), asyncio.Runner() as runner:
        try:
            handler = load_handler(start.handler)
        except ConfigError as error:
            connection.send(str(error))
            return
        connection.send("")
        is_coroutine = is_coroutine_function(handler)
        while True:
            handed: Handed = connection.recv()

            def call(given: Any) -> object:  # noqa: ANN401  # a message or a batch
                return runner.run(handler(given)) if is_coroutine else handler(given)

            connection.send(outcome_of(call, handed, is_batch=start.is_batch))


def outcome_of(call: Callable[[Any], object], handed: Handed, *, is_batch: bool) -> Outcome:
    """Call the handler and return what became of the messages. What is no `Exception` ends the process."""
    batch = handed.to_batch()
    given = batch if is_batch else batch[0]
    error: Carried | None = None
    failures: dict[int, Carried] | None = None
    refused = ""
    try:
        try:
            result = call(given)
        except BatchFailed as failed:
            if not is_batch:
                raise
            result = failed.failures
        if is_unstarted_work(result):
            refused = f"handler returned work that has not run: got {type(result).__name__} for {given!r}; await it"
        elif is_batch and isinstance(result, Mapping):
            failures = {range(len(batch))[to_index(index)]: Carried.of(each) for index, each in result.items()}
        elif is_batch and result is not None:
            refused = (
                f"handler of batches returned a wrong type: got {type(result).__name__} for {given!r}; expected None "
                "or a mapping from indices to exceptions or texts"
            )
    except (Exception, asyncio.CancelledError) as raised:  # noqa: BLE001  # the parent's policy decides
        error = Carried.of(raised)
    return Outcome(Outcome.settled_in(batch), error, failures, refused)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
