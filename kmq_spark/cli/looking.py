"""What the commands that only look share: an inspector from the options, and a sign of life while it reads."""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kmq_spark.config import Settings
    from kmq_spark.kafka.inspector import QueueInspector


def quiet_client() -> None:
    """Keep the client's own log from the terminal: what matters of it is in our one line."""
    client = logging.getLogger("kmq_spark.kafka.client")
    # Not by the level: the reason of a failed connection is taken from the lines themselves.
    client.propagate = False
    if not client.handlers:
        client.addHandler(logging.NullHandler())


def inspector_of(queue: str, settings: Settings) -> QueueInspector:
    """Return an inspector of a queue; close it."""
    from kmq_spark.kafka.inspector import QueueInspector  # noqa: PLC0415  # `kmq --help` must not load the client

    quiet_client()
    return QueueInspector(queue, **settings.kafka.reach())


@contextmanager
def reading(queue: str, what: str = "markers") -> Iterator[Callable[[int], None]]:
    """Show how many records were read: on stderr, on a terminal only, and gone when it is done."""
    if not sys.stderr.isatty():
        yield lambda _count: None
        return

    topic = f"{queue}.markers" if what == "markers" else queue

    def told(count: int) -> None:
        sys.stderr.write(f"\r\033[Kreading {topic}: {count:,} {what}")
        sys.stderr.flush()

    try:
        yield told
    finally:
        sys.stderr.write("\r\033[K")
        sys.stderr.flush()
