"""
Call a handler with a batch, and settle every message of it.

Rule 1: if the handler returns None, the messages that it has not settled are acknowledged. If it raises, they are
released.
Rule 2: with `BatchFailed`, or a mapping as its result, the messages that it names are released and the others are
acknowledged.
Rule 3: failures that cannot be read as such (wrong index, wrong type) count as an exception of the handler. No message
is acknowledged because of them.

Source: SQS's `batchItemFailures`; but an unknown entry does not acknowledge anything.
"""

# ruff: noqa: SLF001  # settles batches as the worker does; these methods are not for handlers

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kmq_spark.consumer.batch import Settlement
from kmq_spark.consumer.checks import is_unstarted_work
from kmq_spark.consumer.leases import Verb
from kmq_spark.errors import BatchFailed, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kmq_spark.consumer.batch import Batch, Failures
    from kmq_spark.consumer.worker import RunSummary

# The worker's logger: programs set its level for all that concerns handlers.
logger = logging.getLogger("kmq_spark.consumer.worker")


def handle_batch(handler: Callable[[Batch], object], batch: Batch, counts: RunSummary) -> BaseException | None:
    """
    Call the handler, settle the batch, and count the results.

    Args:
        handler: Called once.
        batch: Held messages.
        counts: Increased by the results.

    Returns:
        The exception that ends the run; None if it goes on.
    """
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
            elif result is not None:
                return _refuse(batch, result)
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


def _refuse(batch: Batch, result: object) -> UsageError:
    """Release the batch uncounted: its handler returned something that is no result of a batch."""
    got = type(result).__name__
    if is_unstarted_work(result):
        message = (
            f"handler returned work that has not run: got {got} for {batch!r}; pass a function that finishes its work "
            "before it returns, for example `lambda batch: asyncio.run(handle(batch))`"
        )
    else:
        message = (
            f"handler of batches returned a wrong type: got {got} for {batch!r}, expected None or a mapping from "
            "indices to exceptions or texts; return nothing if all messages are done"
        )
    batch._release_uncounted()
    if inspect.iscoroutine(result) or inspect.isgenerator(result):
        result.close()  # otherwise Python warns that it was never awaited
    return UsageError(message)


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
    counts.acked += verbs[Verb.ACK]
    counts.released += verbs[Verb.RELEASE]
    counts.rejected += verbs[Verb.REJECT]
