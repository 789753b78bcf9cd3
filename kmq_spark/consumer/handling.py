"""
What a call of a handler did to its messages: a batch is settled, refused results are given back, all is counted.

Rule 1: if the handler returns None, the messages that it has not settled are acknowledged. If it raises, they are
released. With `BatchFailed`, or a mapping as its result, the messages that it names are released and the others are
acknowledged.
Rule 2: failures that cannot be read as such (wrong index, wrong type) count as an exception of the handler. No message
is acknowledged because of them.

Source: SQS's `batchItemFailures`; but an unknown entry does not acknowledge anything.
"""

# ruff: noqa: SLF001  # settles batches as the worker does; these methods are not for handlers

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from kmq_spark.consumer.batch import Settlement
from kmq_spark.consumer.checks import is_unstarted_work
from kmq_spark.consumer.leases import Verb
from kmq_spark.errors import BatchFailed, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kmq_spark.consumer.batch import Batch, Failures
    from kmq_spark.consumer.message import Message
    from kmq_spark.errors import LeaseLostError

# The worker's logger: programs set its level for all that concerns handlers.
logger = logging.getLogger("kmq_spark.consumer.worker")


@dataclass(slots=True)
class RunSummary:
    """
    Counts of a run.

    Attributes:
        acked: Messages acknowledged.
        released: Messages released after a handler saw them, including those of handlers that raised.
        rejected: Messages rejected, for the dead-letter topic.
        failed: Handler calls that raised an `Exception`.
        lost: Messages settled after their lease had run out.
        unseen: Messages released before any handler saw them.
    """

    acked: int = 0
    released: int = 0
    rejected: int = 0
    failed: int = 0
    lost: int = 0
    unseen: int = 0

    def add(self, other: RunSummary) -> None:
        """Add the counts of *other*."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


def count_settled(counts: RunSummary, verb: Verb, count: int = 1) -> None:
    """Count messages that were settled with a verb."""
    if verb is Verb.ACK:
        counts.acked += count
    elif verb is Verb.RELEASE:
        counts.released += count
    elif verb is Verb.REJECT:
        counts.rejected += count


def count_lost(counts: RunSummary, error: LeaseLostError) -> None:
    """Count and log a message whose lease was lost."""
    counts.lost += 1
    logger.warning("%s", error, extra={"action": "lease_lost"})


def refuse_unstarted(given: Message | Batch, result: object) -> UsageError:
    """Release messages uncounted whose handler returned work that has not run yet. Return the error for the run."""
    error = UsageError(
        f"handler returned work that has not run: got {type(result).__name__} for {given!r}; expected a function that "
        "finishes its work before it returns / pass for example `lambda message: asyncio.run(handle(message))`"
    )
    given._release_uncounted()
    if inspect.iscoroutine(result) or inspect.isgenerator(result):
        result.close()  # otherwise Python warns that it was never awaited
    return error


def handle_batch(handler: Callable[[Batch], object], batch: Batch, counts: RunSummary) -> BaseException | None:
    """Call the handler, settle the batch, and add the results to *counts*. Return the exception that ends the run."""
    failed = Settlement()
    try:
        try:
            result = handler(batch)
        except BatchFailed as error:
            failed = _fail(batch, error.failures)
            counts.failed += 1
        else:
            if isinstance(result, Mapping):
                failed = _fail(batch, result)
            elif is_unstarted_work(result):
                return refuse_unstarted(batch, result)
            elif result is not None:
                message = (
                    f"handler of batches returned a wrong type: got {type(result).__name__} for {batch!r}; expected "
                    "None or a mapping from indices to exceptions or texts / return nothing if all messages are done"
                )
                batch._release_uncounted()
                return UsageError(message)
    except BaseException as error:  # the worker passes it to the thread that called `run`
        is_fatal = not isinstance(error, Exception)
        if not is_fatal:
            counts.failed += 1
            logger.exception("handler raised an exception for %r", batch, extra={"action": "handler_failed"})
        _count(counts, batch, {Verb.RELEASE: batch._fail_rest(error)})
        return error if is_fatal else None
    _count(counts, batch, {Verb.RELEASE: failed, Verb.ACK: batch._settle_rest()})
    return None


def _fail(batch: Batch, failures: Failures) -> Settlement:
    settlement = batch._fail(failures)
    for index, reason in failures.items():
        logger.warning(
            "handler failed %d of %d message(s) of a batch, the first is %r: %r",
            len(failures), len(batch), batch[index], reason, extra={"action": "handler_failed"},
        )  # fmt: skip
        break
    return settlement


def _count(counts: RunSummary, batch: Batch, settlements: Mapping[Verb, Settlement]) -> None:
    """Count the batch by verb. Messages that these settlements found lost count as lost."""
    verbs = batch._verb_counts()
    for verb, settlement in settlements.items():
        verbs[verb] -= settlement.late
        lost_count = settlement.late + settlement.gone
        if lost_count:
            counts.lost += lost_count
            logger.warning(
                "leases of %d of %d message(s) of a batch are lost: %s",
                lost_count, len(batch), settlement.why, extra={"action": "lease_lost"},
            )  # fmt: skip
    for verb in Verb:
        count_settled(counts, verb, verbs[verb])
