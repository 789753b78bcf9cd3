"""
What becomes of a message whose handler raised: it is failed, retried later, or rejected.

Rule 1: `Retry` and `Reject` say it themselves; a message that cannot be read is rejected. Of all others the caller's
mapping says it by type, the nearest class first; without one the message is failed, and the queue's backoff applies.

Source: Celery's `Retry` and `Reject`, dramatiq's `Retry`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from kmq_spark.consumer.leases import Settled, Verb
from kmq_spark.consumer.message import failure_of, text_of_failure
from kmq_spark.core.durations import milliseconds
from kmq_spark.core.markers import MAX_TEXT_CHARS
from kmq_spark.errors import ConfigError, KmqError, UnreadableError


class Retry(KmqError):  # noqa: N818  # programs raise it to `run`; nothing of ours raises it to a program
    """
    The work on a message failed in a way that its handler expects: the message is delivered again.

    A handler of `QueueConsumer.run` raises it; no traceback is logged.

    Attributes:
        reason: What went wrong; if empty, the exception from which this one was raised.
        delay_ms: Time until the message is due, to which the queue's backoff is added, milliseconds.
    """

    def __init__(self, reason: str = "", *, delay: float | timedelta = 0) -> None:
        """*delay*: seconds or a timedelta, 0 to 12 hours; ConfigError beyond that."""
        super().__init__(reason)
        self.reason = reason
        self.delay_ms = milliseconds("delay of Retry", delay)


class Reject(KmqError):  # noqa: N818  # as `Retry`
    """
    A message cannot be handled: it becomes a dead letter at once, and is not delivered again.

    A handler of `QueueConsumer.run` raises it; no traceback is logged.

    Attributes:
        reason: Text of the dead letter; if empty, the exception from which this one was raised.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


Rule = float | timedelta | type[Reject]


class FailurePolicy:
    """The policy of one run: *retry* is a delay, or `Reject`, by type of exception."""

    def __init__(self, retry: Mapping[type[BaseException], Rule] | None = None) -> None:
        if retry is not None and not isinstance(retry, Mapping):
            message = f"retry is not a mapping: got {retry!r}; expected delays, or Reject, by type of exception"
            raise ConfigError(message)
        self._delays_ms: dict[type[BaseException], int | None] = {UnreadableError: None}
        for kind, rule in (retry or {}).items():
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                message = f"retry names what no handler raises: got {kind!r}; expected a class of exceptions"
                raise ConfigError(message)
            self._delays_ms[kind] = None if rule is Reject else milliseconds(f"retry of {kind.__name__}", rule)  # type: ignore[arg-type]  # a duration, or it raises

    def is_expected(self, error: BaseException | str) -> bool:
        """Return whether an error needs no traceback in the log."""
        return isinstance(error, (Retry, Reject, str)) or self._kind(error) is not None

    def settled(self, error: BaseException | str) -> Settled:
        """Return how a message is settled whose work failed so; its offset is not set."""
        if isinstance(error, Reject):
            return _rejected(error.reason or text_of_failure(error.__cause__ or error))
        if isinstance(error, Retry):
            return failure_of(error.reason or error.__cause__ or error, error.delay_ms)
        kind = None if isinstance(error, str) else self._kind(error)
        if kind is None:
            return failure_of(error)
        delay_ms = self._delays_ms[kind]
        return _rejected(text_of_failure(error)) if delay_ms is None else failure_of(error, delay_ms)

    def _kind(self, error: BaseException) -> type[BaseException] | None:
        return next((each for each in type(error).__mro__ if each in self._delays_ms), None)


def _rejected(reason: str) -> Settled:
    return Settled(Verb.REJECT, -1, reason=reason[:MAX_TEXT_CHARS])
