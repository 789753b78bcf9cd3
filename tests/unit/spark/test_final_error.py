"""Which failures of an enqueue query end the command: our own error is found in the text that Spark raises."""

from __future__ import annotations

import pytest

from kmq_spark.errors import FencedError, KmqError, SinkError, TopicError
from kmq_spark.sink.enqueue import final_error

TEXT = """\
[STREAM_FAILED] Query [id = 1] terminated with exception: Job aborted due to stage failure
Traceback (most recent call last):
  File "life.py", line 162, in write
kmq_spark.errors.{first}

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "life.py", line 166, in write
kmq_spark.errors.{last}
\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:581)
"""


@pytest.mark.parametrize(
    ("first", "last", "is_first", "wanted"),
    [
        ("KafkaClientError: a", "SinkError: other rows: got 1", False, SinkError("other rows: got 1")),
        ("KafkaClientError: a", "ConfigError: no column 'v'", False, SinkError("no column 'v'")),
        # The cause is the client's; the last one names the newer life.
        ("FencedError: client", "FencedError: generation 3 by x", False, FencedError("generation 3 by x")),
        ("KafkaClientError: a", "TopicError: no topic", True, TopicError("no topic")),
    ],
)
def test_error_that_a_repetition_does_not_correct_is_found(
    first: str, last: str, *, is_first: bool, wanted: KmqError
) -> None:
    found = final_error(TEXT.format(first=first, last=last), is_first=is_first)
    assert (type(found), str(found)) == (type(wanted), str(wanted))


@pytest.mark.parametrize(
    "text",
    [
        "java.lang.OutOfMemoryError",
        # A broker that restarts may not know its topics for a moment.
        TEXT.format(first="KafkaClientError: a", last="TopicError: no topic"),
        TEXT.format(first="KafkaClientError: a", last="KafkaClientError: broker away"),
        # Fencing was only a cause: what was raised at the end may be repeated.
        TEXT.format(first="FencedError: client", last="KafkaClientError: broker away"),
    ],
)
def test_other_failure_is_none(text: str) -> None:
    assert final_error(text, is_first=False) is None
