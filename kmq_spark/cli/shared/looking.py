"""Shared code of read-only commands: create an inspector from the options, and show progress while it reads."""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kmq_spark.config import Settings
    from kmq_spark.inspection.inspector import QueueInspector


def quiet_client() -> None:
    """Hide the Kafka client's log lines; the relevant information is in the error line of the command."""
    client = logging.getLogger("kmq_spark.kafka.client")
    # The level is not changed, because the reason of a failed connection is taken from these log lines.
    client.propagate = False
    if not client.handlers:
        client.addHandler(logging.NullHandler())


def inspector_of(queue: str, settings: Settings) -> QueueInspector:
    """Return an inspector of a queue; the caller must close it."""
    from kmq_spark.inspection.inspector import QueueInspector

    quiet_client()
    return QueueInspector(queue, **settings.kafka.reach())


@contextmanager
def reading(queue: str, what: str = "markers") -> Iterator[Callable[[int], None]]:
    """Show the number of records read of a queue on stderr; see `counting`."""
    with counting(f"{queue}.markers" if what == "markers" else queue, what) as show:
        yield show


@contextmanager
def counting(topic: str, what: str) -> Iterator[Callable[[int], None]]:
    """Show the number of records read of a topic on stderr, on a terminal only; the line is erased at the end."""
    if not sys.stderr.isatty():
        yield lambda _count: None
        return

    def show(count: int) -> None:
        sys.stderr.write(f"\r\033[Kreading {topic}: {count:,} {what}")
        sys.stderr.flush()

    try:
        yield show
    finally:
        sys.stderr.write("\r\033[K")
        sys.stderr.flush()
