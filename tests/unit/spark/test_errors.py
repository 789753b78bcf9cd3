"""Errors of Spark in one line of a log."""

from __future__ import annotations

import pytest
from py4j.protocol import Py4JNetworkError

from kmq_spark.errors import KmqError
from kmq_spark.spark.errors import is_stop_timeout, one_line

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
