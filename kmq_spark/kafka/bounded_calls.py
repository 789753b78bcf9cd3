"""
Calls of librdkafka that may never return, whatever their time-out: each in a thread of its own.

Rule 1: the caller waits for the answer as long as it likes; a call that does not return keeps its thread and nothing
else.

Source: librdkafka's issues 5456 and 5511.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException

if TYPE_CHECKING:
    from collections.abc import Callable

    from confluent_kafka import Producer

ABORT_SLICE_S = 0.2
POLL_S = 0.05


def in_a_thread(name: str, call: Callable[[], object]) -> Future[None]:
    """
    Make a call in another thread.

    Args:
        name: Of the thread.
        call: Of a client; may raise `KafkaException`.

    Returns:
        Its answer, when there is one.
    """
    answer: Future[None] = Future()

    def run() -> None:
        try:
            call()
        except KafkaException as error:
            answer.set_exception(error)
        else:
            answer.set_result(None)

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer


def aborting(producer: Producer, wait_s: float) -> Future[None]:
    """
    Abort the open transaction; return when it is aborted or the time is over.

    Args:
        producer: Transactional.
        wait_s: The time, seconds. Behind a request that has no answer an abort waits for that request's time-out.

    Returns:
        The answer, if there is one.
    """
    deadline_s = time.monotonic() + wait_s

    def call() -> None:
        while True:
            try:
                # In slices: librdkafka waits for the reports of what it purges, which the caller's thread takes.
                producer.abort_transaction(ABORT_SLICE_S)
            except KafkaException as error:
                cause = error.args[0]
                if cause.fatal() or not cause.retriable() or time.monotonic() > deadline_s:
                    raise
            else:
                return

    answer = in_a_thread("kmq-transaction-abort", call)
    while not answer.done() and time.monotonic() < deadline_s:
        producer.poll(POLL_S)
    return answer
