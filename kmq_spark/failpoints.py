"""
Points in the code at which a test can end the process without cleanup, as a power failure would, or suspend it.

    KMQ_FAILPOINT=tracker.before-commit:3 kmq tracker run orders

ends the process with exit code 137 when it reaches that point for the third time. There is no cleanup and no flush.
`tracker.before-commit:3:stop` suspends it there (SIGSTOP).

Rule 1: almost no cost when unset: each point checks one module variable.
Rule 2: every point is in `FAILPOINTS`, and every name in `FAILPOINTS` is used in the code; a test checks both.
Rule 3: apart from `cli/` and `jobs/`, only this module reads the environment. Spark's Python workers must be able to
crash too, and they inherit only the environment.

Source: TiKV's and FreeBSD's fail points; exit code 137 is what a shell sees after `kill -9`.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kmq_spark.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLE = "KMQ_FAILPOINT"
"""`name`, `name:nth` or `name:nth:stop`."""

ONCE_VARIABLE = "KMQ_FAILPOINT_ONCE_FILE"
"""A file that is created when the point fires. If it exists, no point fires, so a restarted process survives."""

LOG_VARIABLE = "KMQ_FAILPOINT_LOG"
"""A file to which each point that fires appends its name, a line."""

EXIT_CODE = 137

FAILPOINTS: dict[str, str] = {
    "consumer.fetched": "messages are fetched, no START is sent",
    "consumer.start-sent": "a START is sent, whether it is durable is not known",
    "consumer.deferral-sent": "the START of a deferral is sent, whether it is durable is not known",
    "consumer.start-durable": "a START is durable, the position behind it is not committed",
    "consumer.commit-sent": "the position is on its way to the broker",
    "consumer.commit-done": "the broker has confirmed a position",
    "consumer.in-handler": "a handler has the message",
    "consumer.handled": "the handler is done, its ack is not written",
    "consumer.end-sent": "an END is sent, whether it is durable is not known",
    "consumer.release-sent": "a release is sent, whether it is durable is not known",
    "consumer.extension-sent": "a longer lease of a message is sent, whether it is durable is not known",
    "consumer.renewal-sent": "leases are renewed, whether that is durable is not known",
    "consumer.revoked": "the positions of partitions that are taken away are committed, they are not let go",
    "consumer.tx-sent": "results and ENDs are sent in an open transaction",
    "consumer.tx-before-commit": "results and ENDs are durable in an open transaction, its commit is not sent",
    "consumer.tx-committed": "results and ENDs are committed, nothing has taken note of it",
    "tracker.opening": "before init_transactions: the older tracker is not fenced yet",
    "tracker.fenced-older": "after init_transactions: no tracker may write, nothing is read",
    "tracker.positions-read": "the group's offsets are read, no TERM is written",
    "tracker.term-begun": "a TERM stands in every markers partition, nothing is decided under it",
    "tracker.batch": "a batch has its decisions, no transaction is begun",
    "tracker.state-updated": "a Spark worker has updated the state of a partition; ends that worker, not the driver",
    "tracker.message-sent": "a redelivered message is sent in an open transaction",
    "tracker.dead-letter-sent": "a dead letter is sent in an open transaction",
    "tracker.end-sent": "an END is sent in an open transaction",
    "tracker.offsets-added": "the offsets are added to an open transaction",
    "tracker.before-commit": "all of a transaction is sent, its commit is not",
    "tracker.committed": "a transaction is committed, nothing has taken note of it",
    "tracker.chunk-committed": "one of several transactions of a batch is committed, the next is not begun",
    "tracker.aborting": "a transaction has failed, its abort is not sent",
    "tracker.checkpoint-renamed": "a checkpoint that cannot be used has another name, nothing is started anew",
    "tracker.delivered": "all of a batch is committed, Spark's commit log does not say so",
    "ticker.tick-sent": "a TICK is sent",
    "producer.sent": "the messages of a resuming producer are sent in an open transaction, their position is not",
    "producer.position-sent": "messages and position are sent in an open transaction, its commit is not sent",
    "producer.committed": "messages and position are committed, nothing has taken note of it",
    "queue.topic-created": "one topic of a queue is made, the others may be or not",
    "sink.rows-sent": "the rows of a slot are sent in an open transaction, their position is not; ends a Python worker",
    "sink.committed": "rows and position of a slot are committed, its task does not know; ends a Python worker",
    "redrive.message-sent": "a dead letter is sent back in an open transaction",
    "redrive.end-sent": "the END of a dead letter is sent in an open transaction",
    "redrive.before-commit": "all of a redrive's transaction is sent, its commit is not",
    "redrive.committed": "a redrive's transaction is committed, nothing has taken note of it",
}
"""All points: name, and the situation at that point."""


@dataclass(slots=True)
class _Armed:
    """The point that is to fire, and how often it must still be reached."""

    name: str
    passages_left: int
    once_file: str
    log_file: str
    is_stop: bool


def _armed(environment: Mapping[str, str]) -> _Armed | None:
    text = environment.get(VARIABLE, "")
    if not text:
        return None
    name, nth, what, *more = (*text.split(":"), "", "")
    if name not in FAILPOINTS or not (nth or "1").isdecimal() or nth == "0" or what not in {"", "stop"} or any(more):
        raise ConfigError(
            f"failpoint is not known: got {text!r} in {VARIABLE}; expected `name`, `name:nth` or `name:nth:stop`, the "
            "name one of `FAILPOINTS` in kmq_spark/failpoints.py"
        )
    files = environment.get(ONCE_VARIABLE, ""), environment.get(LOG_VARIABLE, "")
    return _Armed(name, int(nth or 1), *files, is_stop=what == "stop")


_ARMED = _armed(os.environ)


def is_armed() -> bool:
    """Return whether any point may fire in this process; for code where even one call a message costs too much."""
    return _ARMED is not None


def failpoint(name: str) -> None:
    """End or suspend the process here if this point of `FAILPOINTS` is armed and has been reached often enough."""
    if _ARMED is not None:
        _pass(_ARMED, name)


def _pass(armed: _Armed, name: str) -> None:
    if armed.name != name:
        return
    armed.passages_left -= 1
    if armed.passages_left > 0:
        return
    if armed.once_file:
        try:
            os.close(os.open(armed.once_file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return
    if armed.log_file:
        file = os.open(armed.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(file, f"{armed.name}\n".encode())
        os.close(file)
    if armed.is_stop:
        armed.name = ""  # once
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    # Skips atexit handlers, `finally` blocks and librdkafka's threads.
    os._exit(EXIT_CODE)
