"""A query that is started again, its batch function, and errors of Spark in one line of a log."""

from __future__ import annotations

import gc
import time
import weakref
from contextlib import contextmanager
from threading import Event, Thread, Timer
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from py4j.protocol import Py4JNetworkError
from pyspark.errors import StreamingQueryException

from kmq_spark.errors import FencedError, KafkaClientError, KmqError
from kmq_spark.spark.queries import BatchFunction, RestartedQuery, is_stop_timeout, one_line, run_together
from tests.limits import COMES_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql.streaming.query import StreamingQuery


class _SparkQuery:
    """What we use of Spark's query: it ends with an error, after a batch or before one, or runs until it is stopped."""

    def __init__(self, error: Exception | None, *, batches: int = 0) -> None:
        self._error = error
        self.isActive = error is None
        self.lastProgress = SimpleNamespace(batchId=batches) if batches else None

    def stop(self) -> None:
        self.isActive = False

    def awaitTermination(self, _timeout_s: int) -> None:  # noqa: N802  # Spark's name
        if self._error is not None:
            raise self._error


class _Query(RestartedQuery):
    """Ends as it is told, one word a start: an error, an error after a batch, or None for a query that runs on."""

    def __init__(self, *ends: Exception | _SparkQuery | None, limit: int = 2) -> None:
        super().__init__("query of orders", "orders", limit)
        self._ends = list(ends)
        self.helper: Exception | None = None
        self.pauses_s: list[float] = []
        self.log: list[str] = []

    @contextmanager
    def open(self) -> Iterator[StreamingQuery]:
        end = self._ends.pop(0)
        self.log.append("opened")
        try:
            yield end if isinstance(end, _SparkQuery) else _SparkQuery(end)  # type: ignore[misc]  # a part of it
        finally:
            self.log.append("closed")

    def before_stop(self) -> None:
        self.log.append("stopping")

    def helper_failure(self) -> Exception | None:
        return self.helper if self.restarts == 0 else None

    def pause(self, pause_s: float, error: Exception) -> None:
        del error
        self.pauses_s.append(pause_s)


def failed(text: str) -> StreamingQueryException:
    return StreamingQueryException(text)


def test_failed_query_is_started_again_with_growing_pauses_until_the_limit() -> None:
    query = _Query(*(failed(f"disk {number}") for number in range(3)))
    with pytest.raises(KmqError, match="query of orders failed 3 times in a row: got disk 2; correct the cause"):
        query.run()
    assert (query.pauses_s, query.restarts) == ([0.25, 0.5], 2)
    assert query.log == ["opened", "closed"] * 3


def test_batch_that_ends_well_begins_the_count_anew() -> None:
    ends: Sequence[Exception | _SparkQuery] = [failed("a"), failed("b"), _SparkQuery(failed("c"), batches=1)]
    query = _Query(*ends, failed("d"), failed("e"))
    with pytest.raises(KmqError, match="3 times in a row: got e"):
        query.run()
    assert query.pauses_s == [0.25, 0.5, 0.25, 0.5]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FencedError("a newer one"), "a newer one"),
        (KmqError("no such table"), "no such table"),
        (
            ConnectionRefusedError(111, "refused"),
            "query of orders has lost the connection to Spark's JVM: got .*refused",
        ),
    ],
)
def test_failure_that_a_restart_does_not_correct_ends_the_query(error: Exception, said: str) -> None:
    query = _Query(error)
    with pytest.raises(KmqError, match=said):
        query.run()
    assert query.pauses_s == []


def test_failure_of_a_helper_stops_the_query_which_is_started_again() -> None:
    query = _Query(None, KmqError("end"))
    query.helper = KafkaClientError("no TICKs", retriable=True)
    with pytest.raises(KmqError, match="end"):
        query.run()
    assert query.log == ["opened", "stopping", "closed", "opened", "closed"]


def test_queries_that_run_together_end_together_with_the_error_of_the_first() -> None:
    others = [_Query(None), _Query(None)]
    with pytest.raises(KmqError, match="no such table"):
        run_together([*others, _Query(KmqError("no such table"))])
    assert all(query.log in ([], ["opened", "stopping", "closed"]) for query in others)


def test_query_that_does_not_end_after_a_stop_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    """A tracker whose broker is away waits for the time-out of one request after the other."""
    is_away = Event()

    class Hanging(_Query):
        def before_stop(self) -> None:
            is_away.wait()

    query = Hanging(None)
    Timer(0.1, query.stop).start()
    run_together([query], stop_limit_s=0.2)
    is_away.set()
    assert "query of orders has not ended 0.2 s after the stop" in caplog.text


def test_queries_that_run_each_for_itself_go_on_when_one_fails(caplog: pytest.LogCaptureFixture) -> None:
    good, bad = _Query(None), _Query(KmqError("no such topic"))
    raised: list[KmqError] = []

    def run() -> None:
        try:
            run_together([good, bad], ends_all=False)
        except KmqError as error:
            raised.append(error)

    thread = Thread(target=run)
    thread.start()
    while "query of orders has ended, the others go on: no such topic" not in caplog.text:
        time.sleep(0.01)
    assert (bad.trouble(), good.trouble(), thread.is_alive()) == ("failed 1 time(s) in a row: no such topic", "", True)
    good.stop()
    thread.join(COMES_S)
    assert [str(error) for error in raised] == ["no such topic"]


def test_trouble_is_over_with_a_batch_that_was_committed() -> None:
    running = _SparkQuery(None)
    query = _Query(failed("disk full"), running)
    thread = Thread(target=query.run)
    thread.start()
    while query.log != ["opened", "closed", "opened"]:
        time.sleep(0.01)
    assert query.trouble() == "restarting, 1 of 2: disk full"
    running.lastProgress = SimpleNamespace(batchId=1)
    assert query.trouble() == ""
    query.stop()
    thread.join(COMES_S)


class _Client:
    """What a query uses."""


def test_batch_function_calls_until_it_is_closed_and_then_keeps_nothing() -> None:
    client, called = _Client(), []
    alive = weakref.ref(client)
    function = BatchFunction(lambda batch_id, used=client: called.append((batch_id, type(used))))
    del client
    function(7)
    assert called == [(7, _Client)]
    function.close()
    gc.collect()
    assert alive() is None
    with pytest.raises(KmqError, match="a query that has ended: nothing is sent; the next query runs it"):
        function(8)
    assert (len(called), function.failure) == (1, None)


def test_batch_function_keeps_the_exception_of_which_spark_hands_on_the_text() -> None:
    def fail(_batch_id: int) -> None:
        raise FencedError("a newer one")

    function = BatchFunction(fail)
    with pytest.raises(FencedError):
        function(7)
    assert isinstance(function.failure, FencedError)


STOP_TIMEOUT = (
    "An error occurred while calling o110.stop.\n"
    ": java.util.concurrent.TimeoutException: Stream Execution thread for stream kmq-tracker-orders "
    "failed to stop within 15000 milliseconds (specified by spark.sql.streaming.stopTimeout).\n"
    "\tat org.apache.spark.sql.execution.streaming.runtime.StreamExecution.interruptAndAwait(StreamExecution.scala)"
)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KmqError("cannot reach broker\nat 127.0.0.1:1"), "cannot reach broker"),
        (ConnectionRefusedError(111, "Connection refused"), "[Errno 111] Connection refused"),
        (ValueError(), "ValueError"),
        (RuntimeError("An error occurred while calling o7.start"), "An error occurred while calling o7.start"),
    ],
)
def test_line_is_the_first_of_the_text_or_the_name_of_the_error(error: Exception, expected: str) -> None:
    assert one_line(error) == expected


BATCH_FAILED = """[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: \
[FOREACH_BATCH_USER_FUNCTION_ERROR] An error occurred in the user provided function in foreach batch sink. Reason: An \
exception was raised by the Python Proxy. Return Message: Traceback (most recent call last):
  File "py4j/clientserver.py", line 644, in _call_proxy
    return_value = getattr(self.pool[obj_id], method)(*params)
pyspark.errors.exceptions.captured.SparkException: Job aborted due to stage failure: Task 0 in stage 1.0 failed
"""


WORKER_FAILED = """Caused by: org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "worker.py", line 1, in main
ModuleNotFoundError: No module named 'kmq_spark'

\tat org.apache.spark.api.python.BasePythonRunner
"""


@pytest.mark.parametrize(
    ("stack", "cause"),
    [
        (
            "\tat org.apache.spark.scheduler\nCaused by: java.io.IOException: No space left on device\n\tat x",
            "java.io.IOException: No space left on device",
        ),
        (
            WORKER_FAILED,
            "ModuleNotFoundError: No module named 'kmq_spark'",
        ),
        ("Driver stacktrace:\n\tat x", BATCH_FAILED.splitlines()[-1]),
    ],
)
def test_line_names_the_innermost_cause_and_not_what_passed_it_on(stack: str, cause: str) -> None:
    assert one_line(failed(BATCH_FAILED + stack)) == cause


def test_line_names_a_cause_that_is_not_in_the_text() -> None:
    """PySpark keeps it apart, by default."""
    error = RuntimeError("Failed to create new KafkaAdminClient")
    error._cause = RuntimeError("Could not find a 'KafkaClient' entry")  # type: ignore[attr-defined]  # PySpark's
    assert one_line(error) == "Could not find a 'KafkaClient' entry"


def test_line_of_an_exception_of_the_jvm_names_it_and_not_the_call() -> None:
    error = RuntimeError(STOP_TIMEOUT)
    assert one_line(error).startswith("java.util.concurrent.TimeoutException: Stream Execution thread")
    assert is_stop_timeout(error)
    assert not is_stop_timeout(KmqError("cannot reach broker"))


@pytest.mark.parametrize("cause", [ConnectionRefusedError(111, "Connection refused"), Py4JNetworkError("no answer")])
def test_exception_of_a_jvm_that_has_ended_has_a_line_of_its_own(cause: Exception) -> None:
    """Its text is in the JVM: a tracker that was stopped together with its JVM ended with a traceback."""

    class JvmError(Exception):
        def __str__(self) -> str:
            raise cause

    assert one_line(JvmError()) == "JvmError of a JVM that has ended"
    assert not is_stop_timeout(JvmError())
