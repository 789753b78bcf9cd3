"""
Run librdkafka calls that may never return, even when they have a time-out. Each call has its own thread.

Rule 1: The caller chooses how long it waits for the result. A call that never returns blocks its own thread only.

Source: librdkafka issues 5456 and 5511.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, TypeVar

from confluent_kafka import KafkaError, KafkaException

if TYPE_CHECKING:
    from collections.abc import Callable

    from confluent_kafka import Producer

ABORT_SLICE_S = 0.2
POLL_S = 0.05

ANSWER_MARGIN_S = 5.0
"""How long after its own time-out an answer of the admin client is waited for."""

Answer = TypeVar("Answer")


def answer_of(future: Future[Answer], timeout_s: float) -> Answer:
    """
    Return an answer of the admin client.

    The client answers within the time-out of its request. But a process whose client thread is stuck never gets an
    answer (seen: a consumer without `close` that Python's garbage collector destroyed in this thread).

    Args:
        future: As the admin client returns it.
        timeout_s: The `request_timeout` of the request, seconds.

    Raises:
        KafkaException: The request failed, or there is no answer (`_TIMED_OUT`).
    """
    try:
        return future.result(timeout_s + ANSWER_MARGIN_S)
    except TimeoutError:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT)) from None  # noqa: SLF001  # librdkafka's public name


def call_in_thread(name: str, call: Callable[[], object]) -> Future[None]:
    """
    Run a call in a new daemon thread.

    Args:
        name: Name of the thread.
        call: Call of a Kafka client; may raise `KafkaException`.

    Returns:
        A future that completes when the call returns, or fails with its `KafkaException`.
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


def start_abort(producer: Producer, wait_s: float) -> Future[None]:
    """
    Abort the open transaction. Return when it is aborted or when the time is over.

    Args:
        producer: Transactional producer.
        wait_s: How long to wait, seconds. An abort also waits for requests that have no response yet, up to their
            time-out.

    Returns:
        A future of the abort; not done if the abort still runs in its thread.
    """
    deadline_s = time.monotonic() + wait_s

    def call() -> None:
        while True:
            try:
                # Call it in short slices: librdkafka waits for the delivery reports of the records that it purges, and
                # only the `poll` of the caller's thread takes them.
                producer.abort_transaction(ABORT_SLICE_S)
            except KafkaException as error:
                cause = error.args[0]
                if cause.fatal() or not cause.retriable() or time.monotonic() > deadline_s:
                    raise
            else:
                return

    answer = call_in_thread("kmq-transaction-abort", call)
    while not answer.done() and time.monotonic() < deadline_s:
        try:
            producer.poll(POLL_S)
        except KafkaException:
            # A fatal error of the client, for example that it is fenced. The abort reports it too.
            wait([answer], POLL_S)
    return answer
