"""What PySpark's daemon prints: all but the tracebacks of pipes that were closed in normal work."""

from __future__ import annotations

import io
import traceback

from kmq_spark.spark.python_daemon import QuietStderr


def printed(*errors: Exception) -> str:
    """Return what is left of these errors' tracebacks, and of a line before and after each."""
    stream = io.StringIO()
    stderr = QuietStderr(stream)
    for error in errors:
        print("before", file=stderr)
        try:
            raise error
        except type(error):
            traceback.print_exc(file=stderr)
        print("after", file=stderr)
    return stream.getvalue()


def test_traceback_of_a_closed_pipe_is_dropped_and_nothing_else_is() -> None:
    assert printed(BrokenPipeError(32, "Broken pipe")) == "before\nafter\n"
    both = printed(BrokenPipeError(32, "Broken pipe"), ValueError("a bug"))
    assert both.startswith("before\nafter\nbefore\nTraceback (most recent call last):\n  File")
    assert both.endswith("ValueError: a bug\nafter\n")


def test_closed_pipe_behind_another_is_dropped() -> None:
    """The first one is met by the worker, the second one where it cleans up."""
    stream = io.StringIO()
    stderr = QuietStderr(stream)
    try:
        try:
            raise BrokenPipeError
        finally:
            raise BrokenPipeError
    except BrokenPipeError:
        text = traceback.format_exc()
    print(f"PySpark daemon failed to flush the output to the worker process:\n{text}", file=stderr)
    assert stream.getvalue() == ""
