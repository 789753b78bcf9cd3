"""
A streaming query that is started again when it fails: the tracker's, and those of the ledger.

Rule 1: A failure is one line of a log. The line names the cause, not what passed it on: a call of py4j (`o110.stop`), a
stage of Spark, `foreachBatch`.
Rule 2: A stop waits for what the running batch does outside Spark, not for the end of the batch: on a busy topic batch
follows batch.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors import PySparkException
from pyspark.errors.exceptions.base import StreamingQueryException

from kmq_spark.errors import FencedError, KmqError
from kmq_spark.pauses import retry_pause_s

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from pyspark.sql.streaming.query import StreamingQuery

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 30.0

STOP_WAIT_S = 10
"""How long a stop waits for the end of the query after Spark has stopped it."""

JVM_CONNECTION_ERRORS = (Py4JNetworkError, ConnectionError)
"""What py4j raises when the JVM does not answer. Kafka's client raises neither."""

QUERY_ERRORS = (KmqError, PySparkException, Py4JError, ConnectionError)
"""What a query raises: we, Spark, and py4j."""

STOP_LIMIT_S = 20.0
"""
How long a stop waits for all queries, below Kubernetes' grace period of 30 s. Without a broker each request of a query
runs into its time-out.
"""

_LOOK_S = 0.1

_JVM_IS_LOST = "lost the connection to Spark's JVM"

_CAUSE = re.compile(
    r"^(?:Caused by: |: )?([A-Za-z_][\w.$]*(?:Error|Exception|Exit|Interrupt|Failure)\b(?:: (?!Traceback \().*)?)$",
    re.MULTILINE,
)
"""A line of a stack that names an exception, of Java or of Python. One with a traceback behind it says nothing."""

_STOP_TIMED_OUT = "failed to stop within"
"""Part of the text of Spark's exception when a query is still in a batch after `spark.sql.streaming.stopTimeout`."""


class RestartedQuery:
    """
    A streaming query that is started again when it fails, with growing pauses and a limit.

    A subclass says how the query is opened, and which failures a restart cannot correct. `has_ended` after one.
    """

    def __init__(self, name: str, queue: str, restart_limit: int) -> None:
        self.name = name
        self.restarts = 0
        self.stopping = threading.Event()
        self._queue = queue
        self._restart_limit = restart_limit
        self._failures_in_a_row = 0
        self._last_failure = ""
        self.has_ended = False
        self._query: StreamingQuery | None = None

    def open(self) -> AbstractContextManager[StreamingQuery]:
        """Start the query once, with all that it needs; what it needed is closed with the context."""
        raise NotImplementedError

    def is_final(self, error: Exception) -> bool:
        """Return whether a restart cannot correct a failure."""
        return isinstance(error, JVM_CONNECTION_ERRORS) or (isinstance(error, KmqError) and not error.retriable)

    def helper_failure(self) -> Exception | None:
        """Return the failure of a thread beside the query, which ends the query."""
        return None

    def before_stop(self) -> None:
        """Do what must be done before Spark stops the query, such as to close its `BatchFunction`."""

    def trouble(self) -> str:
        """Return what the last failure was, until a batch has been committed after it; empty where all is well."""
        with contextlib.suppress(Py4JError, ConnectionError):
            if self._last_failure and self._query is not None and self._query.lastProgress is not None:
                self._last_failure = ""
        return self._last_failure

    def cause_of(self, error: Exception) -> str:
        """Return what a failure was, in one line."""
        return one_line(error)

    def pause(self, pause_s: float, error: Exception) -> None:
        """Wait before the query is started again."""
        del error
        self.stopping.wait(pause_s)

    def stop(self) -> None:
        """Request that `run` ends; safe in a signal handler."""
        self.stopping.set()

    def run(self) -> None:
        """Run until `stop` is called, or until the query ends by itself (`available-now`)."""
        while not self.stopping.is_set():
            try:
                with self.open() as query:
                    self._query = query
                    self._wait_for_end(query)
            except FencedError as error:
                self._last_failure = one_line(error)
                raise
            except QUERY_ERRORS as error:
                if self.stopping.is_set():
                    logger.warning("%s failed while it stopped: %s", self.name, _stop_failure(error))
                    return
                self._query = None
                self._failures_in_a_row += 1
                self._last_failure = f"failed {self._failures_in_a_row} time(s) in a row: {self.cause_of(error)}"
                if self.is_final(error) or self._failures_in_a_row > self._restart_limit:
                    logger.debug("%s ends with an error", self.name, exc_info=error)
                    if isinstance(error, KmqError):
                        raise
                    raise self._final_error(error) from error
                self._rest(error)
            else:
                return

    def _wait_for_end(self, query: StreamingQuery) -> None:
        """Wait for the end of the query. Stop it after `stop`, or when a helper failed."""
        try:
            while query.isActive and not self.stopping.is_set() and self.helper_failure() is None:
                self.stopping.wait(_LOOK_S)
            if query.isActive:
                self.before_stop()
                query.stop()
            query.awaitTermination(STOP_WAIT_S)
        except StreamingQueryException:
            # A batch that began after `before_stop` is refused; the next start runs it again.
            if self.helper_failure() is None and not self.stopping.is_set():
                raise
        finally:
            # A JVM that is lost does not answer, and the query is not started again.
            with contextlib.suppress(Py4JError, ConnectionError):
                if query.lastProgress is not None:
                    self._failures_in_a_row = 0
        if (failure := self.helper_failure()) is not None:
            raise failure

    def _final_error(self, error: Exception) -> KmqError:
        if isinstance(error, JVM_CONNECTION_ERRORS):
            return KmqError(f"{self.name} has {_JVM_IS_LOST}: got {one_line(error)}; start it again")
        return KmqError(
            f"{self.name} failed {self._failures_in_a_row} times in a row: got {one_line(error)}; correct the cause "
            "and start it again; nothing is lost or written twice"
        )

    def _rest(self, error: Exception) -> None:
        pause_s = retry_pause_s(self._failures_in_a_row, FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self.restarts += 1
        cause = self.cause_of(error)
        self._last_failure = f"restarting, {self._failures_in_a_row} of {self._restart_limit}: {cause}"
        logger.warning(
            "%s failed; restarting in %g s (restart %d of %d): %s",
            self.name, pause_s, self._failures_in_a_row, self._restart_limit, cause,
            extra={"action": "restart", "queue": self._queue},
        )  # fmt: skip
        self.pause(pause_s, error)


class BatchFunction:
    """
    A function for `foreachBatch`, until it is closed.

    py4j keeps a function that was handed to the JVM until Java's collector frees the other side, which may be hours
    later or never. So a closed one keeps nothing that its query used: clients with their connections and threads.

    Attributes:
        failure: What the last call raised; Spark hands on only its text.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function: Callable[..., None] | None = function
        self._lock = threading.Lock()
        self.failure: BaseException | None = None

    def __call__(self, *arguments: Any) -> None:
        """Call the function."""
        with self._lock:
            if self._function is None:
                message = "Spark began a batch of a query that has ended: nothing is sent; the next query runs it again"
                raise KmqError(message)
            try:
                self._function(*arguments)
            except BaseException as error:
                self.failure = error
                raise

    def close(self) -> None:
        """Wait for the end of a running call; from here on the function is never called."""
        # The lock is free while the query stops: a batch that waited for it would keep Spark waiting.
        with self._lock:
            self._function = None


def run_together(
    queries: Sequence[RestartedQuery], *, ends_all: bool = True, stop_limit_s: float = STOP_LIMIT_S
) -> None:
    """
    Run queries in a thread each. When one fails, stop the others, or let them go on; raise the first error.

    After a stop a query that has not ended in time is left behind, as one that was killed: it loses nothing.
    """
    errors: list[BaseException] = []

    def run_one(query: RestartedQuery) -> None:
        try:
            query.run()
        except BaseException as error:  # noqa: BLE001  # the calling thread raises it
            errors.append(error)
            query.has_ended = True
            if not ends_all and len(errors) < len(queries):
                what = one_line(error) if isinstance(error, Exception) else repr(error)
                logger.error(  # noqa: TRY400  # one line
                    "%s has ended, the others go on: %s", query.name, what, extra={"action": "ended_alone"}
                )
                return
            for each in queries:
                each.stop()

    threads = {
        query: threading.Thread(target=run_one, args=(query,), name=f"kmq {query.name}", daemon=True)
        for query in queries
    }
    for thread in threads.values():
        thread.start()
    _wait_for_all(threads, stop_limit_s)
    if errors:
        raise errors[0]


def _wait_for_all(threads: Mapping[RestartedQuery, threading.Thread], stop_limit_s: float) -> None:
    give_up_s = float("inf")
    while running := [query for query, thread in threads.items() if thread.is_alive()]:
        # Join with a timeout, so that signal handlers can run in the main thread.
        threads[running[0]].join(2 * _LOOK_S)
        if all(query.stopping.is_set() for query in threads):
            give_up_s = min(give_up_s, time.monotonic() + stop_limit_s)
        if time.monotonic() > give_up_s:
            for query in running:
                logger.warning(
                    "%s has not ended %g s after the stop: it is left as it is; check the broker",
                    query.name, stop_limit_s, extra={"action": "left_running"},
                )  # fmt: skip
            return


def text_of(error: BaseException) -> str:
    """Return the text of an error; its class and a remark for an exception of a JVM that has ended."""
    try:
        return str(error)
    except (Py4JError, ConnectionError):
        return f"{type(error).__name__} of a JVM that has ended"


def one_line(error: Exception) -> str:
    """Return the innermost cause: the one that an error's text names last; without a stack in it, its first line."""
    while (cause := getattr(error, "_cause", None)) is not None:  # PySpark's way to keep a cause of the JVM
        error = cause
    text = text_of(error).strip()
    if not text:
        return type(error).__name__
    first, _, stack = text.partition("\n")
    causes = _CAUSE.findall(stack)
    return causes[-1] if causes else first


def is_stop_timeout(error: Exception) -> bool:
    """Return whether a query was stopped but its running batch did not end in time."""
    return _STOP_TIMED_OUT in text_of(error)


def _stop_failure(error: Exception) -> str:
    """Return what failed while a query stopped, in one line."""
    if is_stop_timeout(error):
        return "Spark did not end the running batch in time; the next start runs it again"
    if isinstance(error, JVM_CONNECTION_ERRORS):
        return f"{_JVM_IS_LOST}: {one_line(error)}"
    return one_line(error)
